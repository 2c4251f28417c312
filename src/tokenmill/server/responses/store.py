"""Responses that are kept. Owns: who may see them, how many there are, and runs that go on without their client.

What is kept is kept as encoded bytes and counts as such. When it is too much, the key that keeps most loses the
response that it used least recently: no key can push out another's. Must not know: HTTP, shapes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from tokenmill.core.errors import TooLargeError
from tokenmill.server.errors import HttpError

MOST = 4096
MOST_BYTES = 256 << 20
MOST_BYTES_EACH = 32 << 20
"""Of one response when it begins; its answer comes on top."""
_EACH, _EVENT = 2048, 160
"""What the objects around the bytes weigh."""


@dataclass(slots=True)
class Kept:
    """One response. `items`, `messages` (the conversation up to it) and `events` are encoded; `show` encodes what it
    looks like now."""

    owner: str
    id: str
    background: bool
    items: bytes
    messages: bytes
    show: Callable[[], bytes]
    events: list[bytes] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    told: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return _EACH + len(self.items) + len(self.messages) + self.told

    def tell(self, events: list[bytes]) -> None:
        """More has happened."""
        self.events += events
        self.told += sum(map(len, events)) + _EVENT * len(events)
        self.changed.set()
        self.changed = asyncio.Event()

    def end(self, messages: bytes | None = None) -> None:
        """Nothing more will happen; `messages`: the conversation with its answer."""
        shown = self.show()
        self.show = lambda: shown
        self.messages = messages or self.messages
        self.told += len(shown)
        self.ended = True
        self.tell([])

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """Events whose number is greater than `after`, until the end."""
        place = after + 1
        while True:
            while place < len(self.events):
                yield self.events[place]
                place += 1
            if self.ended:
                return
            await self.changed.wait()


@dataclass(slots=True)
class Shelf:
    """One key's responses, the least recently used first."""

    kept: OrderedDict[str, Kept] = field(default_factory=OrderedDict)
    size: int = 0


class Store:
    """Kept responses by key and id, bounded in number and size."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.shelves: dict[str, Shelf] = {}
        self.weights: dict[str, int] = {}

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(shelf.size for shelf in self.shelves.values())

    def __len__(self) -> int:
        return len(self.weights)

    def add(self, kept: Kept) -> None:
        """Keep one; others that have ended make room."""
        if kept.size > min(MOST_BYTES_EACH, self.most_bytes):
            raise TooLargeError(
                f"A conversation of {kept.size >> 20} MiB is too large to be kept: send store = false.", param="store"
            )
        shelf = self.shelves.setdefault(kept.owner, Shelf())
        shelf.kept[kept.id] = kept
        self.weights[kept.id] = 0
        self.weigh(kept)
        if self._over():
            self._drop(kept)
            raise HttpError(503, "All responses that fit are still being made; try again.", retry_after=5)

    def weigh(self, kept: Kept) -> None:
        """One has grown."""
        if not self.holds(kept):
            return
        shelf = self.shelves[kept.owner]
        shelf.size += kept.size - self.weights[kept.id]
        self.weights[kept.id] = kept.size
        while self._over():
            victim = self._victim(kept)
            if victim is None:
                return
            self._drop(victim)

    def holds(self, kept: Kept) -> bool:
        """May anybody ask for it?"""
        return kept.id in self.weights

    def find(self, name: str, owner: str) -> Kept:
        """One that this key made; 404 otherwise."""
        shelf = self.shelves.get(owner)
        if shelf is None or name not in shelf.kept:
            raise HttpError(
                404, f"There is no response {name[:100]!r} here, or it is too long ago.", param="response_id"
            )
        shelf.kept.move_to_end(name)
        return shelf.kept[name]

    def delete(self, name: str, owner: str) -> None:
        """Forget one; a run in progress ends."""
        kept = self.find(name, owner)
        if kept.task is not None:
            kept.task.cancel()
        self._drop(kept)

    def _over(self) -> bool:
        return len(self.weights) > self.most or self.size > self.most_bytes

    def _victim(self, keep: Kept) -> Kept | None:
        """The least recently used of the key that keeps most; what still runs stays."""
        crowded = len(self.weights) > self.most
        shelves = sorted(self.shelves.values(), key=lambda s: len(s.kept) if crowded else s.size, reverse=True)
        ended = (kept for shelf in shelves for kept in shelf.kept.values() if kept.ended and kept is not keep)
        return next(ended, None)

    def _drop(self, kept: Kept) -> None:
        shelf = self.shelves[kept.owner]
        shelf.size -= self.weights.pop(kept.id)
        del shelf.kept[kept.id]
        if not shelf.kept:
            del self.shelves[kept.owner]
