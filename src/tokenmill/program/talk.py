"""A conversation or a plain text that grows. Owns: what was said, and steps that wait to begin.

A step begins when the one before it has ended. Nothing blocks until a value is read. Must not know: engines, HTTP,
sessions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

from tokenmill.core.errors import ParameterError
from tokenmill.core.request import SamplingParams
from tokenmill.program.backends import Backend, Generated, Message
from tokenmill.text.messages.describe import MessageFormat
from tokenmill.text.messages.message import Call
from tokenmill.text.messages.message import Message as Turn
from tokenmill.text.messages.parser import parse_message

Step = Callable[[], None]
MAX_TOKENS = 256


class Surroundings(Protocol):
    """What a talk needs of whatever holds it: where generations run, and waiting while others get on."""

    backend: Backend

    @property
    def form(self) -> MessageFormat: ...
    def talk(self, **options: Any) -> Talk: ...
    def wait(self, *talks: Talk) -> None: ...
    def wait_for(self, talk: Talk, name: str) -> None: ...


class Talk:
    """`values` holds what was generated, by name; read them as `talk["name"]`, which waits."""

    def __init__(self, session: Surroundings, options: Mapping[str, Any]) -> None:
        self.session = session
        self.options = dict(options)
        self.messages: list[Message] = []
        self.text = ""
        self.values: dict[str, Any] = {}
        self.coming: Counter[str] = Counter()
        self.pending: deque[Step] = deque()
        self.busy = False

    # ------------------------------------------------------------ saying

    def system(self, text: str) -> Talk:
        """A system message."""
        return self._message("system", text)

    def user(self, text: str) -> Talk:
        """A user's message."""
        return self._message("user", text)

    def assistant(self, text: str = "") -> Talk:
        """An assistant's message, or the beginning of one that `gen` goes on with."""
        return self._message("assistant", text)

    def tool(self, result: str, call: Call | None = None) -> Talk:
        """What a tool gave back."""
        return self._then(lambda: self.messages.append({"role": "tool", "content": result, **_call_id(call)}))

    def say(self, text: str) -> Talk:
        """More text: of the assistant's message that is open, or of a talk without messages."""
        return self._then(lambda: self._append(text))

    # ------------------------------------------------------------ generating

    def gen(self, name: str = "answer", **options: Any) -> Talk:
        """Let the model go on. `options` are sampling parameters, and regex, choices, json (a schema or pydantic
        model) or grammar, which hold it to a form. With `logprobs`, `NAME_logprob` is the tokens' mean."""
        params = gen_params(options)

        def begin() -> None:
            self._start(params, lambda said: self._take(name, said))

        return self._then_for(name, begin)

    def select(self, name: str, options: Sequence[str], *, total: bool = False) -> Talk:
        """Append the likeliest of some texts: by the mean log-probability of its tokens (`total`: by their sum)."""
        if not options or len(set(options)) != len(options) or not all(isinstance(o, str) and o for o in options):
            raise ParameterError("select needs different texts to choose from.", param="options")

        def begin() -> None:
            scores: dict[str, float] = {}

            def scored(option: str, said: Generated) -> None:
                rows = said.logprobs
                scores[option] = sum(rows) / (1 if total else max(1, len(rows)))
                if len(scores) == len(options):
                    best = max(options, key=lambda o: scores[o])
                    self.values[f"{name}_scores"] = dict(scores)
                    self._take(name, Generated(best, "stop"))

            for option in options:
                held = gen_params({"choices": [option], "logprobs": 0, "ignore_eos": False})
                self._start(held, lambda said, option=option: scored(option, said))  # type: ignore[misc]

        return self._then_for(name, begin)

    # ------------------------------------------------------------ branching, reading

    def fork(self, count: int) -> list[Talk]:
        """Copies that go on by themselves and share what was said so far."""
        self.session.wait(self)
        return [self._copy() for _ in range(count)]

    def __getitem__(self, name: str) -> Any:
        """A value; waits until it has been generated."""
        self.session.wait_for(self, name)
        return self.values[name]

    def calls(self, name: str = "answer") -> list[Call]:
        """The tool calls of a generation; the open message then holds them as calls, with what else it said."""
        said = self.read(name)
        if said.calls:
            last = self.messages[-1]
            last["content"] = said.content
            last["tool_calls"] = [
                {"type": "function", "id": c.id or f"call_{i}", "function": {"name": c.name, "arguments": c.arguments}}
                for i, c in enumerate(said.calls)
            ]
        return said.calls

    def read(self, name: str = "answer") -> Turn:
        """A generation as a message: content, reasoning, calls."""
        tools = {
            t.get("function", t)["name"]: t.get("function", t).get("parameters") for t in self.options.get("tools", ())
        }
        return parse_message(self.session.form, self[name], tools=tools or None)

    # ------------------------------------------------------------ inside

    def _then(self, step: Step) -> Talk:
        self.pending.append(step)
        self.advance()
        return self

    def _then_for(self, name: str, step: Step) -> Talk:
        """A step that brings a value. If it is refused, the talk is as if nobody had asked for it."""

        def begin() -> None:
            try:
                step()
            except BaseException:
                self.busy = False
                self.coming[name] -= 1
                raise

        self.coming[name] += 1
        return self._then(begin)

    def advance(self) -> None:
        """Begin the steps whose turn it is."""
        while self.pending and not self.busy:
            self.pending.popleft()()

    def _message(self, role: str, text: str) -> Talk:
        return self._then(lambda: self.messages.append({"role": role, "content": text}))

    def _append(self, text: str) -> None:
        if not self.messages:
            self.text += text
            return
        if self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        self.messages[-1]["content"] += text

    def _start(self, params: SamplingParams, tell: Callable[[Generated], None]) -> None:
        self.busy = True
        self.session.backend.start(self._ids(), params, tell)

    def _take(self, name: str, said: Generated) -> None:
        self.busy = False
        self.coming[name] -= 1
        self.values[name] = said.text
        if said.logprobs:
            self.values[f"{name}_logprob"] = sum(said.logprobs) / len(said.logprobs)
        self._append(said.text)
        self.advance()

    def _ids(self) -> list[int]:
        backend = self.session.backend
        if not self.messages:
            return backend.encode(self.text)
        last = self.messages[-1]
        if last["role"] != "assistant":
            return backend.render(self.messages, dict(self.options))
        if not last["content"]:
            return backend.render(self.messages[:-1], dict(self.options))
        return backend.render(self.messages, {**self.options, "continue_final_message": True})

    def _copy(self) -> Talk:
        twin = self.session.talk(**self.options)
        twin.messages, twin.text = deepcopy(self.messages), self.text
        twin.values = dict(self.values)
        return twin


def _call_id(call: Call | None) -> dict[str, Any]:
    return {} if call is None or call.id is None else {"tool_call_id": call.id}


def gen_params(options: dict[str, Any]) -> SamplingParams:
    """Sampling parameters; greedy unless a temperature is given."""
    forms = {"regex": "regex", "choices": "choice", "json": "json", "grammar": "grammar"}
    given = {forms[k]: v for k, v in options.items() if k in forms}
    rest = {"temperature": 0.0, "max_tokens": MAX_TOKENS, **{k: v for k, v in options.items() if k not in forms}}
    model = getattr(given.get("json"), "model_json_schema", None)
    if model is not None:
        given["json"] = model()
    if len(given) > 1:
        raise ParameterError(f"gen takes one of {', '.join(forms)}.", param="regex")
    return SamplingParams(**rest, structured_outputs=given or None)
