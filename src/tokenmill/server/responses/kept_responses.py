"""Stored responses. Owns: their events, the clients that follow them, and runs that continue without their client.

Must not know: HTTP, shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import ClassVar

from tokenmill.server.store import OBJECTS, Kept

_EVENT = 160
"""Bytes that count for the objects around an event's bytes."""


@dataclass(slots=True, eq=False)
class KeptResponse(Kept):
    """One stored response. `items`, `messages` (the conversation before it) and `events` are encoded; `show` encodes
    its present state."""

    kind: ClassVar[str] = "response"
    param: ClassVar[str] = "response_id"
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
        return OBJECTS + len(self.items) + len(self.messages) + self.told

    @property
    def busy(self) -> bool:
        """Is it still being generated?"""
        return not self.ended

    def dropped(self) -> None:
        """End its run."""
        if self.task is not None:
            self.task.cancel()

    def tell(self, events: list[bytes]) -> None:
        """Add events."""
        self.events += events
        self.told += sum(map(len, events)) + _EVENT * len(events)
        self.changed.set()
        self.changed = asyncio.Event()

    def end(self, messages: bytes | None = None) -> None:
        """No more events will come. `messages`: the conversation with the answer."""
        shown = self.show()
        self.show = lambda: shown
        self.messages = messages or self.messages
        self.told += len(shown)
        self.ended = True
        self.tell([])

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """The events with numbers above `after`, until the end."""
        place = after + 1
        while True:
            while place < len(self.events):
                yield self.events[place]
                place += 1
            if self.ended:
                return
            await self.changed.wait()


@dataclass(slots=True, eq=False)
class RecentResponse(Kept):
    """The last response of a connection, if it was not to be stored. It counts like any other, but only this connection
    finds it. `name`: the response's own id. `messages`: the encoded conversation with its answer."""

    kind: ClassVar[str] = "response"
    name: str
    messages: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return OBJECTS + len(self.messages)
