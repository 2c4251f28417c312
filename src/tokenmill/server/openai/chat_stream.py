"""Streamed chat answers. Owns: chunks in OpenAI's shape, and a fast path for plain text.

Must not know: engines, sockets, message formats.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from tokenmill.core.request import TextDelta
from tokenmill.server.openai.chat import Chat
from tokenmill.server.openai.logprobs import chat_logprobs
from tokenmill.server.openai.stream_pace import StreamPace
from tokenmill.server.sse import DONE, PlainChunks, event
from tokenmill.text.messages.message import Event
from tokenmill.text.messages.parser import MessageParser

_SLOT = "\u0000"


class ChatStream:
    """The chunks of one chat. A chunk that holds only text is three byte strings joined."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        body = chat.body
        self.pace = StreamPace(body, usage_forced=chat.context.options.enable_force_include_usage)
        self.plain: dict[int, PlainChunks] = {}
        self.started: set[int] = set()
        self.parsers: dict[int, MessageParser] = {}
        self.reasoning: dict[int, list[str]] = {}
        self.simple = not (body.logprobs or body.return_token_ids or self.pace.usage_always or body.stream_interval)

    async def chunks(self) -> AsyncIterator[bytes]:
        """All events."""
        async for batch in self.chat.job.batches():
            data = b"".join([self._events(delta) for _, delta in batch])
            if data:
                yield data
        if self.pace.usage_at_end:
            reasoning_chars = sum(len(text) for texts in self.reasoning.values() for text in texts)
            yield event(await self.chat.context.bodies.run_in_thread(reasoning_chars, self._last))
        yield DONE

    def _events(self, delta: TextDelta) -> bytes:
        index = delta.index
        head = b"" if index in self.started else self._first(index)
        if not self.simple or delta.finish_reason is not None:
            return head + self._full(delta)
        if self.chat.turn.plain:
            return head + self._text(index, delta.text) if delta.text else head
        parts = [head]
        for said in self._read(index, delta.text, ended=False):
            if said.kind == "content":
                parts.append(self._text(index, said.text))
            else:
                parts.append(event(self._chunk(index, self._delta(said))))
        return b"".join(parts)

    def _text(self, index: int, text: str) -> bytes:
        plain = self.plain.get(index)
        if plain is None:
            plain = self.plain[index] = PlainChunks(self._chunk(index, {"content": _SLOT}))
        return plain.chunk(text)

    def _read(self, index: int, text: str, *, ended: bool) -> list[Event]:
        """The events that a text adds to the message. Reasoning that the client does not want is only counted."""
        if self.chat.turn.plain:
            return [Event("content", text)] if text else []
        parser = self.parsers.get(index)
        if parser is None:
            parser = self.parsers[index] = self.chat.turn.parser()
        found = parser.feed(text) + (parser.finish() if ended else [])
        self.reasoning.setdefault(index, []).extend(said.text for said in found if said.kind == "reasoning")
        return found if self.chat.body.include_reasoning else [said for said in found if said.kind != "reasoning"]

    def _delta(self, said: Event) -> dict[str, Any]:
        """An event as a delta in OpenAI's shape. A call's id and name come once, with its first piece."""
        if said.kind == "content":
            return {"content": said.text}
        if said.kind == "reasoning":
            return {"reasoning": said.text, "reasoning_content": said.text}
        call: dict[str, Any] = {"index": said.number}
        if said.kind == "call":
            call |= {"id": self.chat.turn.call_id(said.id), "type": "function"}
            call["function"] = {"name": said.text, "arguments": ""}
        else:
            call["function"] = {"arguments": said.text}
        return {"tool_calls": [call]}

    def _first(self, index: int) -> bytes:
        self.started.add(index)
        chunk = self._chunk(index, {"role": self.chat.role, "content": ""})
        task = next(iter(self.chat.job.tasks.values()))
        if self.chat.body.return_token_ids:
            chunk["prompt_token_ids"] = task.request.prompt_ids
        if self.chat.body.return_prompt_text:
            chunk["prompt_text"] = self.chat.prompt
        data = event(self._with_usage(chunk))
        if self.chat.echoed:
            data += event(self._with_usage(self._chunk(index, {"content": self.chat.echoed})))
        return data

    def _full(self, delta: TextDelta) -> bytes:
        body = self.chat.body
        held = self.pace.due(delta.index, delta)
        if not held:
            return b""
        ended = delta.finish_reason is not None
        events = self._read(delta.index, "".join(d.text for d in held), ended=ended)
        chunks = [self._chunk(delta.index, self._delta(one)) for one in events]
        if not chunks:
            chunks = [self._chunk(delta.index, {} if ended else {"content": ""})]
        first, last = chunks[0]["choices"][0], chunks[-1]["choices"][0]
        if body.logprobs:
            rows = [row for d in held for row in d.logprobs or ()]
            first["logprobs"] = chat_logprobs(rows, self.chat.top, self.chat.names) if rows else None
        if body.return_token_ids:
            first["token_ids"] = [t for d in held for t in d.token_ids]
        if ended:
            parser = self.parsers.get(delta.index)
            last["finish_reason"] = self.chat.ended(delta.finish_reason, parser.count if parser else 0)
            last["stop_reason"] = delta.stop_reason
        return b"".join([event(self._with_usage(chunk)) for chunk in chunks])

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self.pace.usage_always:
            chunk["usage"] = self.chat.job.usage(self.pace.said)
        return chunk

    def _last(self) -> dict[str, Any]:
        reasoning = ["".join(said) for said in self.reasoning.values()]
        chunk = {**self._chunk(0, {}), "choices": [], "usage": self.chat.usage(*reasoning)}
        if self.chat.context.options.enable_per_request_metrics:
            chunk["metrics"] = self.chat.job.timings()
        return chunk

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.chat.id,
            "object": "chat.completion.chunk",
            "created": self.chat.created,
            "model": self.chat.model,
            "system_fingerprint": self.chat.context.fingerprint,
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
        }
