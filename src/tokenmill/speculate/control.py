"""How many drafts are worth their cost. Owns: estimates of how drafts survive and of how long steps take.

Drafts are verified without loss, so this decides about time alone, and may look at clocks. What a depth is worth is
(1 + the drafts that are expected to survive) / (the time of a step that makes and tries so many), for steps of about
this many rows; the best depth is used, its neighbours are measured again from time to time. Must not know: plans,
models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
FORGET = 0.05
"""Weight of a new observation of survival."""
SMOOTH = 0.2
"""Weight of a new step time."""
FIRST = 3
"""Steps of each depth that are tried before any is judged; the first one may compile."""
EVERY, PROBE = 256, 8
"""After so many steps, and twice as many each time that nothing came of it, another depth is measured for so many."""
SELDOM, RARELY, FEW = 1024, 16384, 16
"""The most steps between two measurements: with up to FEW rows, and with more, of which each would have to catch up."""
MARGIN = 1.02
"""Another depth must be better by this."""


@dataclass(slots=True)
class Crowd:
    """What is known about steps of some number of rows."""

    seconds: dict[int, float] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    best: int = -1
    steps: int = 0
    next: int = 0
    every: int = EVERY
    probing: int = -1
    turn: int = 0


class Control:
    """One per engine."""

    def __init__(self, most: int, most_rows: int | None, most_tokens: int) -> None:
        """most_rows: with more rows there are no drafts at all; most_tokens: drafts of all rows in a step."""
        self.most = most
        self.most_rows = most_rows
        self.most_tokens = most_tokens
        self.depths = [d for d in DEPTHS if d < most] + [most]
        self.survival = [0.7] * most
        self.crowds: dict[int, Crowd] = {}

    def depth(self, rows: int) -> int:
        """Drafts to leave behind each of this many rows."""
        if not rows or (self.most_rows is not None and rows > self.most_rows):
            return 0
        crowd = self.crowds.setdefault(rows.bit_length(), Crowd())
        allowed = [d for d in self.depths if d * rows <= self.most_tokens]
        unknown = [d for d in reversed(allowed) if crowd.seen.get(d, 0) < FIRST]
        if unknown:
            return unknown[0]
        crowd.steps += 1
        if crowd.steps >= crowd.next:
            self._judge(crowd, rows)
        return min(crowd.probing if crowd.next - crowd.steps > crowd.every - PROBE else crowd.best, allowed[-1])

    def observe(self, tried: int, accepted: int) -> None:
        """The first `accepted` of `tried` drafts survived; those behind the first wrong one say nothing."""
        for place in range(min(tried, accepted + 1)):
            right = 1.0 if place < accepted else 0.0
            self.survival[place] += FORGET * (right - self.survival[place])

    def timed(self, rows: int, depth: int, seconds: float) -> None:
        """The smallest time counts most: what is longer had something else to do."""
        crowd = self.crowds.setdefault(rows.bit_length(), Crowd())
        count = crowd.seen[depth] = crowd.seen.get(depth, 0) + 1
        known = crowd.seconds.get(depth)
        if known is None or count <= FIRST:
            crowd.seconds[depth] = seconds if known is None else min(known, seconds)
        else:
            crowd.seconds[depth] = known + SMOOTH * (min(seconds, 2 * known) - known)

    def expected(self, depth: int) -> float:
        """Tokens of a step."""
        total, alive = 1.0, 1.0
        for place in range(depth):
            alive *= self.survival[place]
            total += alive
        return total

    def _worth(self, crowd: Crowd, depth: int) -> float:
        seconds = crowd.seconds.get(depth)
        return self.expected(depth) / seconds if seconds else 0.0

    def _judge(self, crowd: Crowd, rows: int) -> None:
        """Take the best depth, and choose another one to be measured again."""
        best = max(crowd.seconds, key=lambda d: self._worth(crowd, d))
        if crowd.best < 0 or self._worth(crowd, best) > MARGIN * self._worth(crowd, crowd.best):
            crowd.best, crowd.every = best, EVERY
        else:
            crowd.every = min(2 * crowd.every, SELDOM if rows <= FEW else RARELY)
        at = self.depths.index(crowd.best) + (1, -1, 2, -2)[crowd.turn % 4]
        crowd.turn += 1
        crowd.probing = self.depths[min(max(at, 0), len(self.depths) - 1)]
        crowd.next = crowd.steps + crowd.every
