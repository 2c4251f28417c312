"""How long a step takes, by the number of tokens it computes. Owns: measured times of steps, and values between them.

A few more tokens may cost next to nothing (weights are read once for all), or nearly as much as these tokens alone.
Where that changes depends on the machine and the model, so it is measured. Times also change with the length of the
texts. If steps have become much shorter since a size was timed, it is judged by what it cost in steps of that time.
Must not know: drafts, plans.
"""

from __future__ import annotations

from bisect import bisect_left, insort

DOWN, UP, MOST_UP = 0.5, 0.04, 1.5
"""Weight of a time below the known one, weight of a time above it, and the largest multiple of the known time that
counts: in a long step the machine did something else, too."""
LAST = 6
"""The smallest of so many times counts: in longer steps the machine did something else, too."""
FIRST = 4
"""A size counts once it was timed so often: its first two steps compile or record something."""
CHANGED = 0.8
"""Below this share of the time that a step took when a size was timed, steps have become much shorter."""
FINE, COARSE = 64, 16
"""Up to FINE tokens each number has its own place; above, COARSE numbers share one."""


class Curve:
    """Seconds of a step, by its number of tokens."""

    def __init__(self) -> None:
        self.last: dict[int, list[float]] = {}
        """By place: the last times."""
        self.bases: dict[tuple[int, int], float] = {}
        """By the places of a base and of a size: seconds of the base's steps when the size was last timed."""
        self.known: list[int] = []
        self.seen: dict[int, int] = {}

    def learn(self, tokens: int, seconds: float, base: int = 0) -> None:
        """A step was timed; base: how many tokens it would have had without guesses (0: all)."""
        at = _place(tokens)
        self.seen[at] = seen = self.seen.get(at, 0) + 1
        if seen == 1:
            self.last[at] = []
        last = self.last[at]
        last.append(seconds)
        if len(last) > LAST:
            del last[0]
        if seen == FIRST:
            insort(self.known, at)
        if base and at != (low := _place(base)) and self.knows(base):
            self.bases[low, at] = min(self.last[low])

    def knows(self, tokens: int) -> bool:
        """Have steps of this many tokens been timed often enough?"""
        return self.seen.get(_place(tokens), 0) >= FIRST

    def taken(self, tokens: int) -> float | None:
        """Seconds of a step of this many tokens; None: it is not known."""
        return min(self.last[_place(tokens)]) if self.knows(tokens) else None

    def more(self, tokens: int, base: int) -> float | None:
        """The time of a step of this many tokens in steps of `base` tokens, beyond the first; None: nothing above
        `base` is known."""
        at, low = _place(tokens), _place(base)
        if at == low:
            return 0.0
        here = bisect_left(self.known, at)
        if here < len(self.known) and self.known[here] == at:
            return self._above(at, low)
        below = self.known[here - 1] if here else low
        if below > low:
            low_value = self._above(below, low)
        elif here == len(self.known):
            return None
        else:
            below, low_value = low, 0.0
        if here < len(self.known):  # linear between this place and the next
            share = (at - below) / (self.known[here] - below)
            return (1 - share) * low_value + share * self._above(self.known[here], low)
        return low_value * (at - base) / (below - base)  # linear beyond the last place

    def _above(self, at: int, low: int) -> float:
        """The same for a place that is known."""
        plain = min(self.last[low])
        then = self.bases.get((low, at), plain)
        return max(0.0, min(self.last[at]) / (then if plain < CHANGED * then else plain) - 1.0)


def taken_in(before: float, seconds: float) -> float:
    """The estimate of a time after one more measurement."""
    if seconds < before:
        return before + DOWN * (seconds - before)
    return before + UP * (min(seconds, MOST_UP * before) - before)


def _place(tokens: int) -> int:
    return tokens if tokens <= FINE else -(-tokens // COARSE) * COARSE
