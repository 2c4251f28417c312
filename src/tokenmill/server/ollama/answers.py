"""Ollama's answers: NDJSON streams and whole objects. Owns: their shapes, and times in nanoseconds.

Must not know: engines, sockets.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from tokenmill.server.context import MISSING
from tokenmill.server.errors import HttpError
from tokenmill.server.openai.chat import Chat
from tokenmill.server.openai.logprobs import chat_logprobs
from tokenmill.server.translated_chat import listen
from tokenmill.text.messages.message import Call, Event, Message
from tokenmill.text.messages.values import is_json, read_arguments

encode = msgspec.json.Encoder().encode
LOADED = 1
"""The time to load a model that is loaded, in nanoseconds: clients take 0 as missing."""
REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length"}


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def moment(seconds: float) -> str:
    """The time of a file in the same form."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def error_body(found: HttpError) -> bytes:
    """{"error": "..."}, with the words by which Ollama's clients know what is wrong."""
    message = found.message
    if found.status == 404 and found.param == "model" and message.startswith("The model "):
        message = message.removeprefix("The ").replace(MISSING, "not found", 1)
    if found.overflow is not None:
        message = f"the input length exceeds the context length: {message}"
    return encode({"error": message})


class Answer:
    """One answer. `generate`: the text is under `response`, else in a message."""

    def __init__(self, chat: Chat, model: str, *, generate: bool) -> None:
        self.chat, self.model, self.generate = chat, model, generate
        self.said = Message()

    async def lines(self) -> AsyncIterator[bytes]:
        """One object per step. The last one has `done` and the figures."""
        rows: list[Any] = []  # a step without text leaves its log-probabilities to the next line
        async for heard in listen(self.chat):
            self.said.add(heard.events)
            rows += heard.logprobs
            shown = self._shown(heard.events)
            ended = heard.finish_reason is not None
            # arguments are objects in this API, so calls appear when they are complete
            calls = self._calls(heard.finish_reason) if ended else []
            if shown or calls or ended:
                line = self._body(*_texts(shown), calls=calls, logprobs=rows)
                rows = []
                yield (encode({**line, "done": False}) + b"\n" if not ended else self._last(line, heard.finish_reason))

    async def whole(self) -> dict[str, Any]:
        """The whole answer as one object."""
        rows: list[Any] = []
        reason: str | None = None
        async for heard in listen(self.chat):
            self.said.add(heard.events)
            rows += heard.logprobs
            reason = heard.finish_reason
        said = self.said
        body = self._body(said.content, said.reasoning, calls=self._calls(reason), logprobs=rows)
        return {**body, "done": True, **self._figures(reason)}

    def _last(self, line: dict[str, Any], reason: str | None) -> bytes:
        """The last text and, as in Ollama, the figures in a line of their own."""
        empty = self._body("", "", calls=[], logprobs=[])
        first = b"" if line == {**empty, "created_at": line["created_at"]} else encode({**line, "done": False}) + b"\n"
        return first + encode({**empty, "done": True, **self._figures(reason)}) + b"\n"

    def _calls(self, reason: str | None) -> list[Call]:
        """The calls, without one that the answer's length cuts: its arguments would look like none."""
        calls = self.said.calls
        return calls[:-1] if reason == "length" and calls and not is_json(calls[-1].arguments) else calls[:]

    def _shown(self, events: Sequence[Event]) -> list[Event]:
        return [e for e in events if e.kind in ("content", "reasoning") and e.text]

    def _body(self, content: str, thinking: str, *, calls: Sequence[Any], logprobs: Sequence[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.model, "created_at": now()}
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if self.generate:
            found |= {"response": content, **more}
        else:
            found["message"] = {"role": "assistant", "content": content, **more}
            if calls:
                found["message"]["tool_calls"] = [_call(i, c) for i, c in enumerate(calls)]
        if self.chat.body.logprobs and logprobs:
            found["logprobs"] = chat_logprobs(logprobs, self.chat.top, self.chat.names)["content"]
        return found

    def _figures(self, reason: str | None) -> dict[str, Any]:
        usage, times = self.chat.job.usage(), self.chat.job.timings()
        first, rest = (
            max(round((times.get(name) or 0.0) * 1e6), int(counted > 0))  # clients divide by these
            for name, counted in (
                ("time_to_first_token_ms", usage["prompt_tokens"]),
                ("generation_time_ms", usage["completion_tokens"]),
            )
        )
        return {
            "done_reason": REASONS.get(reason or "stop", reason),
            "total_duration": first + rest,
            "load_duration": LOADED,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": first,
            "eval_count": usage["completion_tokens"],
            "eval_duration": rest,
        }


def _texts(events: Sequence[Event]) -> tuple[str, str]:
    content = "".join(e.text for e in events if e.kind == "content")
    return content, "".join(e.text for e in events if e.kind == "reasoning")


def _call(index: int, call: Any) -> dict[str, Any]:
    function = {"index": index, "name": call.name, "arguments": read_arguments(call.arguments)}
    return {"id": f"call_{secrets.token_hex(8)}", "function": function}
