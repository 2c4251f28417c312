"""Unquantised weights. Owns: a plain matrix and its bias, packed once it is settled.

After settling on a backend that packs, only the packed form is held, and rows or the whole matrix are read back from
it. Numbers that come as float16 for a product in float32 stay in 16 bits, and are widened exactly where they are used.
Must not know: checkpoints.
"""

from __future__ import annotations

from typing import Any, Self, Unpack

import torch
from torch import Tensor

from tokenmill.compute.adapters import Delta
from tokenmill.compute.forward import Around, ForwardContext, Kernels, StoredMatrix, Weight
from tokenmill.core.errors import ModelError
from tokenmill.quant.base import WeightBase
from tokenmill.quant.packed import joined_bias


def check_real(found: Tensor, name: str, dtype: torch.dtype | None) -> None:
    """Refuse a stored tensor that is asked for in a float type and holds no real numbers: whole numbers are codes
    whose scales are missing, and a cast would take them for the numbers themselves."""
    wanted = dtype is None or dtype.is_floating_point
    if wanted and (not found.is_floating_point() or found.dtype == torch.float8_e8m0fnu):
        raise codes_alone(found, name)


def codes_alone(found: Tensor, name: str) -> ModelError:
    """The error for a tensor of codes that would be read as the numbers themselves."""
    what = str(found.dtype).removeprefix("torch.")
    return ModelError(f"'{name}' holds {what}, and there are no scales beside it: the checkpoint is not whole.")


def as_held(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored numbers for a product in `dtype`: in float16 if they are stored so and `dtype` is float32, else in
    `dtype`."""
    return numbers if (numbers.dtype, dtype) == (torch.float16, torch.float32) else numbers.to(dtype)


class DenseWeight(WeightBase):
    """weight [out, in] and bias [out] or None. dtype: the type in which it is multiplied, if that is not the weight's
    own."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        self.table: Tensor | None = weight.contiguous()
        self.packed: Any = None
        self.bias = bias
        self.dtype = dtype or weight.dtype
        self.shape = (weight.shape[0], weight.shape[1])

    def to(self, device: torch.device) -> Self:
        """A copy on another device. The weight must not be settled yet."""
        return self._like(self.numbers().to(device), None if self.bias is None else self.bias.to(device))

    def settle(self, kernels: Kernels) -> Weight:
        """Replace the numbers by the backend's packed form. If it has none, they take the compute dtype."""
        if self.table is not None:
            numbers = ("numbers", self.table)
            stored = StoredMatrix("dense", self.shape, (numbers,), self.dense, self.bias, dtype=self.dtype)
            self.packed = kernels.pack(stored)
            self.table = None if self.packed is not None else self.table.to(self.dtype)
        return self

    def matmul(self, x: Tensor, ctx: ForwardContext, **around: Unpack[Around]) -> Tensor:
        """residual + act(norm(x) @ W.T + bias), in one operation where the backend can."""
        if self.table is None:
            return ctx.kernels.product(x, self.packed, **around)
        return ctx.kernels.product(x, self.table.to(self.dtype), self.bias, **around)

    def open(self, x: Tensor, ctx: ForwardContext, delta: Delta | None = None) -> Tensor | None:
        """x @ W.T + bias (and delta) as parts of a sum, if the backend would have it so."""
        if self.table is None:
            return None
        return ctx.kernels.open_product(x, self.table.to(self.dtype), self.bias, delta)

    def join(self, others: list[Self]) -> Self | None:
        """One matrix. If any part has a bias, missing ones count as zeros."""
        every = [self, *others]
        if len({part.dtype for part in every}) > 1:
            return None
        tables = [part.numbers() for part in every]
        if len({table.dtype for table in tables}) > 1:
            tables = [table.to(self.dtype) for table in tables]
        return self._like(torch.cat(tables), joined_bias(every, tables[0].device))

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index."""
        return self._like(self.numbers()[index], None if self.bias is None else self.bias[index])

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0) or in (1)."""
        if parts == 1:
            return self
        start, stop = self.part_range(dim, part, parts)
        if dim == 0:
            bias = None if self.bias is None else self.bias[start:stop].clone()
            return self._like(self.numbers()[start:stop].clone(), bias)
        return self._like(self.numbers()[:, start:stop].clone(), self.bias if part == 0 else None)

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        return self.packed.rows(ids, self.dtype) if self.table is None else self.table[ids].to(self.dtype)

    def dense(self) -> Tensor:
        """The matrix [out, in] in the compute dtype."""
        return self.numbers().to(self.dtype)

    def numbers(self) -> Tensor:
        """The matrix [out, in] in the type in which it is held."""
        if self.table is not None:
            return self.table
        found: Tensor = self.packed.rows(torch.arange(self.shape[0]), self.dtype)
        return found

    @property
    def narrow(self) -> bool:
        """Is it held in a narrower type than it is multiplied in?"""
        return self.table is not None and self.table.dtype != self.dtype

    def pieces(self) -> tuple[Any, dict[str, Tensor | None]] | None:
        """The matrix and its bias, or what a packed form says of them."""
        if self.table is not None:
            return "dense", {"table": self.table, "bias": self.bias}
        found: tuple[Any, dict[str, Tensor | None]] | None = self.packed.pieces()
        return found

    def bytes(self) -> int:
        """Bytes of matrix and bias."""
        if self.table is None:
            return int(self.packed.bytes())
        return self.table.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def _like(self, weight: Tensor, bias: Tensor | None) -> Self:
        """A weight of other numbers that is held and multiplied in the same way."""
        return type(self)(weight, bias, self.dtype)
