"""How long a step takes, by the number of tokens it computes. Owns: measured times of steps, and values between them.

A few more tokens may cost next to nothing (weights are read once for all), or nearly as much as these tokens alone.
Where that changes depends on the machine and the model, so it is measured. Times also change with the length of the
texts. If steps have become much shorter since a size was timed, it is judged by what it cost in steps of that time.
Must not know: drafts, plans.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf

DOWN, UP, MOST_UP = 0.5, 0.04, 1.5
"""Weight of a time below the known one, weight of a time above it, and the largest multiple of the known time that
counts: in a long step the machine did something else, too."""
LAST = 6
"""The smallest of so many times counts: in longer steps the machine did something else, too."""
FIRST = 4
"""A size counts once it was timed so often: its first two steps compile or record something."""
CHANGED = 0.8
"""Below this share of the time that a step took when a size was timed, steps have become much shorter."""
STALE = 200
"""Steps with guesses after which the time of a size that was not among them is no longer believed."""
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
        self.turn = 0
        self.timed: dict[int, int] = {}
        """How many steps with guesses were timed, and by place how many had been when it was last timed."""
        self.knots: tuple[int, list[int], list[float]] | None = None
        """For a base's place: places above it, and what steps of these sizes cost in steps of the base, beyond the
        first. None: something was timed since."""

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
        self.knots = None
        if base:
            self.turn += 1
            self.timed[at] = self.turn
            if at != (low := _place(base)) and self.knows(base):
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
        if self.knots is None or self.knots[0] != low:
            self.knots = self._find_knots(low)
        _, places, values = self.knots
        if not places:
            return None
        here = bisect_left(places, at)
        if here == len(places):  # linear beyond the last place
            return values[-1] * (at - base) / (places[-1] - base)
        if places[here] == at:
            return values[here]
        below, value = (places[here - 1], values[here - 1]) if here else (low, 0.0)
        share = (at - below) / (places[here] - below)
        return (1 - share) * value + share * values[here]

    def _find_knots(self, low: int) -> tuple[int, list[int], list[float]]:
        """See `knots`. No step costs more than one of more tokens; a size that was not timed for long is left out,
        unless there is no other."""
        plain, every = min(self.last[low]), self.known[bisect_left(self.known, low + 1) :]
        places = [at for at in every if self.turn - self.timed.get(at, self.turn) < STALE] or every
        values, least = [], inf
        for at in reversed(places):
            then = self.bases.get((low, at), plain)
            least = min(least, max(0.0, min(self.last[at]) / (then if plain < CHANGED * then else plain) - 1.0))
            values.append(least)
        return low, places, values[::-1]


def taken_in(before: float, seconds: float) -> float:
    """The estimate of a time after one more measurement."""
    if seconds < before:
        return before + DOWN * (seconds - before)
    return before + UP * (min(seconds, MOST_UP * before) - before)


def _place(tokens: int) -> int:
    return tokens if tokens <= FINE else -(-tokens // COARSE) * COARSE
