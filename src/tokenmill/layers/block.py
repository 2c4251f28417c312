"""What stands between two norms of the residual stream, and the stream itself. Owns: when parts of sums are added up.

Ranks that add up, and backends that cut a product, may leave the sum behind a block unmade: whoever reads the stream
next says which norm it needs, and sum, residual and norm are one operation. The order is always the same: product,
adapters' delta, sum over ranks, the block's own norm, residual, next norm. Where nothing is left to add up, products
take residuals and norms with them. Knows nothing of families.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec
from tokenmill.compute.model import Addition, Exchange, Group
from tokenmill.layers.linear import RowLinear


class Block(Protocol):
    """One block of a layer: attention, a feed-forward network, a mixture of experts, or a recurrent block."""

    @property
    def group(self) -> Group:
        """The ranks that compute it together."""
        ...

    def __call__(
        self, x: Tensor, ctx: ForwardContext, *, norm: NormSpec | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual + block(norm(x)); x [T, hidden]."""
        ...

    def part(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """This rank's part of block(norm(x)), if ranks add up their parts: [T, hidden], or in parts of its own."""
        ...


class Projected:
    """A block whose last step is a product back to the stream's width: `output` of the result of `inside`."""

    output: RowLinear
    by_row = False
    """Does a row of the result depend on no other row?"""

    @property
    def group(self) -> Group:
        """The ranks that compute it together."""
        return self.output.group

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """The input of the last matrix [T, inner]."""
        raise NotImplementedError

    def __call__(
        self, x: Tensor, ctx: ForwardContext, *, norm: NormSpec | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual + block(norm(x)); x [T, hidden]."""
        return self.output(self.inside(x, ctx, norm), ctx, residual=residual)

    def part(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """This rank's part of block(norm(x)), which may lie in parts of its own."""
        x = self.inside(x, ctx, norm)
        unadded = self.output.open(x, ctx)
        return self.output.weight.matmul(x, ctx) if unadded is None else unadded


@dataclass(slots=True)
class Sum:
    """(residual + scale * after(the sum of all parts)) * times [T, hidden], not computed yet. part: this rank's
    [T, hidden], or the parts of its product [parts, T, hidden]."""

    part: Tensor
    residual: Tensor
    group: Group
    after: NormSpec | None = None
    scale: float = 1.0
    times: Tensor | None = None

    def whole(self, ctx: ForwardContext) -> Tensor:
        """The sum."""
        if self.group.size > 1 and self.after is None and self.scale == 1.0 and self.times is None:
            return self.group.all_reduce(self._added(), self.residual)
        y = self.part if self.group.size == 1 else self.group.all_reduce(self._added())
        return ctx.kernels.add(self.residual, y, self.scale, within=self.after, times=self.times)

    def normed(self, norm: NormSpec, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""
        if self.times is None:
            both = self.group.all_reduce_norm(self.part, self.residual, norm, self.scale, self.after)
            if both is not None:
                return both
        y = self.part if self.group.size == 1 else self.group.all_reduce(self._added())
        return ctx.kernels.add_norm(self.residual, y, norm, self.scale, within=self.after, times=self.times)

    def _added(self) -> Tensor:
        """This rank's part [T, hidden], for groups that read no parts."""
        return _in_one(self.part, self.residual)


@dataclass(slots=True)
class Pieces:
    """A long stream in pieces of rows, each residual + scale * after(a sum over ranks under way): a block that treats
    rows one by one computes the first pieces while the others are exchanged."""

    sums: list[tuple[Tensor, Exchange]]
    after: NormSpec | None = None
    scale: float = 1.0

    def _ended(self, norm: NormSpec | None) -> tuple[Tensor, Tensor | None]:
        """All rows, and their norm."""
        first, addition = self.sums[0][0], Addition(norm, self.scale, self.after)
        x = first.new_empty((sum(len(residual) for residual, _ in self.sums), first.shape[1]))
        h = None if norm is None else torch.empty_like(x)
        at = 0
        for residual, exchange in self.sums:
            rows = slice(at, at + len(residual))
            exchange.end(residual, addition, x[rows], None if h is None else h[rows])
            at = rows.stop
        return x, h

    def whole(self, ctx: ForwardContext) -> Tensor:
        """All rows."""
        return self._ended(None)[0]

    def normed(self, norm: NormSpec, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """All rows, and their norm."""
        x, h = self._ended(norm)
        assert h is not None
        return x, h

    def read(self, norm: NormSpec | None, ctx: ForwardContext) -> Iterator[tuple[Tensor, Tensor, NormSpec | None]]:
        """What `read` gives, piece by piece."""
        for each in self.sums:
            yield read(Pieces([each], self.after, self.scale), norm, ctx)


Stream = Tensor | Sum | Pieces
"""The residual stream [T, hidden] between two blocks."""


def adds(block: Block) -> bool:
    """Does each rank compute a part of the block's result, so that parts must be added up?"""
    return block.group.size > 1 and not block.group.exact


def _in_one(part: Tensor, like: Tensor) -> Tensor:
    """A rank's part [T, hidden], which may lie in parts of its own."""
    return part if part.ndim == 2 else part.sum(0).to(like.dtype)


def _by_row(block: Block, ctx: ForwardContext) -> bool:
    """May some rows go through the block without the others? (Adapters are found by places in the whole step.)"""
    rows = ctx.rows
    return adds(block) and getattr(block, "by_row", False) and (rows is None or rows.adapters is None)


def whole(x: Stream, ctx: ForwardContext) -> Tensor:
    """The stream, added up."""
    return x if isinstance(x, Tensor) else x.whole(ctx)


def normed(x: Stream, norm: NormSpec, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
    """The stream, added up, and its norm."""
    return (x, ctx.kernels.norm(x, norm)) if isinstance(x, Tensor) else x.normed(norm, ctx)


def read(x: Stream, norm: NormSpec | None, ctx: ForwardContext) -> tuple[Tensor, Tensor, NormSpec | None]:
    """The stream, added up; the block's input; and the norm that the block's first product still has to apply."""
    if isinstance(x, Tensor):
        return x, x, norm
    if norm is None:
        x = x.whole(ctx)
        return x, x, None
    return *x.normed(norm, ctx), None


def through(
    x: Stream,
    block: Block,
    ctx: ForwardContext,
    norm: NormSpec | None,
    *,
    after: NormSpec | None = None,
    scale: float = 1.0,
    ahead: Block | None = None,
    times: Tensor | None = None,
) -> Stream:
    """(x + scale * after(block(norm(x)))) * times. ahead: the block that reads this next, if it may do so piece by
    piece."""
    group = block.group
    if isinstance(x, Pieces) and times is None and _by_row(block, ctx):
        read_one = x.read(norm, ctx)
        sent = [(rest, group.exchange(_in_one(block.part(h, ctx, left), rest))) for rest, h, left in read_one]
        return Pieces(sent, after, scale)
    x, h, norm = read(x, norm, ctx)
    if ahead is not None and times is None and adds(block) and isinstance(block, Projected) and _by_row(ahead, ctx):
        count = group.pieces(x)
        if count > 1:
            inside = block.inside(h, ctx, norm).chunk(count)
            parts = (group.exchange(block.output.weight.matmul(rows, ctx)) for rows in inside)
            return Pieces(list(zip(x.contiguous().chunk(count), parts, strict=True)), after, scale)
    return added(x, block, h, ctx, norm, after=after, scale=scale, times=times)


def added(
    x: Tensor,
    block: Block,
    h: Tensor,
    ctx: ForwardContext,
    norm: NormSpec | None,
    *,
    after: NormSpec | None = None,
    scale: float = 1.0,
    times: Tensor | None = None,
) -> Stream:
    """(x + scale * after(block(norm(h)))) * times."""
    if adds(block):
        return Sum(block.part(h, ctx, norm), x, block.group, after, scale, times)
    if isinstance(block, Projected):
        h = block.inside(h, ctx, norm)
        unadded = block.output.open(h, ctx)
        if unadded is not None:
            return Sum(unadded, x, block.group, after, scale, times)
        rest = partial(block.output, h, ctx)
    else:
        rest = partial(block, h, ctx, norm=norm)
    if after is None and scale == 1.0 and times is None:
        return rest(residual=x)
    return ctx.kernels.add(x, rest(), scale, within=after, times=times)
