"""Several layers of a checkpoint that guess later tokens, each one token further.

Layer n joins, at position p, what the layer before it made of p (the first: the target) with the token at p + 1 + n,
and guesses the one behind that. Of the newest positions these tokens are guesses themselves; when they are known, these
positions are computed again, so the newest states of each layer are kept:

    known tokens          0 .. L-1
    layer 0 has seen      0 .. L-2    in the step that was verified
    layer n sees again    L-2-n .. L-2    with the tokens L-1 .. L-1+n, behind L-1 those guessed so far

Rows that go on without guesses see these positions again all the same. Further guesses than there are layers are the
last layer's, behind its own states. Must not know: plans, verification, checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.compute.drafting import Seen
from tokenmill.compute.forward import Kernels, KVSpec
from tokenmill.compute.model import CausalLM
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import apart, single_tokens
from tokenmill.runner.rows import Rows
from tokenmill.speculate.choice import FilledRows
from tokenmill.speculate.eagle import EagleHead, Net


class LaterSteps(EagleHead):
    """A DeviceDrafter of as many networks as it has steps of its own."""

    def __init__(
        self,
        nets: Sequence[Net],
        specs: tuple[KVSpec, ...],
        target: CausalLM,
        kernels: Kernels,
        most: int,
        dtype: torch.dtype,
        *,
        record: bool,
    ) -> None:
        super().__init__(nets[0], specs, target, kernels, most, dtype, record=record)
        self.nets = nets
        self.ways = len(nets)
        self.ring = most + len(nets) + 2
        """States that are kept of each row and layer: those of the tokens that a step verifies, and of some before."""
        self.kept: list[Tensor] = []
        self.marks: Tensor

    def bind(self, rows: Rows, pool: KVPool) -> None:
        """Room for what is kept; the last place of each row is for what is not."""
        super().bind(rows, pool)
        shape, device = (rows.spare + 1, self.ring + 1), rows.device
        hidden = self.target.spec.hidden_size
        self.kept = [torch.zeros(*shape, hidden, dtype=self.dtype, device=device) for _ in self.nets[1:]]
        self.marks = torch.full(shape, -1, dtype=torch.int64, device=device)

    def follow(self, spans: list[tuple[int, int, int]], seen: Seen) -> None:
        """The whole batch through all layers; where a token is not known yet, it is seen again: when guesses are made,
        or here for rows that are only kept in step."""
        ctx, mine = seen.ctx, self._mine(seen.ctx)
        assert ctx.rows is not None and ctx.taps is not None
        row_ids, positions = ctx.rows.tokens, ctx.positions
        newest = positions.new_zeros(self.rows.spare + 1).scatter_reduce(0, row_ids, positions, "amax")
        places = torch.where(positions > newest[row_ids] - self.ring, positions % self.ring, self.ring)
        self.marks[row_ids, places] = self._mark(row_ids, positions)
        states = ctx.taps[self.net.taps[0]]
        for n, net in enumerate(self.nets):
            states = net.go_on(self._token(row_ids, positions + 1 + n), states, mine)
            if n == 0:
                self.out = states
            if n < len(self.kept):
                self.kept[n][row_ids, places] = states
        known = [row for row, first, count in spans if first + count >= self.rows.num_prompt[row]]
        if known:
            placed, _ = self.choosing.place(known)
            self._states(placed.row_ids.shape[0], None)
            for n in range(1, len(self.nets)):
                self._step(placed, n)

    def _net(self, n: int) -> Net:
        return self.nets[min(n, len(self.nets) - 1)]

    def _pass(self, placed: FilledRows, n: int) -> None:
        """What the n-th guess (from 0 on) is made from: of a step of its own, or behind the last one's state."""
        if n < len(self.nets):
            self._step(placed, n)
        else:
            self._go_on(placed)

    def _step(self, placed: FilledRows, n: int) -> None:
        """Layer n sees the newest positions again, the newest first; those that it cannot, as their states are not
        kept, are left as they are."""
        newest = (self.rows.length[placed.row_ids] - 2).clamp_(min=0)
        steps = torch.arange(n + 1, device=newest.device)[:, None]
        back = newest - steps
        rows = placed.row_ids.repeat(n + 1, 1)
        right = (back >= 0) & (self.marks[rows, back % self.ring] == self._mark(rows, back.clamp(min=0)))
        reach = right.int().cumprod(0).sum(0) - 1
        positions = newest - torch.minimum(steps, reach.clamp_(min=0))
        ids, at = rows.flatten(), positions.flatten()
        found = self._compute(self.nets[n], ids, at, self.kept[n - 1][ids, at % self.ring], 1 + n)
        if n < len(self.kept):
            self.kept[n][ids, at % self.ring] = found
        self.states[placed.row_ids.shape[0]].copy_(found[: placed.row_ids.shape[0]])

    def _go_on(self, placed: FilledRows) -> None:
        """The last layer, behind its own newest state."""
        states, last = self.states[placed.row_ids.shape[0]], len(self.nets)
        positions = (self.side.computed[placed.row_ids] + 1 - last).clamp_(min=0)
        states.copy_(self._compute(self.nets[-1], placed.row_ids, positions, states, last))

    def _compute(self, net: Net, row_ids: Tensor, positions: Tensor, states: Tensor, ahead: int) -> Tensor:
        """States [n, hidden] of rows [n] at positions [n] and the tokens `ahead` of them -> the net's."""
        side, starts = self.side.moved(torch.zeros_like(self.side.computed)), apart(positions + 1)
        kinds = (self._shifted(), ())
        _, ctx = single_tokens(self.kernels, side, side, row_ids, starts, positions, kinds=kinds)
        return net.go_on(self._token(row_ids, positions + ahead), states, ctx)

    def _token(self, row_ids: Tensor, positions: Tensor) -> Tensor:
        """What lies there, be it known, guessed or left of something else."""
        tokens = self.rows.tokens
        found = tokens[row_ids, positions.clamp(max=tokens.shape[1] - 1)].long()
        return found.clamp_(0, self.target.spec.vocab_size - 1)

    def _mark(self, row_ids: Tensor, positions: Tensor) -> Tensor:
        """What tells that a kept state is of this position in this text, and not in one that the row held before."""
        return positions * (1 << 32) + self._token(row_ids, positions)
