"""When a lost engine is started again. Owns: how many deaths are too many, and the pauses between starts that fail.

A server and callers without one follow the same rules. Must not know: engines, clocks.
"""

from __future__ import annotations

from collections import deque

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
"""The first and the longest pause before an engine that could not start or load is tried again."""
MOST_A_MINUTE = 5
"""How many engines may die within a minute. (A server has an option for it.)"""
HOPELESS_S = 60.0
"""How long requests wait if no engine can be started. (A server has an option for it.)"""


def pause_after(vain: int) -> float:
    """Seconds until the next try, after so many that failed before this one."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(vain, 32))


class Deaths:
    """The deaths of the last minute."""

    def __init__(self, most: int = MOST_A_MINUTE) -> None:
        self.most = most
        self.times: deque[float] = deque()

    def count(self, now: float) -> str | None:
        """Note a death. Returns why no engine is to be started any more, if there were too many."""
        self.times.append(now)
        while now - self.times[0] > 60.0:
            self.times.popleft()
        if len(self.times) <= self.most:
            return None
        return f"engines died {len(self.times)} times within a minute; giving up"

    def pardon(self, deaths: int) -> None:
        """Do not count the last `deaths` deaths, because their cause is gone."""
        for _ in range(min(deaths, len(self.times))):
            self.times.pop()
