"""Token embeddings and the output head, tied or not. Owns: vocabulary-sized matrices. Knows nothing of samplers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.core.adapters import Delta
from tokenmill.core.forward import ForwardContext, Weight
from tokenmill.layers.build import Build
from tokenmill.quant.dense import DenseWeight


class Embedding:
    """Token ids -> rows of the table, times a constant. Held whole on every rank."""

    def __init__(self, b: Build, name: str, shape: tuple[int, int], *, scale: float = 1.0, tied: bool = False) -> None:
        """shape (vocabulary, hidden); tied: the output head multiplies by the same matrix."""
        self.weight = b.weight(name, shape, exact=not tied, head=tied, bare=True)
        self.site = None if b.adapters is None else b.adapters.embedding(b.path(name), shape)
        self.scale = scale

    def __call__(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T] -> [T, hidden]."""
        x = self._rows(self.weight, tokens, ctx)
        rows, site = ctx.rows, self.site
        if site is None or rows is None or rows.adapters is None or not (site.used or site.whole):
            return x
        if site.used:
            low = ctx.kernels.adapt(tokens, site, rows.tokens, rows.adapters)
            x = ctx.kernels.add_delta(x, Delta(site, tokens, low, rows.tokens, rows.adapters, self.scale))
        for slot, weight in site.whole.items():
            at = torch.where(rows.adapters[rows.tokens] == slot)[0]
            x = x.index_copy(0, at, self._rows(weight, tokens[at], ctx))
        return x

    def _rows(self, weight: Weight, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        table = weight.table if isinstance(weight, DenseWeight) else None
        if table is not None:
            return ctx.kernels.embed(table, tokens, self.scale)
        rows = weight.rows(tokens)
        return rows if self.scale == 1.0 else rows * self.scale


def add_positions(table: Tensor) -> Callable[[Tensor, ForwardContext], Tensor]:
    """Learned positions: table [positions, hidden] is added to the token embeddings."""

    def add(x: Tensor, ctx: ForwardContext) -> Tensor:
        return ctx.kernels.add(x, ctx.kernels.embed(table, ctx.positions))

    return add


class Head:
    """Hidden states -> logits: the vocabulary is split over ranks where it divides, then gathered.

    tied: embeddings read the same matrix; an exact group keeps the one settled form of it whole on every rank."""

    def __init__(self, b: Build, weight: Weight, *, tied: bool = False) -> None:
        self.group = b.group
        self.split = b.group.size > 1 and weight.shape[0] % b.group.size == 0 and not (tied and b.group.exact)
        self.weight = b.settled(weight.split(0, b.group.rank, b.group.size) if self.split else weight)

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """[n, hidden] -> [n, vocab] in float32, or as multiplied where the backend reads that."""
        logits = self.weight.matmul(hidden, ctx)
        logits = logits if ctx.kernels.chooses else logits.float()
        return self.group.all_gather(logits) if self.split else logits
