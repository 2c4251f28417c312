"""Unquantised weights. Owns: a plain matrix and its bias, packed once it is settled. Knows nothing of checkpoints.

After settling on a backend that packs, only the packed form is held; rows and the whole matrix are read back from it.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from tokenmill.core.adapters import Delta
from tokenmill.core.forward import Act, ForwardContext, Kernels, NormSpec, StoredMatrix, Weight
from tokenmill.quant.base import WeightBase
from tokenmill.quant.packed import joined_bias


class DenseWeight(WeightBase):
    """weight [out, in] in the compute dtype, bias [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.table: Tensor | None = weight.contiguous()
        self.packed: Any = None
        self.bias = bias
        self.dtype = weight.dtype
        self.shape = (weight.shape[0], weight.shape[1])

    def settle(self, kernels: Kernels) -> Weight:
        """Keep the packed form instead, where the backend has one."""
        if self.table is not None:
            stored = StoredMatrix("dense", self.shape, (("numbers", self.table),), self.dense, self.bias)
            self.packed = kernels.pack(stored)
            if self.packed is not None:
                self.table = None
        return self

    def linear(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self.matmul(x, ctx)

    def matmul(
        self,
        x: Tensor,
        ctx: ForwardContext,
        *,
        norm: NormSpec | None = None,
        act: Act | None = None,
        residual: Tensor | None = None,
        delta: Delta | None = None,
    ) -> Tensor:
        """residual + act(norm(x) @ W.T + bias), in one operation where the backend can."""
        if self.table is None:
            return ctx.kernels.product(x, self.packed, norm=norm, act=act, residual=residual, delta=delta)
        return ctx.kernels.product(x, self.table, self.bias, norm=norm, act=act, residual=residual, delta=delta)

    def join(self, others: list[Self]) -> Self | None:
        """One matrix; absent biases count as zeros where any part has one."""
        every = [self, *others]
        if len({part.dtype for part in every}) > 1:
            return None
        table = torch.cat([part.dense() for part in every])
        return type(self)(table, joined_bias(every, table.device))

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index."""
        return type(self)(self.rows(index), None if self.bias is None else self.bias[index])

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0) or in (1)."""
        if parts == 1:
            return self
        start, stop = self.part_range(dim, part, parts)
        if dim == 0:
            bias = None if self.bias is None else self.bias[start:stop].clone()
            return type(self)(self.dense()[start:stop].clone(), bias)
        return type(self)(self.dense()[:, start:stop].clone(), self.bias if part == 0 else None)

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        return self.packed.rows(ids, self.dtype) if self.table is None else self.table[ids]

    def dense(self) -> Tensor:
        """The matrix [out, in]."""
        return self.rows(torch.arange(self.shape[0])) if self.table is None else self.table

    def pieces(self) -> tuple[Any, dict[str, Tensor | None]] | None:
        """The matrix and its bias, unless it is packed."""
        return None if self.table is None else ("dense", {"table": self.table, "bias": self.bias})

    def bytes(self) -> int:
        """Bytes of matrix and bias."""
        if self.table is None:
            return int(self.packed.bytes())
        return self.table.nbytes + (0 if self.bias is None else self.bias.nbytes)
