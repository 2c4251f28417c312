"""Deadlines of many connections. Owns: one timer for all that end in the same quarter of a second.

A timer of its own costs a connection more memory than everything else that is kept of it while it waits.
Must not know: what ends.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

A_SECOND = 4
"""Timers in a second: how much later than asked a deadline may be."""


class Ending(Protocol):
    """What has a deadline. `due` is what `Deadlines.add` said last, None when there is no deadline."""

    due: int | None

    def late(self) -> None:
        """The time is over."""
        ...


class Deadlines:
    """All of one event loop."""

    def __init__(self) -> None:
        self._ends: dict[int, set[Ending]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, ending: Ending, seconds: float) -> int:
        """`late` is called so many seconds from now, unless `drop` comes first."""
        due = math.ceil((loop.time() + seconds) * A_SECOND)
        together = self._ends.get(due)
        if together is None:
            together = self._ends[due] = set()
            loop.call_at(due / A_SECOND, self._ring, due)
        together.add(ending)
        return due

    def drop(self, ending: Ending, due: int) -> None:
        """It came in time."""
        together = self._ends.get(due)
        if together is not None:
            together.discard(ending)

    def _ring(self, due: int) -> None:
        for ending in self._ends.pop(due, ()):
            if ending.due == due:  # one that rang before may have ended others
                ending.due = None
                ending.late()
