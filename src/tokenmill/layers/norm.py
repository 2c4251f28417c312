"""Norms. Owns: applying a NormSpec where no matrix follows it. Knows nothing of checkpoints."""

from __future__ import annotations

from torch import Tensor

from tokenmill.core.forward import ForwardContext, NormSpec


def add_normed(x: Tensor, y: Tensor, spec: NormSpec, ctx: ForwardContext) -> Tensor:
    """x + norm(y): the residual of families that norm a block's output."""
    return ctx.kernels.add(x, ctx.kernels.norm(y, spec))
