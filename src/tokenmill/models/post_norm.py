"""A layer whose norms stand behind its sums. Knows no family."""

from __future__ import annotations

from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec
from tokenmill.layers.block import Block, normed, through


class PostNorm:
    """x = norm(x + attention(x)); x = norm(x + mlp(x))."""

    def __init__(self, attention: Block, mlp: Block, norms: tuple[NormSpec, NormSpec]) -> None:
        self.attention = attention
        self.mlp = mlp
        self.first, self.second = norms

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        for block, norm in ((self.attention, self.first), (self.mlp, self.second)):
            x = normed(through(x, block, ctx, None), norm, ctx)[1]
        return x
