"""Responses that are kept. Owns: who may see them, how many there are, and runs that go on without their client.

A run's events are kept with it, so that a client can come back for those that it missed. Must not know: HTTP, shapes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tokenmill.server.errors import HttpError

MOST = 4096
MOST_BYTES = 256 << 20
"""Of kept texts, roughly; the least recently used responses go first."""


@dataclass(slots=True)
class Kept:
    """One response: what it looks like now, the conversation up to it, and its events so far."""

    owner: str
    response: dict[str, Any]
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    events: list[dict[str, Any]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    size: int = 0

    def tell(self, events: list[dict[str, Any]]) -> None:
        """More has happened."""
        self.events += events
        self.changed.set()
        self.changed = asyncio.Event()

    def end(self) -> None:
        """Nothing more will happen."""
        self.ended = True
        self.tell([])

    async def follow(self, after: int = -1) -> AsyncIterator[dict[str, Any]]:
        """Events whose number is greater than `after`, until the end."""
        place = after + 1
        while True:
            while place < len(self.events):
                yield self.events[place]
                place += 1
            if self.ended:
                return
            await self.changed.wait()


class Store:
    """Kept responses by id, bounded in number and size."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.kept: OrderedDict[str, Kept] = OrderedDict()
        self.size = 0

    def add(self, kept: Kept) -> None:
        """Keep one; older ones that have ended make room."""
        self.kept[kept.response["id"]] = kept
        self.weigh(kept)

    def weigh(self, kept: Kept) -> None:
        """One has grown."""
        if self.kept.get(kept.response["id"]) is not kept:
            return
        self.size -= kept.size
        kept.size = sum(len(str(part)) for part in (kept.messages, kept.items, kept.response)) + 400 * len(kept.events)
        self.size += kept.size
        for name in [name for name, old in self.kept.items() if old.ended]:
            if len(self.kept) <= self.most and self.size <= self.most_bytes:
                return
            if self.kept[name] is not kept:
                self._drop(name)

    def find(self, name: str, owner: str) -> Kept:
        """One that this key made; 404 otherwise."""
        kept = self.kept.get(name)
        if kept is None or kept.owner != owner:
            raise HttpError(
                404, f"There is no response {name[:100]!r} here, or it is too long ago.", param="response_id"
            )
        self.kept.move_to_end(name)
        return kept

    def delete(self, name: str, owner: str) -> None:
        """Forget one; a run in progress ends."""
        kept = self.find(name, owner)
        if kept.task is not None:
            kept.task.cancel()
        self._drop(name)

    def _drop(self, name: str) -> None:
        self.size -= self.kept.pop(name).size
