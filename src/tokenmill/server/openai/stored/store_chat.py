"""Storing a chat. Owns: taking its place in the store at the beginning, so that a full store refuses it before any
work, and ending it, complete or not.

Must not know: paths, how answers are made.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response

from tokenmill.server.context import Context
from tokenmill.server.openai.chat import Chat
from tokenmill.server.openai.schemas import ChatRequest
from tokenmill.server.openai.stored.kept_chats import KeptChat, stored_messages
from tokenmill.server.openai.stored.streamed import completion_of
from tokenmill.server.request_job import Gathered
from tokenmill.server.routing import written_answer
from tokenmill.server.store import MOST_BYTES_EACH

_PLAIN = re.compile(r"[A-Za-z0-9._~-]+")


def kept_base(base: str) -> str:
    """An id that may stand in a path."""
    return base if _PLAIN.fullmatch(base) else uuid.uuid4().hex


class ChatStorage:
    """Stores one chat. Without `store` it does nothing."""

    def __init__(self, context: Context, chat: Chat, kept: KeptChat | None) -> None:
        self.context, self.chat, self.kept = context, chat, kept

    def end(self, answer: bytes | None) -> None:
        """The answer is complete, or (None) never will be."""
        kept, store = self.kept, self.context.store
        if kept is None:
            return
        if answer is None:
            store.drop(kept)
        else:
            kept.answer = answer
            store.weigh(kept)

    def close(self) -> None:
        """Nothing writes to the chat any more. If it is incomplete now, it is dropped."""
        if self.kept is not None and self.kept.busy:
            self.end(None)

    async def whole(self, make: Callable[[Gathered], Any]) -> Response:
        """The complete answer."""
        answer: bytes | None = None
        try:
            found = await self.chat.job.gather()
            response = await written_answer(self.context, self.chat.job, lambda: make(found))
            answer = bytes(response.body)
            return response
        finally:
            self.end(answer)

    async def stream(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same chunks. When all have been taken, the answer that they hold is stored."""
        if self.kept is None:
            async for data in chunks:
                yield data
            return
        streamed = bytearray()
        answer: bytes | None = None
        try:
            async for data in chunks:
                if len(streamed) <= MOST_BYTES_EACH:
                    streamed += data
                    self.kept.held = len(streamed)
                    self.context.store.weigh(self.kept)
                yield data
            if len(streamed) <= MOST_BYTES_EACH:
                answer = await self.context.bodies.run_in_thread(len(streamed), lambda: self._whole(bytes(streamed)))
        finally:
            self.end(answer)

    def _whole(self, said: bytes) -> bytes | None:
        found = completion_of(said)
        if found is None:
            return None
        reasoning = [choice["message"].get("reasoning", "") for choice in found["choices"]]
        return msgspec.json.encode({**found, "usage": found.get("usage") or self.chat.usage(*reasoning)})


async def begin_storage(context: Context, chat: Chat, body: ChatRequest, owner: str) -> ChatStorage:
    """Take a place in the store if the request asks for it. A full store refuses."""
    if not body.store:
        return ChatStorage(context, chat, None)
    messages = await context.bodies.run_in_thread(chat.job.size, lambda: stored_messages(body, chat.id))
    kept = KeptChat(owner, chat.id, chat.model, messages, dict(body.metadata or {}))
    context.store.add(kept)
    return ChatStorage(context, chat, kept)
