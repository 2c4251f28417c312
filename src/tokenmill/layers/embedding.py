"""Token embeddings and the output head, tied or not. Owns: vocabulary-sized matrices. Knows nothing of samplers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.compute.adapters import Delta
from tokenmill.compute.forward import ForwardContext, Weight
from tokenmill.compute.model import Group
from tokenmill.layers.build import Build
from tokenmill.quant.dense import DenseWeight


class Embedding:
    """Token ids -> rows of the table, times a constant.

    If the vocabulary divides, it is split over ranks that add up: each rank looks up the ids that it has, and the sum
    has them all. Ranks of an exact group hold the whole table: there nothing may be added, not even zeros."""

    def __init__(self, b: Build, name: str, shape: tuple[int, int], *, scale: float = 1.0, tied: bool = False) -> None:
        """shape (vocabulary, hidden); tied: the output head multiplies by the same matrix."""
        self.group = b.group
        self.split = splits(b.group, shape[0]) and not b.group.exact
        self.part = (shape[0] // b.group.size * b.group.rank, shape[0] // b.group.size)
        share = (0, b.group.rank, b.group.size) if self.split else None
        self.weight = b.weight(name, shape, exact=not tied, head=tied, bare=True, share=share)
        self.site = None if b.adapters is None else b.adapters.embedding(b.path(name), shape, self._plain, self._held)
        self.scale = scale

    def _plain(self, start: int, stop: int) -> Tensor | None:
        """Rows of the table as the file has them; None: they are rounded, or on several ranks."""
        weight = self.weight
        table = weight.table if isinstance(weight, DenseWeight) and not weight.narrow and not self.split else None
        return None if table is None else table[start:stop]

    def _held(self, ids: Tensor) -> Tensor | None:
        """Rows [n, hidden] as they are multiplied; None: they are on several ranks."""
        if self.split:
            return None
        return self.weight.rows(ids)

    def __call__(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T] -> [T, hidden]."""
        x = self._gathered(tokens, ctx) if self.split else self._rows(self.weight, tokens, ctx)
        rows, site = ctx.rows, self.site
        if site is None or rows is None or rows.adapters is None or not (site.used or site.whole):
            return x
        if site.used:
            low = ctx.kernels.adapt(tokens, site, rows.adapters)
            x = ctx.kernels.add_delta(x, Delta(site, tokens, low, rows.adapters, self.scale))
        for slot, weight in site.whole.items():
            at = torch.where(rows.adapters == slot)[0]
            x = x.index_copy(0, at, self._rows(weight, tokens[at], ctx))
        return x

    def _gathered(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """The rows of all ranks' parts."""
        first, count = self.part
        own = tokens - first
        mine = (own >= 0) & (own < count)
        x = self._rows(self.weight, own.clamp(0, count - 1), ctx)
        return self.group.all_reduce(x.masked_fill(~mine[:, None], 0.0))

    def _rows(self, weight: Weight, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        table = weight.table if isinstance(weight, DenseWeight) and not weight.narrow else None
        if table is not None:
            return ctx.kernels.embed(table, tokens, self.scale)
        rows = weight.rows(tokens)
        return rows if self.scale == 1.0 else rows * self.scale


def splits(group: Group, vocab: int) -> bool:
    """Does each rank get an equal part of the vocabulary?"""
    return group.size > 1 and vocab % group.size == 0


def add_positions(table: Tensor) -> Callable[[Tensor, ForwardContext], Tensor]:
    """Learned positions: table [positions, hidden] is added to the token embeddings."""

    def add(x: Tensor, ctx: ForwardContext) -> Tensor:
        return ctx.kernels.add(x, ctx.kernels.embed(table, ctx.positions))

    return add


class Head:
    """Hidden states -> logits. If the vocabulary divides, it is split over ranks, and the logits are gathered.

    If embeddings read the same matrix, an exact group keeps it whole on every rank, in a single form."""

    def __init__(self, b: Build, weight: Weight, *, split: bool) -> None:
        """weight: this rank's part, if it is split."""
        self.group = b.group
        self.split = split
        self.weight = b.settled(weight)

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """[n, hidden] -> [n, vocab] in float32, or in the product's type if the backend can read that."""
        logits = self.own(hidden, ctx)
        return self.group.all_gather(logits) if self.split else logits

    def own(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """The same for the words that this rank has."""
        logits = self.weight.matmul(hidden, ctx)
        return logits if ctx.kernels.chooses else logits.float()
