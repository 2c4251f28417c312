"""Storing a chat. Owns: taking its place in the store at the beginning, so that a full store refuses it before any
work, and ending it, complete or not.

Must not know: paths, how answers are made.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator
from functools import partial

import msgspec
from starlette.responses import Response

from tokenmill.server.openai.chat import Chat, whole_answer
from tokenmill.server.openai.chat_stream import ChatStream
from tokenmill.server.openai.stored.kept_chats import KeptChat, stored_messages
from tokenmill.server.openai.stored.streamed import completion_of
from tokenmill.server.routing import Work
from tokenmill.server.store import MOST_BYTES_EACH

_PLAIN = re.compile(r"[A-Za-z0-9._~-]+")


def kept_base(base: str) -> str:
    """An id that may stand in a path."""
    return base if _PLAIN.fullmatch(base) else uuid.uuid4().hex


class ChatStorage:
    """Stores one chat."""

    def __init__(self, chat: Chat, kept: KeptChat) -> None:
        self.chat, self.kept, self.store = chat, kept, chat.context.store

    def end(self, answer: bytes | None) -> None:
        """The answer is complete, or (None) never will be."""
        if answer is None:
            self.store.drop(self.kept)
        else:
            self.kept.answer = answer
            self.store.weigh(self.kept)

    def close(self) -> None:
        """Nothing writes to the chat any more. If it is incomplete now, it is dropped."""
        if self.kept.busy:
            self.end(None)

    async def stream(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same chunks. When all have been taken, the answer that they hold is stored."""
        streamed = bytearray()
        answer: bytes | None = None
        try:
            async for data in chunks:
                if len(streamed) <= MOST_BYTES_EACH:
                    streamed += data
                    self.kept.held = len(streamed)
                    self.store.weigh(self.kept)
                yield data
            if len(streamed) <= MOST_BYTES_EACH:
                bodies = self.chat.context.bodies
                answer = await bodies.run_in_thread(len(streamed), lambda: self._whole(bytes(streamed)))
        finally:
            self.end(answer)

    def _whole(self, said: bytes) -> bytes | None:
        found = completion_of(said)
        if found is None:
            return None
        reasoning = [choice["message"].get("reasoning", "") for choice in found["choices"]]
        return msgspec.json.encode({**found, "usage": found.get("usage") or self.chat.usage(*reasoning)})


async def answer_and_store(work: Work, chat: Chat) -> Response:
    """Answer a chat, and store it. A full store refuses it."""
    messages = await chat.context.bodies.run_in_thread(chat.job.size, lambda: stored_messages(chat.body, chat.id))
    kept = KeptChat(chat.job.tenant, chat.id, chat.model, messages, dict(chat.body.metadata or {}))
    chat.context.store.add(kept)
    storage = ChatStorage(chat, kept)
    work.after.append(storage.close)
    if chat.body.stream:
        return work.stream(storage.stream(ChatStream(chat).chunks()))
    response = await work.whole(partial(whole_answer, chat))
    storage.end(bytes(response.body))
    return response
