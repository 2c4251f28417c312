"""Unquantised weights. Owns: a plain matrix and its bias. Knows nothing of checkpoints or layers."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tokenmill.core.forward import ForwardContext
from tokenmill.quant.base import WeightBase


class DenseWeight(WeightBase):
    """weight [out, in] in the compute dtype, bias [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias
        self.shape = (weight.shape[0], weight.shape[1])

    def linear(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, in] -> [T, out]."""
        return ctx.kernels.linear(x, self.weight, self.bias)

    def join(self, others: list[Self]) -> Self | None:
        """One matrix; absent biases count as zeros where any part has one."""
        every = [self, *others]
        if len({part.weight.dtype for part in every}) > 1:
            return None
        bias = None
        if any(part.bias is not None for part in every):
            bias = torch.cat([p.weight.new_zeros(p.shape[0]) if p.bias is None else p.bias for p in every])
        return type(self)(torch.cat([part.weight for part in every]), bias)

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index."""
        return type(self)(self.weight[index], None if self.bias is None else self.bias[index])

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0) or in (1)."""
        if parts == 1:
            return self
        start, stop = self.part_range(dim, part, parts)
        if dim == 0:
            bias = None if self.bias is None else self.bias[start:stop].clone()
            return type(self)(self.weight[start:stop].clone(), bias)
        return type(self)(self.weight[:, start:stop].clone(), self.bias if part == 0 else None)

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        return self.weight[ids]

    def dense(self) -> Tensor:
        """The matrix itself."""
        return self.weight

    def bytes(self) -> int:
        """Bytes of matrix and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
