"""How many drafts are worth their cost. Owns: estimates of how many drafts stand and of how long steps take.

Verification loses nothing, so this decides about time only and may look at clocks. The worth of a depth, for steps of
about this many rows, is (1 + the drafts expected to stand) / (the time of a step that makes and verifies that many).
The best depth is used, and others are measured again from time to time, no drafts at all every other time. Machines
become faster and slower, so a depth is compared with steps of the best depth just before it. Must not know: plans,
models.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from tokenmill.speculate.curve import taken_in

DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
FORGET = 0.05
"""Weight of a new observation of which drafts stood, once there have been many."""
FIRST = 4
"""A depth is judged after this many timed steps: the first ones may have compiled or recorded something."""
HOPE = 0.75
"""A depth that was never tried is assumed to cost this share of what the times of other depths suggest."""
FURTHER = 0.4
"""A further draft is assumed to cost this share of what the first one does: much is to be done for any number."""
OFTEN = 16
"""Steps after which the best depth is chosen again."""
EVERY, PROBE = 64, 6
"""After EVERY steps or more, another depth is measured for PROBE steps."""
STEADY = 1.15
"""While a depth is measured, times of the best one may change by this factor."""
NEWER = 0.7
"""Weight of a depth's latest measurement beside all earlier ones."""
ALLOWED = 0.005
"""The share of all time that may be spent on measuring depths other than the best one."""
FEW, RARELY = 16, 4096
"""With more than FEW rows, each of which has to catch up, two measurements are at least RARELY steps apart."""
MARGIN = 1.02
"""Another depth must be better by this factor."""


@dataclass(slots=True)
class Probe:
    """Another depth is measured between steps of the best one. Seconds of steps before, meanwhile and behind."""

    before: list[float]
    meanwhile: list[float] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)

    def ratio(self) -> float | None:
        """The time of such a step in steps of the best depth; None: the machine has become faster or slower."""
        first, last = min(self.before), min(self.behind)
        return None if max(first, last) > STEADY * min(first, last) else 2 * min(self.meanwhile) / (first + last)


@dataclass(slots=True)
class Crowd:
    """What is known about steps of about the same number of rows."""

    seconds: dict[int, float] = field(default_factory=dict)
    """By depth, of a step on the machine as it was at first."""
    pace: float = 1.0
    """How much longer the same steps take now."""
    seen: dict[int, int] = field(default_factory=dict)
    best: int = -1
    steps: int = 0
    next: int = 0
    every: int = EVERY
    probing: int = -1
    turn: int = 0
    trying: bool = True
    """A depth is being tried for the first time."""
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=PROBE))
    """Of the best depth."""
    probe: Probe | None = None


class Control:
    """Chooses the number of drafts; there is one per engine."""

    def __init__(self, most: int, most_rows: int | None, most_tokens: int) -> None:
        """most_rows: with more rows there are no drafts. most_tokens: most drafts of all rows in a step."""
        self.most = most
        self.most_rows = most_rows
        self.most_tokens = most_tokens
        self.depths = [d for d in DEPTHS if d < most] + [most]
        self.survival = [0.7] * most
        self.observed = [0] * most
        self.crowds: dict[int, Crowd] = {}

    def depth(self, rows: int) -> int:
        """How many drafts to make for each row, when there are this many rows."""
        most = self._most(rows)
        if not most:
            return 0
        crowd = self._crowd_of(rows)
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

    def resumes(self, rows: int) -> bool:
        """Yes, unless none are best and it will be long until others are measured again."""
        rows = max(1, rows)  # the first ones are about to start
        crowd = self._crowd_of(rows)
        left = crowd.next - crowd.steps
        soon = crowd.trying or crowd.best != 0 or left <= EVERY or left > crowd.every - PROBE
        return self._most(rows) > 0 and soon

    def _most(self, rows: int) -> int:
        """The most drafts that so many rows may get."""
        if not rows or (self.most_rows is not None and rows > self.most_rows):
            return 0
        return self.depths[bisect_right(self.depths, self.most_tokens // rows) - 1]

    def observe(self, tried: int, accepted: int) -> None:
        """The first `accepted` of `tried` drafts stood. Those behind the first wrong one tell nothing."""
        for place in range(min(tried, accepted + 1)):
            right = 1.0 if place < accepted else 0.0
            self.observed[place] += 1
            weight = max(FORGET, 1 / (2 + self.observed[place]))
            self.survival[place] += weight * (right - self.survival[place])

    def timed(self, rows: int, depth: int, seconds: float) -> None:
        """A step was timed. The smallest time counts most: in longer ones the machine did something else, too."""
        crowd = self._crowd_of(rows)
        count = crowd.seen[depth] = crowd.seen.get(depth, 0) + 1
        known, alike = crowd.seconds.get(depth), seconds / crowd.pace
        if known is None or count <= FIRST:
            crowd.seconds[depth] = alike if known is None else min(known, alike)
        elif depth == crowd.best:
            crowd.pace *= taken_in(known, alike) / known
            self._go_on(crowd, seconds)
        elif depth == crowd.probing and crowd.probe is not None:
            crowd.probe.meanwhile.append(seconds)
        else:
            crowd.seconds[depth] = taken_in(known, alike)

    def worked(self, tokens: int, rows: int, seconds: float) -> None:
        """Nothing to learn: where a device makes the drafts, `timed` says all."""

    def price(self, rows: int, depth: int, tried: int) -> tuple[float, float]:
        crowd = self.crowds.get(rows.bit_length())
        plain = crowd.seconds.get(0) if crowd is not None else None
        if crowd is None or plain is None or depth not in crowd.seconds:
            return 0.0, 0.0
        return plain * crowd.pace, max(0.0, crowd.seconds[depth] - plain) * crowd.pace

    def expected(self, depth: int) -> float:
        """Tokens that a step at this depth is expected to give."""
        total, alive = 1.0, 1.0
        for place in range(depth):
            alive *= self.survival[place]
            total += alive
        return total

    def _crowd_of(self, rows: int) -> Crowd:
        crowd = self.crowds.get(rows.bit_length())
        if crowd is None:
            crowd = self.crowds[rows.bit_length()] = Crowd()
        return crowd

    def _worth(self, crowd: Crowd, depth: int) -> float:
        seconds = crowd.seconds.get(depth)
        return self.expected(depth) / seconds if seconds else 0.0

    def _hopeful(self, crowd: Crowd, depth: int) -> bool:
        """Judging by the depths below it, could this untried depth be the best one?"""
        known = sorted(d for d, seen in crowd.seen.items() if d < depth and seen >= FIRST)
        if len(known) < 2:
            return True
        steps = [crowd.seconds[b] - crowd.seconds[a] for a, b in pairwise(known)]
        slopes = [step / (b - a) for step, (a, b) in zip(steps, pairwise(known), strict=True)]
        slopes[0] *= FURTHER
        seconds = crowd.seconds[known[-1]] + HOPE * max(0.0, min(slopes)) * (depth - known[-1])
        return self.expected(depth) / seconds > max(self._worth(crowd, d) for d in known)

    def _judge(self, crowd: Crowd) -> None:
        """Choose the best depth."""
        best = max(crowd.seconds, key=lambda d: self._worth(crowd, d))
        if crowd.best < 0 or self._worth(crowd, best) > MARGIN * self._worth(crowd, crowd.best):
            crowd.best, crowd.probe = best, None
            crowd.latest.clear()

    def _go_on(self, crowd: Crowd, seconds: float) -> None:
        """Take in a time of the best depth, and what another one took, once it is known what surrounds it."""
        crowd.latest.append(seconds)
        probe = crowd.probe
        if probe is None or not probe.meanwhile:
            return
        probe.behind.append(seconds)
        if len(probe.behind) < len(probe.meanwhile):
            return
        crowd.probe, ratio = None, probe.ratio()
        if ratio is not None:
            known = crowd.seconds[crowd.probing]
            crowd.seconds[crowd.probing] = known + NEWER * (ratio * crowd.seconds[crowd.best] - known)

    def _ask_again(self, crowd: Crowd, rows: int) -> None:
        """Choose another depth to measure, and how many steps must pass before the next one."""
        crowd.probing = self._other(crowd)
        crowd.probe = Probe(list(crowd.latest)) if crowd.latest and crowd.probing != crowd.best else None
        crowd.turn += 1
        worth, best = self._worth(crowd, crowd.probing), max(1e-12, self._worth(crowd, crowd.best))
        size = crowd.seconds.get(crowd.probing, 0.0) / crowd.seconds[crowd.best]
        needed = int(PROBE * size * (1.0 - worth / best) / ALLOWED)
        # Times are uncertain at first, so this is not believed at once. (None asks for more than 2**20 times.)
        believed = min(needed, EVERY << min(crowd.turn - 1, 20))
        crowd.every = max(EVERY, believed) if rows <= FEW else max(RARELY, needed)
        crowd.next = crowd.steps + crowd.every

    def _other(self, crowd: Crowd) -> int:
        """A depth to measure: none every other time, else one more, the second best or one less, by turns."""
        if crowd.turn % 2 == 0:
            return 0
        at, kind = self.depths.index(crowd.best), crowd.turn // 2 % 3
        if not at and kind == 2 and len(self.depths) > 3 and self._hopeful(crowd, self.depths[3]):
            return self.depths[3]  # where only many drafts pay, the depths beside 0 do not show it
        if kind == 1 or (kind == 2 and not at):
            others = [depth for depth in crowd.seconds if depth != crowd.best]
            return max(others, key=lambda depth: self._worth(crowd, depth), default=crowd.best)
        return self.depths[min(at + 1 - kind, len(self.depths) - 1)]


class TreeControl(Control):
    """For drafts that are trees: a row gets a whole tree or none."""

    def __init__(self, most: int, most_rows: int | None, most_tokens: int) -> None:
        super().__init__(most, most_rows, most_tokens)
        self.depths = [0, most]
        self.right = 1.0
        """How many drafts of a tree stand on average."""

    def observe(self, tried: int, accepted: int) -> None:
        """Of a tree with `tried` levels, `accepted` drafts stood."""
        self.observed[0] += 1
        self.right += max(FORGET, 1 / (2 + self.observed[0])) * (accepted - self.right)

    def expected(self, depth: int) -> float:
        """Tokens that a step at this depth is expected to give."""
        return 1.0 + self.right if depth else 1.0
