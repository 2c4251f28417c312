"""A conversation in a terminal. Owns: its messages, what /commands do to it, and which turns still fit the context.

Must not know: engines, terminals, torch. `count` (messages -> prompt tokens) comes from the caller.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.core.errors import ParameterError, TooLargeError

Messages = list[dict[str, str]]
HELP = """\
/help            this text
/clear           forget the conversation (the system message stays)
/system [TEXT]   set the system message; without TEXT, remove it
/temp [NUMBER]   set the temperature; without NUMBER, the model's own
/save FILE       write the conversation as JSON
/exit            leave (so does Ctrl-D)
A line that ends with \\ goes on in the next one; a line of three quotes opens and closes a longer text.
Ctrl-C stops an answer."""
MOST_TEMPERATURE = 100.0
ANSWER_SHARE = 4
"""One part in four of the context is kept free for the answer."""
ANSWER_TOKENS = 256


@dataclass(slots=True)
class Conversation:
    """What was said so far."""

    system: str | None = None
    temperature: float | None = None
    turns: Messages = field(default_factory=list)
    ended: bool = False

    def messages(self) -> Messages:
        """System message and turns, as chat templates take them."""
        head = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*head, *self.turns]

    def say(self, role: str, content: str) -> None:
        """Add a turn."""
        self.turns.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Forget a question that got no answer: two questions in a row would confuse most templates."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def fit(self, count: Callable[[Messages], int], context: int) -> int:
        """Drop oldest turns until prompt and answer fit into `context`; -> how many were dropped."""
        room = context - min(ANSWER_TOKENS, context // ANSWER_SHARE)
        dropped = 0
        while (used := count(self.messages())) > room:
            if len(self.turns) < 2:
                self.turns.clear()
                raise TooLargeError(
                    f"That is {used} tokens, and the context of {context} has room for {room}: say less at a time."
                )
            # A conversation starts with a question: its answer leaves with it.
            gone = 2 if self.turns[1]["role"] == "assistant" else 1
            del self.turns[:gone]
            dropped += gone
        return dropped

    def command(self, line: str) -> str:
        """Do what a /command says; -> what to tell."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/help":
            return HELP
        if name in ("/exit", "/quit"):
            self.ended = True
            return ""
        if name == "/clear":
            self.turns.clear()
            return "The conversation starts again."
        if name == "/system":
            self.system = rest or None
            return "The system message is set." if rest else "There is no system message now."
        if name == "/temp":
            return self._temperature(rest)
        if name == "/save":
            return self._save(rest)
        raise ParameterError(f"There is no command {name}; /help lists them.")

    def _temperature(self, text: str) -> str:
        if not text:
            self.temperature = None
            return "The model's own temperature is used."
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= MOST_TEMPERATURE:
            raise ParameterError(f"/temp wants a number from 0 to {MOST_TEMPERATURE:g}, not {text!r}.")
        self.temperature = value
        return f"The temperature is {value:g}."

    def _save(self, name: str) -> str:
        if not name:
            raise ParameterError("/save wants a file name.")
        try:
            Path(name).write_text(json.dumps(self.messages(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ParameterError(f"{name} cannot be written: {error.strerror or error}.") from error
        return f"Saved {len(self.turns)} turns to {name}."
