"""What a step costs by how many tokens it computes. Owns: measured times of steps, and what lies between them.

A step of a few tokens more may cost next to nothing (weights are read once for all) or nearly as much as these tokens
alone; where that changes is a matter of the machine and the model. So it is measured. Must not know: drafts, plans.
"""

from __future__ import annotations

from bisect import bisect_left, insort

DOWN, UP, MOST_UP = 0.5, 0.04, 1.5
"""Weights of a time below and above what is known, and how many times that it may count for: what takes longer than
usual had something else to do."""
FIRST = 3
"""Times of which the smallest one counts, as the first one may have compiled something."""
FINE, COARSE = 64, 16
"""Up to so many tokens each number is a place of its own, from there on so many share one."""


class Curve:
    """Seconds of a step by its tokens."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.known: list[int] = []
        self.seen: dict[int, int] = {}

    def learn(self, tokens: int, seconds: float) -> None:
        """A step was timed."""
        at = _place(tokens)
        before = self.seconds.get(at)
        self.seen[at] = self.seen.get(at, 0) + 1
        if before is None:
            insort(self.known, at)
            self.seconds[at] = seconds
        else:
            self.seconds[at] = min(before, seconds) if self.seen[at] <= FIRST else taken_in(before, seconds)

    def knows(self, tokens: int) -> bool:
        """Were steps of so many tokens timed?"""
        return self.seen.get(_place(tokens), 0) >= FIRST

    def taken(self, tokens: int) -> float | None:
        """Seconds of a step of so many tokens; None: none were timed."""
        return self.seconds.get(_place(tokens))

    def more(self, tokens: int, base: int) -> float | None:
        """What a step of so many tokens costs beside one of `base`, in such steps; None: nothing above is known."""
        first, at, low = self.seconds[_place(base)], _place(tokens), _place(base)
        if at in self.seconds:
            return max(0.0, self.seconds[at] / first - 1.0)
        here = bisect_left(self.known, at)
        if self.known[here - 1] > low:
            low = self.known[here - 1]
        elif here == len(self.known):
            return None
        if here < len(self.known):  # in a line to the next one
            share = (at - low) / (self.known[here] - low)
            found = (1 - share) * self.seconds[low] + share * self.seconds[self.known[here]]
        else:  # as far on
            found = first + (self.seconds[low] - first) * (at - base) / (low - base)
        return max(0.0, found / first - 1.0)


def taken_in(before: float, seconds: float) -> float:
    """What is known of a time when it was measured once more."""
    if seconds < before:
        return before + DOWN * (seconds - before)
    return before + UP * (min(seconds, MOST_UP * before) - before)


def _place(tokens: int) -> int:
    return tokens if tokens <= FINE else -(-tokens // COARSE) * COARSE
