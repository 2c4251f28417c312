"""Norms whose result gates itself, through a narrow product. Owns: that gate, and layers with such norms. Knows nothing
of families."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec, Weight
from tokenmill.layers.block import Block, Stream, read
from tokenmill.layers.build import Build


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """y = norm(x); y * sigmoid(up(silu(down(y)))). Without products it is the norm."""

    norm: NormSpec
    down: Weight | None = None
    up: Weight | None = None

    def gated(self, y: Tensor, ctx: ForwardContext) -> Tensor:
        """y [T, hidden], which is normed already."""
        if self.down is None or self.up is None:
            return y
        return ctx.kernels.activate(y, "sigmoid", self.up.matmul(self.down.matmul(y, ctx, act="silu"), ctx))


def gated_norm(b: Build, hidden: int, rank: int, eps: float) -> GatedNorm:
    """The norm below b and its two products."""
    down, up = b.weight("W_down", (rank, hidden)), b.weight("W_up", (hidden, rank))
    return GatedNorm(b.norm("norm", hidden, eps), b.settled(down), b.settled(up))


class GatedPreNorm:
    """x += attention(norm(x)); x += mlp(norm(x)), where norms may have gates."""

    def __init__(self, attention: Block, mlp: Block, norms: tuple[GatedNorm, GatedNorm]) -> None:
        self.blocks = tuple(zip((attention, mlp), norms, strict=True))

    def __call__(self, x: Stream, ctx: ForwardContext) -> Stream:
        """x [T, hidden] -> [T, hidden]."""
        for block, norm in self.blocks:
            x, h, left = read(x, norm.norm, ctx)
            h = h if left is None else ctx.kernels.norm(h, left)
            x = block(norm.gated(h, ctx), ctx, residual=x)
        return x
