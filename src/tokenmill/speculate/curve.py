"""How long a step takes, by the number of tokens it computes. Owns: measured times of steps, and values between them.

A few more tokens may cost next to nothing (weights are read once for all), or nearly as much as these tokens alone.
Where that changes depends on the machine and the model, so it is measured. Must not know: drafts, plans.
"""

from __future__ import annotations

from bisect import bisect_left, insort

DOWN, UP, MOST_UP = 0.5, 0.04, 1.5
"""Weight of a time below the known one, weight of a time above it, and the largest multiple of the known time that
counts: in a long step the machine did something else, too."""
FIRST = 3
"""Of the first times, only the smallest counts: the first one may have compiled something."""
FINE, COARSE = 64, 16
"""Up to FINE tokens each number has its own place; above, COARSE numbers share one."""


class Curve:
    """Seconds of a step, by its number of tokens."""

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
        """Have steps of this many tokens been timed?"""
        return self.seen.get(_place(tokens), 0) >= FIRST

    def taken(self, tokens: int) -> float | None:
        """Seconds of a step of this many tokens; None: no step was timed."""
        return self.seconds.get(_place(tokens))

    def more(self, tokens: int, base: int) -> float | None:
        """The time of a step of this many tokens in steps of `base` tokens; None: nothing above `base` is known."""
        first, at, low = self.seconds[_place(base)], _place(tokens), _place(base)
        if at in self.seconds:
            return max(0.0, self.seconds[at] / first - 1.0)
        here = bisect_left(self.known, at)
        if self.known[here - 1] > low:
            low = self.known[here - 1]
        elif here == len(self.known):
            return None
        if here < len(self.known):  # linear between this place and the next
            share = (at - low) / (self.known[here] - low)
            found = (1 - share) * self.seconds[low] + share * self.seconds[self.known[here]]
        else:  # linear beyond the last place
            found = first + (self.seconds[low] - first) * (at - base) / (low - base)
        return max(0.0, found / first - 1.0)


def taken_in(before: float, seconds: float) -> float:
    """The estimate of a time after one more measurement."""
    if seconds < before:
        return before + DOWN * (seconds - before)
    return before + UP * (min(seconds, MOST_UP * before) - before)


def _place(tokens: int) -> int:
    return tokens if tokens <= FINE else -(-tokens // COARSE) * COARSE
