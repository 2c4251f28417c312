"""Anthropic's answers: a message, or its events. Owns: content blocks and their order.

Must not know: engines, sockets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import msgspec

from tokenmill.core.errors import ContextError
from tokenmill.server.errors import HttpError
from tokenmill.server.openai.chat import Chat
from tokenmill.server.prices import cost_field
from tokenmill.server.translated_chat import hear_all, listen
from tokenmill.text.messages.message import Event, Message
from tokenmill.text.messages.values import read_arguments

encode = msgspec.json.Encoder().encode
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_BLOCK = {"content": "text", "reasoning": "thinking", "call": "tool_use", "arguments": "tool_use"}


def error_object(found: HttpError) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = ERRORS.get(found.status, "invalid_request_error" if found.status < 500 else "api_error")
    told = {"type": kind, "message": _overflow(found.overflow) + found.message}
    return {"type": "error", "error": told, "request_id": found.request_id}


def _overflow(error: ContextError | None) -> str:
    """The words by which this API's clients see that a conversation is too long for the context."""
    if error is None:
        return ""
    if error.new is None:
        return f"prompt is too long: {error.prompt} tokens > {error.context - 1} maximum. "
    return f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.new} > {error.context}. "


def error_body(found: HttpError) -> bytes:
    """The body of an error answer."""
    return encode(error_object(found))


def usage(chat: Chat, said: Message | None = None) -> dict[str, Any]:
    """The token counts, with cached tokens apart. `said`: the message whose thinking is counted."""
    found = chat.usage(said.reasoning if said is not None else "")
    cached = found["prompt_tokens_details"]["cached_tokens"]
    thinking = found.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": found["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": thinking},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
        "speed": "standard",
        **cost_field(found),
    }


async def counted(chat: Chat, said: Message) -> dict[str, Any]:
    """The same. Long thinking is counted in a thread, so that other requests need not wait."""
    return await chat.context.bodies.run_in_thread(len(said.reasoning), partial(usage, chat, said))


_OF_DELTAS = (
    *("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"),
    *("output_tokens_details", "server_tool_use"),
)
"""The counts that a stream's last event repeats."""


def ending(reason: str | None, stop: Any) -> dict[str, Any]:
    """Why the message ended. There are no containers here, and refusals have no details."""
    sequence = stop if isinstance(stop, str) and reason not in ("tool_calls", "length") else None
    usual = "end_turn" if sequence is None else "stop_sequence"
    kind = {"tool_calls": "tool_use", "length": "max_tokens"}.get(reason or "", usual)
    return {"stop_reason": kind, "stop_sequence": sequence, "stop_details": None, "container": None}


def head(chat: Chat, message_id: str) -> dict[str, Any]:
    """A message without content."""
    found = {"id": message_id, "type": "message", "role": "assistant", "model": chat.model, "content": []}
    nothing = ("stop_reason", "stop_sequence", "stop_details", "container", "diagnostics")
    return {**found, **dict.fromkeys(nothing)}


async def whole(chat: Chat, message_id: str) -> dict[str, Any]:
    """The message with all blocks."""
    said, heard = await hear_all(chat)
    blocks = Blocks(chat)
    blocks.take(heard.events)
    blocks.close()
    reason = heard.finish_reason if not blocks.called or heard.finish_reason == "length" else "tool_calls"
    done = {**head(chat, message_id), "content": blocks.whole(), **ending(reason, heard.stop_reason)}
    return {**done, "usage": await counted(chat, said)}


async def events(chat: Chat, message_id: str) -> AsyncIterator[bytes]:
    """message_start, blocks, message_delta, message_stop."""
    start, message = {**head(chat, message_id), "usage": usage(chat)}, Message()
    yield _event("message_start", {"message": start}) + _event("ping", {})
    blocks = Blocks(chat)
    async for heard in listen(chat):
        found = blocks.take(heard.events)
        message.add(heard.events)
        if heard.finish_reason is not None:
            found += blocks.close()
        if found:
            yield b"".join(_event(item["type"], item) for item in found)
        if heard.finish_reason is not None:
            reason = "tool_calls" if blocks.called and heard.finish_reason != "length" else heard.finish_reason
            found_usage = await counted(chat, message)
            counts = {name: found_usage[name] for name in _OF_DELTAS}
            last = {"delta": ending(reason, heard.stop_reason), "usage": counts}
            yield _event("message_delta", last) + _event("message_stop", {})


class Blocks:
    """Content blocks as they open, grow and close."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.index = -1
        self.open: str | None = None
        self.called = False
        self._made: list[dict[str, Any]] = []
        self._arguments = ""

    def take(self, said: Sequence[Event]) -> list[dict[str, Any]]:
        """The stream's events for these events of the message."""
        found: list[dict[str, Any]] = []
        for event in said:
            kind = _BLOCK[event.kind]
            if event.kind == "call" or kind != self.open:
                found += self.close()
                found.append(self._start(kind, event))
            if event.kind != "call" and event.text:
                found.append(self._delta(event))
        return found

    def close(self) -> list[dict[str, Any]]:
        """Close the open block."""
        if self.open is None:
            return []
        if self.open == "tool_use":
            self._made[-1]["input"] = read_arguments(self._arguments)
        found: list[dict[str, Any]] = []
        if self.open == "thinking":  # there is nothing to sign, because what a client sends back is not verified
            delta = {"type": "signature_delta", "signature": ""}
            found.append({"type": "content_block_delta", "index": self.index, "delta": delta})
        self.open = None
        return [*found, {"type": "content_block_stop", "index": self.index}]

    def whole(self) -> list[dict[str, Any]]:
        """All blocks, complete."""
        return self._made

    def _start(self, kind: str, event: Event) -> dict[str, Any]:
        self.index += 1
        self.open = kind
        block: dict[str, Any]
        if kind == "tool_use":
            self.called, self._arguments = True, ""
            block = {"type": kind, "id": self.chat.turn.call_id(event.id, "toolu_"), "name": event.text, "input": {}}
            block |= {"caller": {"type": "direct"}, "toolset_name": None}
        elif kind == "thinking":
            block = {"type": kind, "thinking": "", "signature": ""}
        else:
            block = {"type": kind, "text": "", "citations": None}
        self._made.append(dict(block))
        return {"type": "content_block_start", "index": self.index, "content_block": block}

    def _delta(self, event: Event) -> dict[str, Any]:
        made = self._made[-1]
        delta: dict[str, Any]
        if event.kind == "arguments":
            self._arguments += event.text
            delta = {"type": "input_json_delta", "partial_json": event.text}
        elif event.kind == "reasoning":
            made["thinking"] += event.text
            delta = {"type": "thinking_delta", "thinking": event.text}
        else:
            made["text"] += event.text
            delta = {"type": "text_delta", "text": event.text}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}


def _event(kind: str, value: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **value}) + b"\n\n"
