"""States of a draft model with recurrent layers. Owns: where the states behind a row's newest tokens are kept, and
which of them guessing continues from.

Any number of guesses may stand after verification, so the states behind all of them are kept. Each row has one place to
continue from, and one place behind each token from `begun` on. If a row misses steps, its states are not repaired here:
the scheduler has the drafter follow the row again from its first token. Must not know: models, plans.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext
from tokenmill.kvcache.states import StatePool


def places_of(most: int) -> int:
    """Places per row, if up to `most` tokens are guessed."""
    return most + 2


class DraftStates:
    """Per row: the place to continue from, then one place behind each of the newest tokens, which start at `begun`."""

    def __init__(self, pool: StatePool, rows: int, most: int) -> None:
        """rows: the spare one included."""
        self.pool = pool
        self.count = places_of(most)
        self.begun = torch.zeros(rows, dtype=torch.int64, device=pool.views[0][0].device)
        self.reads: dict[int, Tensor] = {}
        self.left: dict[int, Tensor] = {}

    def follow(self, spans: list[tuple[int, int, int]], ctx: ForwardContext) -> ForwardContext:
        """Known tokens are computed: (row, first position, count). Each span continues where the row's last one
        ended."""
        row_ids, ends, left, single = [], [], [], []
        for row, first, count in spans:
            base = row * self.count
            row_ids.append(row)
            ends.append(first + count - 2)
            left += [-1] * (count - 2) + [base + 1, base + 2][-count:]
            if count == 1:
                single.append(base)
        at = torch.tensor(row_ids) * self.count
        self._move(at + 2, at)
        if single:
            self._move(torch.tensor(single) + 2, torch.tensor(single) + 1)
        self.begun[self._here(torch.tensor(row_ids))] = self._here(torch.tensor(ends))
        return self._seen(ctx, self._here(at), self._here(torch.tensor(left)))

    def go_back(self, row_ids: Tensor, length: Tensor) -> None:
        """Go back to before the newest two of the rows' [S] `length` [S] known tokens, which are computed next."""
        at, newest = row_ids * self.count, length - 2
        stand = (newest - 1 - self.begun[row_ids]).clamp_(0, self.count - 2)
        self._move(at + 1 + stand, at)
        self.begun[row_ids] = newest

    def place(self, row_ids: Tensor, n: int) -> None:
        """Set the places for the n-th pass over these rows. The first pass takes two tokens per row, one after the
        other."""
        rung, wide = row_ids.shape[0], n == 0
        size = 2 * rung if wide else rung
        reads, left = self._of(rung), self._of(size, left=True)
        at = row_ids * self.count
        reads.copy_(at if wide else at + n + 1)
        if wide:
            left.view(rung, 2).copy_(at[:, None] + torch.arange(1, 3, device=at.device))
        else:
            left.copy_(at + n + 2)

    def seen(self, ctx: ForwardContext, rung: int, *, wide: bool) -> ForwardContext:
        """A pass's context, with the places that `place` has set."""
        return self._seen(ctx, self._of(rung), self._of(2 * rung if wide else rung, left=True))

    def _seen(self, ctx: ForwardContext, reads: Tensor, left: Tensor) -> ForwardContext:
        assert ctx.rows is not None
        return replace(ctx, rows=replace(ctx.rows, sequences=reads, states=self.pool.views, left=left))

    def _of(self, size: int, *, left: bool = False) -> Tensor:
        known = self.left if left else self.reads
        if size not in known:
            known[size] = torch.zeros(size, dtype=torch.int64, device=self.begun.device)
        return known[size]

    def _move(self, froms: Tensor, tos: Tensor) -> None:
        self.pool.move(self._here(froms), self._here(tos))

    def _here(self, ids: Tensor) -> Tensor:
        return ids.to(self.begun.device)
