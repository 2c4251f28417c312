"""How many tokens of prompts a step computes while others wait for their next token. Owns: what such a token takes.

A step ends for all of its rows at once, so a long piece of a prompt delays the next token of everybody else. What a
piece takes depends on the machine, the model and the length of the text, so it is measured.
Must not know: clocks, devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

from tokenmill.core.sequence import Sequence
from tokenmill.core.step import StepPlan

STALL_S = 0.5
"""About how many seconds a step with prompts may take while others wait."""
LEAST = 64
"""A piece has room for this many tokens however long they take: shorter ones cost nearly as much, because weights are
read once for all tokens of a step."""
LAST = 4
"""The fastest of so many steps counts: in longer ones the machine did something else, too, or recorded something."""
ANY = 1 << 60
"""Room that never ends."""


class Pace:
    """Bounds the prompts of steps by the time they take."""

    def __init__(self, stall_s: float = inf) -> None:
        """stall_s: about how many seconds a step may take while others wait."""
        self.stall_s = stall_s
        self.each: deque[float] = deque(maxlen=LAST)
        """Seconds for a token of the last steps with prompts. Whatever else was in the step counts, too."""

    def room(self, running: Iterable[Sequence]) -> int:
        """How many tokens of prompts the next step may compute beside these rows."""
        if self.stall_s == inf or not any(waits(seq) for seq in running):
            return ANY
        return max(LEAST, int(self.stall_s / min(self.each))) if self.each else LEAST

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Note the duration of a step, if it computed a piece of a prompt that is long enough to tell."""
        if plan.num_tokens - len(plan.rows) >= LEAST // 2:
            tokens = sum(count for row, count in enumerate(plan.counts) if count > 1 and row not in plan.guesses)
            if tokens >= LEAST // 2:
                self.each.append(seconds / tokens)


def waits(seq: Sequence) -> bool:
    """Does the next step compute all that is known of this row, so that its next token is waited for?"""
    return len(seq.tokens) + seq.pending - seq.computed - seq.ahead == 1
