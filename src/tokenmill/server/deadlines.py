"""Deadlines of many connections. Owns: one timer for all that end in the same quarter of a second.

A timer per connection would take more memory than all else that is kept of a waiting connection.
Must not know: what ends.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

A_SECOND = 4
"""Timers per second. A deadline may be late by the time between two timers."""


class Ending(Protocol):
    """Something with a deadline. `due`: the last result of `Deadlines.add`; None: there is no deadline."""

    due: int | None

    def late(self) -> None:
        """The deadline has passed."""
        ...


class Deadlines:
    """All deadlines of one event loop."""

    def __init__(self) -> None:
        self._ends: dict[int, set[Ending]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, ending: Ending, seconds: float) -> int:
        """Call `late` this many seconds from now, unless `drop` is called first."""
        due = math.ceil((loop.time() + seconds) * A_SECOND)
        together = self._ends.get(due)
        if together is None:
            together = self._ends[due] = set()
            loop.call_at(due / A_SECOND, self._ring, due)
        together.add(ending)
        return due

    def drop(self, ending: Ending, due: int) -> None:
        """Cancel the deadline."""
        together = self._ends.get(due)
        if together is not None:
            together.discard(ending)

    def _ring(self, due: int) -> None:
        for ending in self._ends.pop(due, ()):
            if ending.due == due:  # an earlier one may have ended others
                ending.due = None
                ending.late()
