"""Medusa heads: small networks on the target's last hidden state. Head i guesses the token i + 1 places ahead.

Each head is a few residual blocks and a matrix over the vocabulary, which may be the target's own. Heads keep no state:
they read only the hidden state that the newest token was sampled from. Must not know: plans, verification, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.compute.drafting import Drafting, Seen
from tokenmill.compute.forward import ForwardContext, Kernels, Weight
from tokenmill.compute.model import CausalLM
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import bare_context
from tokenmill.runner.drafts import Forgetful
from tokenmill.runner.replays import Replays
from tokenmill.runner.rows import Rows
from tokenmill.speculate.choice import MOST_ROWS, Choosing
from tokenmill.speculate.shapes import TreeShape
from tokenmill.speculate.tree import Picking


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """Residual blocks, and the matrix over the vocabulary (None: the target's)."""

    blocks: list[Weight]
    words: Weight | None = None

    def hidden(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [n, hidden] -> the same with silu(W x + b) added by each block."""
        for block in self.blocks:
            x = block.matmul(x, ctx, act="silu", residual=x)
        return x


class MedusaHeads(Forgetful):
    """A DeviceDrafter that reads hidden states."""

    def __init__(
        self,
        heads: list[MedusaHead],
        target: CausalLM,
        kernels: Kernels,
        most: int,
        *,
        record: bool,
        shape: TreeShape | None = None,
    ) -> None:
        """shape: of trees; None: drafts are chains."""
        self.heads = heads
        self.target = target
        self.kernels = kernels
        self.most = min(most, len(heads))
        self.shape = shape
        if shape is not None:
            self.most = shape.nodes
            self.levels = len(heads) if shape.paths is None else len(shape.paths[-1])
        self.picking: Picking
        self.replays = Replays(kernels, record=record)
        self.given: dict[int, Tensor] = {}
        self.choosing: Choosing
        self.seen: Seen

    def follow(self, spans: list[tuple[int, int, int]], seen: Seen) -> None:
        """Keep the hidden states of the step: the newest tokens were sampled from some of them."""
        self.seen = seen

    def bind(self, rows: Rows, pool: KVPool) -> None:
        """Take the rows; heads have no pages."""
        self.choosing = Choosing(self.kernels, rows, exact=rows.device.type == "cpu")
        if self.shape is not None:
            self.picking = Picking(self.shape, self.levels, rows.device)

    def propose(self, step: Drafting) -> None:
        """Take one guess from each head (several for trees), independent of the other heads' guesses."""
        placed, drawn = self.choosing.place(step.row_list)
        hidden, rung, count = self.seen.hidden[step.places()], placed.row_ids.shape[0], len(step.row_list)
        if rung not in self.given:
            self.given[rung] = hidden.new_zeros((rung, hidden.shape[1]))
        given = self.given[rung]
        given[:count].copy_(hidden)
        rows, row_ids = step.rows, step.row_ids
        newest = rows.length[placed.row_ids] - 1

        def computing() -> Callable[[], list[Tensor]]:
            ctx = bare_context(self.kernels, rung, given.device)
            return lambda: [self._guess(n, given, ctx, drawn=plain) for n in range(heads)]

        heads, plain = (self.levels, True) if self.levels else (step.count, drawn)
        if self.choosing.exact and rung > MOST_ROWS:
            made = computing()()
        else:
            made = self.replays.make_or_replay((rung, heads, plain), computing)
        if self.levels:
            sampled, ids = placed.words > 0 if drawn else None, placed.row_ids
            scores = [self.choosing.scores(x, ids, newest + n, sampled)[:count] for n, x in enumerate(made)]
            found, parents = self.picking.pick(scores, step.count)
            ahead = torch.arange(step.count, device=given.device)
            rows.tokens[row_ids[:, None], rows.length[row_ids][:, None] + ahead] = found.to(torch.int32)
            rows.parents[row_ids, : step.count] = parents
            return
        if drawn:
            made = [self.choosing.choose(x, placed, newest + n, drawn=True) for n, x in enumerate(made)]
        ahead = torch.arange(step.count, device=given.device)
        guesses = torch.stack([ids[:count] for ids in made], 1)
        rows.tokens[row_ids[:, None], rows.length[row_ids][:, None] + ahead] = guesses.to(torch.int32)

    def forget_weights(self) -> None:
        """Drop what was made from the old weights; it is made again from the new ones."""
        self.replays.forget_weights()

    def _guess(self, n: int, given: Tensor, ctx: ForwardContext, *, drawn: bool) -> Tensor:
        """The n-th head's guesses [rung], or its logits if guesses are drawn from them."""
        words, x = self.heads[n].words, self.heads[n].hidden(given, ctx)
        logits = self.target.logits(x, ctx) if words is None else words.matmul(x, ctx)
        if words is not None and not self.kernels.chooses:
            logits = logits.float()
        return logits if drawn else self.kernels.greedy(logits)[0]
