"""Stored chats. Owns: the request and the answer, both encoded, and how they are shown.

Must not know: routes, how answers are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from tokenmill.server.errors import HttpError
from tokenmill.server.openai.schemas import ChatRequest, Message
from tokenmill.server.store import OBJECTS, Kept


@dataclass(slots=True, eq=False)
class KeptChat(Kept):
    """One stored chat completion. `messages`: the request's, as a list; `answer`: the whole completion, None while it
    is being written; `held`: bytes reserved until it ends."""

    kind: ClassVar[str] = "chat completion"
    param: ClassVar[str] = "completion_id"
    model: str
    messages: bytes
    metadata: dict[str, str] = field(default_factory=dict)
    answer: bytes | None = None
    held: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        answer = len(self.answer) if self.answer is not None else self.held
        return OBJECTS + len(self.messages) + answer + sum(len(k) + len(v) + 128 for k, v in self.metadata.items())

    @property
    def busy(self) -> bool:
        """Is it still being answered?"""
        return self.answer is None

    def shown(self) -> dict[str, Any]:
        """The completion with its metadata. Raises 404 while there is none."""
        if self.answer is None:
            raise HttpError(404, f"The chat completion {self.id[:100]!r} is still being written.", param=self.param)
        return {**msgspec.json.decode(self.answer), "metadata": dict(self.metadata)}


def stored_messages(body: ChatRequest, chat_id: str) -> bytes:
    """The request's messages, encoded, as the API lists them."""
    return msgspec.json.encode([_stored(m, f"{chat_id}-{number}") for number, m in enumerate(body.messages)])


def _stored(message: Message, name: str) -> dict[str, Any]:
    found = message.model_dump(exclude_none=True, exclude={"content"})
    content, parts = message.content, None
    if isinstance(content, list):
        parts = [{"type": "text", "text": p if isinstance(p, str) else p.text or p.refusal or ""} for p in content]
        content = "".join(part["text"] for part in parts)
    return {"id": name, **found, "content": content, "content_parts": parts, "refusal": None, "name": message.name}
