"""The memory of a burst, or of large bodies, goes back to the system when they are over. Owns: when, and how.

glibc keeps freed memory below the top of its heap for ever unless asked; without glibc nothing is done.
Must not know: requests.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import dataclass

PERIOD_S = 1.0
LEAST = 64
"""The number of requests open at once that makes a burst."""
LEAST_BYTES = 8 << 20
"""Bytes of bodies after which memory is trimmed. What was made of them lies among objects that stay, so its memory does
not go back by itself."""
PAUSE = 10
"""Periods between two trims because of bodies, which may never stop."""
SELDOM = 60
"""Periods between two trims if there were any requests."""


def system_trim() -> Callable[[], object] | None:
    """glibc's function that gives free memory back."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(0)


@dataclass(slots=True)
class Load:
    """The server's load. most: the most requests open at once; taken: bytes of ended requests' bodies. Both count from
    the last time that they were read."""

    open: int = 0
    most: int = 0
    taken: int = 0

    def enter(self) -> None:
        """One more request is open."""
        self.open += 1
        self.most = max(self.most, self.open)

    def leave(self, size: int) -> None:
        """A request has ended whose body had this size."""
        self.open -= 1
        self.taken += size


async def trim_after_bursts(load: Load, trim: Callable[[], object] | None, period: float = PERIOD_S) -> None:
    """Give memory back after bursts. Runs for ever. Small requests without bursts leave holes as well, but slowly."""
    highest = taken = since = 0
    while trim is not None:
        await asyncio.sleep(period)
        highest, load.most = max(highest, load.most), load.open
        taken, load.taken = taken + load.taken, 0
        since += 1
        over = highest >= LEAST and load.open <= highest // 4
        if over or (taken >= LEAST_BYTES and since >= PAUSE) or (highest and since >= SELDOM):
            highest = taken = since = 0
            await asyncio.to_thread(trim)
