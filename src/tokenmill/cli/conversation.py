"""A conversation in a terminal. Owns: its messages, the effect of /commands, and which turns still fit the context.

Must not know: engines, terminals, torch. `count` (messages -> prompt tokens) comes from the caller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.cli.named_files import read_conversation, read_tools, write_named
from tokenmill.core.errors import ParameterError, TooLargeError, shown
from tokenmill.core.files import in_home

Messages = list[dict[str, Any]]
HELP = """\
/help            this text
/clear           forget the conversation (the system message stays)
/system [TEXT]   set the system message; without TEXT, remove it
/temp [NUMBER]   set the temperature; without NUMBER, the model's own
/model [NAME]    go on with another model; without NAME, say which it is
/tools [FILE]    offer the tools of a JSON file (OpenAI's form); without FILE, none
/thinking        show what the model thought before its last answer
/thinking on|off show reasoning as it comes, or folded
/save FILE       write the conversation as JSON
/load FILE       go on with a conversation that was saved
/bye             leave (so do /exit and Ctrl-D)
When the model has called a tool, what you type next is the tool's result.
A line that ends with \\ goes on in the next one; a line of three quotes opens and closes a longer text.
Ctrl-C stops an answer."""
MOST_TEMPERATURE = 100.0
ANSWER_SHARE = 4
"""One part in this many of the context is kept free for the answer."""
ANSWER_TOKENS = 256


@dataclass(slots=True)
class Settings:
    """Settings for the answers from here on."""

    temperature: float | None = None
    model: str | None = None
    """The other model that the person asks for."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    folded: bool = True


@dataclass(slots=True)
class Conversation:
    """The messages so far."""

    system: str | None = None
    turns: Messages = field(default_factory=list)
    ended: bool = False
    thought: str = ""
    """The last answer's reasoning."""
    model: str = ""
    """The name of the model that answers."""
    settings: Settings = field(default_factory=Settings)

    @property
    def temperature(self) -> float | None:
        """The temperature. None: the model's own."""
        return self.settings.temperature

    def messages(self) -> Messages:
        """System message and turns, as chat templates take them."""
        head = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*head, *self.turns]

    def say(self, role: str, content: str) -> None:
        """Add a turn. A person's turn is the result of the first tool call that waits for one."""
        waiting = self.open_calls()
        if role == "user" and waiting:
            call = waiting[0]
            name = call["function"]["name"]
            self.turns.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
        else:
            self.turns.append({"role": role, "content": content})

    def answer(self, content: str, thought: str, calls: Sequence[tuple[str, str, str]] = ()) -> None:
        """Add the model's turn. calls: id, name and arguments."""
        self.thought = thought
        turn: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            turn["tool_calls"] = [
                {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
                for number, name, arguments in calls
            ]
        self.turns.append(turn)

    def open_calls(self) -> list[dict[str, Any]]:
        """Tool calls of the last answer that have no result yet."""
        for given, turn in enumerate(reversed(self.turns)):
            if turn["role"] != "tool":
                return list(turn.get("tool_calls", ()))[given:]
        return []

    def take_back(self) -> None:
        """Remove a question that got no answer: most templates cannot handle two questions in a row."""
        if self.turns and self.turns[-1]["role"] in ("user", "tool"):
            self.turns.pop()

    def fit(self, count: Callable[[Messages], int], context: int) -> int:
        """Drop the oldest turns until prompt and answer fit into `context`. Returns how many were dropped."""
        room = context - min(ANSWER_TOKENS, context // ANSWER_SHARE)
        before = len(self.turns)
        while (used := count(self.messages())) > room:
            rest = self.turns[1:]
            while rest and rest[0]["role"] != "user":  # a question goes together with its answer
                del rest[0]
            self.turns[:] = rest
            if not rest:
                raise TooLargeError(
                    f"That is {used} tokens, and the context of {context} has room for {room}: say less at a time."
                )
        return before - len(self.turns)

    def command(self, line: str) -> str:
        """Carry out a /command. Returns the text to show."""
        name, *more = line.split(maxsplit=1)
        rest = more[0].strip() if more else ""
        does = {
            "/exit": self._end,
            "/quit": self._end,
            "/bye": self._end,
            "/help": lambda: HELP,
            "/?": lambda: HELP,
            "/clear": self._clear,
        }
        if name in does:
            if rest:
                raise ParameterError(f"{name} takes no argument; {shown(rest)} would have no effect.")
            return does[name]()
        takes = {
            "/system": self._system,
            "/temp": self._temperature,
            "/save": self._save,
            "/load": self._load,
            "/model": self._model,
            "/tools": self._tools,
            "/thinking": self._thinking,
        }
        if name in takes:
            return takes[name](rest)
        raise ParameterError(
            f"There is no command {shown(name)[1:-1]}; /help lists them. A message may begin with a space."
        )

    def _end(self) -> str:
        self.ended = True
        return ""

    def _clear(self) -> str:
        self.turns.clear()
        return "The conversation starts again."

    def _system(self, text: str) -> str:
        self.system = text or None
        return "The system message is set." if text else "There is no system message now."

    def _temperature(self, text: str) -> str:
        if not text:
            self.settings.temperature = None
            return "The model's own temperature is used."
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        self.set_temperature(value, "/temp", text)
        return f"The temperature is {value:g}."

    def set_temperature(self, value: float, said: str, typed: str | None = None) -> None:
        """Set it for the following answers. said: the name by which it was given."""
        if not 0.0 <= value <= MOST_TEMPERATURE:
            wrong = shown(typed if typed is not None else value)
            raise ParameterError(f"{said} takes a number from 0 to {MOST_TEMPERATURE:g}, not {wrong}.")
        self.settings.temperature = value

    def _model(self, name: str) -> str:
        if not name:
            return f"The model is {self.model}."
        self.settings.model = name
        return ""

    def _thinking(self, word: str) -> str:
        if not word:
            return self.thought or "There was no reasoning before the last answer."
        if word not in ("on", "off"):
            raise ParameterError("/thinking takes on, off, or nothing.")
        self.settings.folded = word == "off"
        return "Reasoning is shown as it comes." if word == "on" else "Reasoning is folded."

    def _tools(self, name: str) -> str:
        if not name:
            self.settings.tools = []
            return "No tools are offered."
        self.settings.tools = read_tools(name)
        return f"Offered: {', '.join(tool['function']['name'] for tool in self.settings.tools)}."

    def _save(self, name: str) -> str:
        if not name:
            raise ParameterError("/save needs a file name.")
        text = json.dumps(self.messages(), indent=2, ensure_ascii=False) + "\n"
        write_named(in_home(name), text)
        return f"Saved {len(self.turns)} turns to {name}."

    def _load(self, name: str) -> str:
        if not name:
            raise ParameterError("/load needs a file name.")
        found = read_conversation(name)
        self.system = found[0]["content"] if found and found[0]["role"] == "system" else None
        self.turns[:] = found[self.system is not None :]
        return f"Loaded {len(self.turns)} turns from {name}."
