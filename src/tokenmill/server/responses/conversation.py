"""Stored conversations. Owns: their items in order, each encoded, and how they are shown.

Must not know: routes, what items mean.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from tokenmill.core.errors import TooLargeError
from tokenmill.server.errors import HttpError
from tokenmill.server.fields import MOST_MESSAGES
from tokenmill.server.store import OBJECTS, Kept

_ITEM = 256
"""Bytes that count for the objects around an item's bytes, its id included."""


@dataclass(slots=True, eq=False)
class Conversation(Kept):
    """Items by id, the oldest first. `writers`: responses that will add items."""

    kind: ClassVar[str] = "conversation"
    param: ClassVar[str] = "conversation_id"
    metadata: dict[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    items: dict[str, bytes] = field(default_factory=dict)
    writers: int = 0
    told: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return OBJECTS + self.told + sum(len(k) + len(v) + 128 for k, v in self.metadata.items())

    @property
    def busy(self) -> bool:
        """Will a response add to it?"""
        return self.writers > 0

    def shown(self) -> dict[str, Any]:
        """The conversation object."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created,
            "metadata": dict(self.metadata),
        }

    def add(self, items: list[tuple[str, bytes]]) -> None:
        """Add items."""
        for name, data in items:
            self.items[name] = data
            self.told += len(data) + _ITEM

    def remove(self, name: str) -> None:
        """Delete an item."""
        self.told -= len(self.find(name)) + _ITEM
        del self.items[name]

    def find(self, name: str) -> bytes:
        """One item, encoded. Raises 404 if it is not here."""
        if name not in self.items:
            raise HttpError(404, f"There is no item {name[:100]!r} in this conversation.", param="item_id")
        return self.items[name]

    def check_count(self, more: int) -> None:
        """Refuse more items than a request could read again."""
        if len(self.items) + more > MOST_MESSAGES:
            raise TooLargeError(f"A conversation has at most {MOST_MESSAGES} items.", param="items")

    def encoded(self) -> bytes:
        """All items as one encoded list."""
        return b"[" + b",".join(self.items.values()) + b"]"


def encoded_items(items: list[dict[str, Any]]) -> list[tuple[str, bytes]]:
    """Full items in the form in which a conversation keeps them."""
    return [(item["id"], msgspec.json.encode(item)) for item in items]
