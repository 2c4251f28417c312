"""Integers with a scale and an offset per 16 or 32 columns. Owns: the settled form of what no packed form holds.

    weight[n, k] = q[n, k] * scale[n, k // group] + offset[n, k // group]
Must not know: files, names, layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.core.forward import ForwardContext
from tokenmill.kernels.grid import widen_affine
from tokenmill.quant.base import WeightBase


class AffineWeight(WeightBase):
    """Settled: the file's own integers q [out, in] int8, scale and offset [out, in / group] float32."""

    def __init__(
        self, q: Tensor, scale: Tensor, offset: Tensor | None, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        self.q, self.scale, self.offset, self.dtype, self.bias = q, scale, offset, dtype, bias
        self.shape = (q.shape[0], q.shape[1])

    def linear(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, in] -> [T, out]."""
        return ctx.kernels.affine_linear(x, self.q, self.scale, self.offset, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        offset = None if self.offset is None else self.offset[ids]
        return widen_affine(self.q[ids], self.scale[ids], offset).to(self.dtype)

    def dense(self) -> Tensor:
        """The whole matrix."""
        return widen_affine(self.q, self.scale, self.offset).to(self.dtype)

    def bytes(self) -> int:
        """Bytes of integers, scales, offsets and bias."""
        return sum(t.nbytes for t in (self.q, self.scale, self.offset, self.bias) if t is not None)
