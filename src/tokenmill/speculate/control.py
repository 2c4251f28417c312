"""How many drafts are worth their cost. Owns: estimates of how drafts survive and of how long steps take.

Drafts are verified without loss, so this decides about time alone, and may look at clocks. What a depth is worth is
(1 + the drafts that are expected to survive) / (the time of a step that makes and tries so many), for steps of about
this many rows; the best depth is used, its neighbours are measured again from time to time. Must not know: plans,
models.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from tokenmill.speculate.curve import taken_in

DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
FORGET = 0.05
"""Weight of a new observation of survival, when there have been many."""
FIRST = 4
"""Times of a depth from which it can be judged; the first ones may have compiled or recorded something."""
HOPE = 0.75
"""A depth that was never tried is taken to cost so much of what others make it seem."""
OFTEN = 16
"""After so many steps the best depth is chosen again."""
EVERY, PROBE = 256, 6
"""After so many steps another depth is measured for so many."""
ALLOWED = 0.005
"""Of all time, for measuring depths that are not the best one."""
FEW, RARELY = 16, 4096
"""With more rows, each of which would have to catch up, there are at least so many steps between two measurements."""
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
    trying: bool = True
    """A depth is being tried for the first time."""


class Control:
    """One per engine."""

    def __init__(self, most: int, most_rows: int | None, most_tokens: int) -> None:
        """most_rows: with more rows there are no drafts at all; most_tokens: drafts of all rows in a step."""
        self.most = most
        self.most_rows = most_rows
        self.most_tokens = most_tokens
        self.depths = [d for d in DEPTHS if d < most] + [most]
        self.survival = [0.7] * most
        self.observed = [0] * most
        self.crowds: dict[int, Crowd] = {}

    def depth(self, rows: int) -> int:
        """Drafts to leave behind each of this many rows."""
        if not rows or (self.most_rows is not None and rows > self.most_rows):
            return 0
        crowd = self.crowds.setdefault(rows.bit_length(), Crowd())
        most = self.depths[bisect_right(self.depths, self.most_tokens // rows) - 1]
        if crowd.trying or crowd.steps < OFTEN or crowd.steps % OFTEN == 0:
            new = (d for d in self.depths if d <= most and crowd.seen.get(d, 0) < FIRST and self._hopeful(crowd, d))
            depth = next(new, -1)
            crowd.trying = depth >= 0
            if crowd.trying:
                return depth
        crowd.steps += 1
        if crowd.steps % OFTEN == 1:
            self._judge(crowd)
        if crowd.steps >= crowd.next:
            self._ask_again(crowd, rows)
        return min(crowd.probing if crowd.next - crowd.steps > crowd.every - PROBE else crowd.best, most)

    def observe(self, tried: int, accepted: int) -> None:
        """The first `accepted` of `tried` drafts survived; those behind the first wrong one say nothing."""
        for place in range(min(tried, accepted + 1)):
            right = 1.0 if place < accepted else 0.0
            self.observed[place] += 1
            weight = max(FORGET, 1 / (2 + self.observed[place]))
            self.survival[place] += weight * (right - self.survival[place])

    def timed(self, rows: int, depth: int, seconds: float) -> None:
        """The smallest time counts most: what is longer had something else to do."""
        crowd = self.crowds.setdefault(rows.bit_length(), Crowd())
        count = crowd.seen[depth] = crowd.seen.get(depth, 0) + 1
        known = crowd.seconds.get(depth)
        if known is None or count <= FIRST:
            crowd.seconds[depth] = seconds if known is None else min(known, seconds)
        else:
            crowd.seconds[depth] = taken_in(known, seconds)

    def worked(self, tokens: int, rows: int, seconds: float) -> None:
        """Where a device makes drafts, `timed` tells it all."""

    def price(self, rows: int, depth: int, tried: int) -> tuple[float, float]:
        crowd = self.crowds.get(rows.bit_length())
        plain = crowd.seconds.get(0) if crowd is not None else None
        if crowd is None or plain is None or depth not in crowd.seconds:
            return 0.0, 0.0
        return plain, max(0.0, crowd.seconds[depth] - plain)

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

    def _hopeful(self, crowd: Crowd, depth: int) -> bool:
        """Could a depth that is not known yet be the best one, going by those below it?"""
        known = sorted(d for d, seen in crowd.seen.items() if d < depth and seen >= FIRST)
        if len(known) < 2:
            return True
        begun = crowd.seconds[known[0]]
        slope = max(0.0, min((crowd.seconds[d] - begun) / (d - known[0]) for d in known[1:]))
        seconds = begun + HOPE * slope * (depth - known[0])
        return self.expected(depth) / seconds > max(self._worth(crowd, d) for d in known)

    def _judge(self, crowd: Crowd) -> None:
        """Take the best depth."""
        best = max(crowd.seconds, key=lambda d: self._worth(crowd, d))
        if crowd.best < 0 or self._worth(crowd, best) > MARGIN * self._worth(crowd, crowd.best):
            crowd.best = best

    def _ask_again(self, crowd: Crowd, rows: int) -> None:
        """Choose another depth to be measured, and how long no other one is."""
        at = self.depths.index(crowd.best) + (1, -1, 2, -2)[crowd.turn % 4]
        crowd.turn += 1
        crowd.probing = self.depths[min(max(at, 0), len(self.depths) - 1)]
        lost = 1.0 - self._worth(crowd, crowd.probing) / max(1e-12, self._worth(crowd, crowd.best))
        needed = int(PROBE * lost / ALLOWED)  # times are uncertain at first, so that is not believed at once
        crowd.every = max(EVERY, min(needed, EVERY << crowd.turn - 1)) if rows <= FEW else max(RARELY, needed)
        crowd.next = crowd.steps + crowd.every


class TreeControl(Control):
    """Where drafts are trees: all of their nodes or none."""

    def __init__(self, most: int, most_rows: int | None, most_tokens: int) -> None:
        super().__init__(most, most_rows, most_tokens)
        self.depths = [0, most]
        self.right = 1.0
        """Drafts of a tree that stand."""

    def observe(self, tried: int, accepted: int) -> None:
        """`accepted` stood, of `tried` levels."""
        self.observed[0] += 1
        self.right += max(FORGET, 1 / (2 + self.observed[0])) * (accepted - self.right)

    def expected(self, depth: int) -> float:
        """Tokens of a step."""
        return 1.0 + self.right if depth else 1.0
