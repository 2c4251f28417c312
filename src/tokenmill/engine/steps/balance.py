"""When experts move, and where to. Owns: the counts of the last steps, the moves that are still to be made.

One place decides for all ranks (parallel/experts.py computes the moves), between plans, when none is in flight. A pause
moves a bounded number of bytes; the rest waits for later pauses. Must not know: tensors, how ranks exchange experts.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from tokenmill.core.execution import Executor
from tokenmill.engine.options.balance_settings import BalanceConfig
from tokenmill.parallel.experts import Move, Placement, apply_move, first_placement, loads, moves_between, place

log = logging.getLogger("tokenmill.engine")
PAUSE_BYTES = 64 << 20
"""How many bytes of experts one pause moves (at least one expert)."""
PAUSE_STEPS = 4
"""How many steps lie between two pauses while moves are left."""


class Balance:
    """Keeps the experts of one engine balanced over its ranks."""

    def __init__(self, executor: Executor, config: BalanceConfig, ranks: int) -> None:
        self.executor, self.config, self.ranks = executor, config, ranks
        said = executor.control({"what": "experts", "op": "state"})
        self.sizes: list[int] = said["bytes"]
        redundant = config.num_redundant_experts
        self.placements: list[Placement] = [first_placement(count, ranks, redundant) for count in said["experts"]]
        self.windows: deque[list[list[int]]] = deque(maxlen=-(-config.window_size // config.step_interval))
        """The token counts of the last intervals."""
        self.left: deque[tuple[int, Move]] = deque()
        self.balancedness = 0.0
        """Mean / maximum of the ranks' tokens when it was last computed, over all mixtures together."""
        self.moved = 0
        self.decides, self.pauses = config.step_interval, 0
        self.counts_from = max(0, config.step_interval - config.window_size)
        """Steps before this one are not counted."""

    def between(self, steps: int, epoch: int, *, flying: bool) -> bool:
        """Do what is due after this many steps; False: something must wait until nothing is in flight, so make no plan
        now."""
        counts = self.counts_from and steps >= self.counts_from
        pauses = self.left and steps >= self.pauses
        if not (counts or pauses or steps >= self.decides):
            return True
        if flying:
            return False
        if counts:
            self._counts()
            self.counts_from = 0
        if steps >= self.decides:
            self._decide()
            self.decides = steps + self.config.step_interval
            self.counts_from = max(0, self.decides - self.config.window_size)
            if self.counts_from <= steps:
                self.counts_from = 0
        if self.left:
            self._move(epoch)
            self.pauses = steps + PAUSE_STEPS
        return True

    def _counts(self) -> list[list[int]]:
        found: list[list[int]] = self.executor.control({"what": "experts", "op": "counts"})["counts"]
        return found

    def _decide(self) -> None:
        """Decide where every expert should lie, by the counts of the window. Moves that are left of the last decision
        are dropped."""
        self.windows.append(self._counts())
        counts = [[sum(each) for each in zip(*layer, strict=True)] for layer in zip(*self.windows, strict=True)]
        self._measure()
        self.left.clear()
        for number, (seen, present) in enumerate(zip(counts, self.placements, strict=True)):
            wanted = place(seen, present, self.ranks)
            self.left.extend((number, move) for move in moves_between(present, wanted))
        if self.config.log_balancedness:
            log.info("experts: balancedness %.3f, %d moves follow", self.balancedness, len(self.left))

    def _measure(self) -> None:
        """Measure how well the present placements have served the last interval."""
        means, most = 0.0, 0.0
        for seen, present in zip(self.windows[-1], self.placements, strict=True):
            each = loads(seen, present, self.ranks)
            means, most = means + sum(each) / self.ranks, most + max(each)
        self.balancedness = means / most if most else 1.0

    def _move(self, epoch: int) -> None:
        """Make as many moves as fit into one pause."""
        moves: list[tuple[int, list[Any]]] = []
        room = PAUSE_BYTES
        while self.left and (room > 0 or not moves):
            number, move = self.left.popleft()
            room -= self.sizes[number] * (1 + move.swap)
            if not moves or moves[-1][0] != number:
                moves.append((number, []))
            moves[-1][1].append((move.to, move.source, move.swap))
            apply_move(self.placements[number], move)
            self.moved += 1 + move.swap
        self.executor.control_all({"what": "experts", "op": "move", "epoch": epoch, "moves": moves})
