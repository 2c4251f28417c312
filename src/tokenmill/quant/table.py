"""Weights whose codes name an entry of a table: NF4, the 4 bit floats, and any other table of at most 256 numbers.

    weight[n, k] = table[codes[n, k]] * scale[n, k // group]
Owns: the form as files have it, and what it settles into: int8 with the same scales, exact where the table is whole
numbers times a constant (4 bit floats are), else each entry rounded to one of 255; groups that no kernel knows (16, or
such that end within a row) are rounded anew in groups of 32. Must not know: files, layers.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.core.forward import Kernels, Weight
from tokenmill.quant.base import WeightBase
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.grid import GridWeight
from tokenmill.quant.packed import joined_bias

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What a nibble means as a 4 bit float: sign, two bits of exponent, one of mantissa."""
_GROUP = 32
_SMALLEST_HALF = 2.0**-14


class TableWeight(WeightBase):
    """codes [out, in] uint8, table [n] float32, scales [out, in / group] float32; `name`: for people."""

    def __init__(
        self, codes: Tensor, table: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None, name: str
    ) -> None:
        self.codes, self.table, self.scales = codes, table.float(), scales.float()
        self.dtype, self.bias, self.name = dtype, bias, name
        self.shape = (codes.shape[0], codes.shape[1])
        self.group = self.shape[1] // scales.shape[1]
        assert self.group * scales.shape[1] == self.shape[1]

    def to(self, device: torch.device) -> Self:
        """The same on another device, before it settles."""
        table = self.table.to(device)
        return type(self)(self.codes.to(device), table, self.scales.to(device), self.dtype, self.bias, self.name)

    def settle(self, kernels: Kernels) -> Weight:
        """As integers with scales."""
        exact, weight = self._integers(kernels)
        if not exact and not isinstance(weight, DenseWeight):
            weight.changed = (self.name,)
        return weight.settle(kernels)

    def _integers(self, kernels: Kernels) -> tuple[bool, GridWeight | DenseWeight]:
        """Is nothing lost, and the form to settle."""
        if self.shape[1] % _GROUP:
            return True, DenseWeight(self.dense(), self.bias)
        steps, unit = _whole(self.table)
        scales = (self.scales * unit).half()
        used = scales[scales != 0].float().abs()
        fits = bool(torch.isfinite(used).all()) and (not used.numel() or float(used.min()) >= _SMALLEST_HALF)
        fits = fits and torch.equal(scales != 0, self.scales != 0)
        if self.group % _GROUP or not fits:
            q, scales = kernels.quantise(self.dense().float(), 8, _GROUP)
            return False, GridWeight(q, scales, bits=8, group=_GROUP, dtype=self.dtype, bias=self.bias)
        exact = torch.equal(steps.float() * unit, self.table) and torch.equal(scales.float(), self.scales * unit)
        group, q = self.group, steps.to(torch.int8)[self.codes.int()]
        known = next(g for g in (256, 128, 64, 32) if group % g == 0)
        scales = scales.repeat_interleave(group // known, 1)
        return exact, GridWeight(q, scales, bits=8, group=known, dtype=self.dtype, bias=self.bias)

    def join(self, others: list[Self]) -> Self | None:
        """One matrix of the same table; absent biases count as zeros where any part has one."""
        every = [self, *others]
        if len({(part.group, part.dtype, part.name) for part in every}) > 1:
            return None
        if not all(torch.equal(part.table, self.table) for part in every):
            return None
        codes = torch.cat([part.codes for part in every])
        return self._like(codes, torch.cat([part.scales for part in every]), joined_bias(every, codes.device))

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index."""
        return self._like(self.codes[index], self.scales[index], None if self.bias is None else self.bias[index])

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0) or, on group borders, along in (1)."""
        if parts == 1:
            return self
        start, stop = self.part_range(dim, part, parts)
        if dim == 0:
            bias = None if self.bias is None else self.bias[start:stop]
            return self._like(self.codes[start:stop], self.scales[start:stop], bias)
        if start % self.group or stop % self.group:
            raise ModelError(f"Groups of {self.group} cannot be split over {parts} ranks at column {start or stop}.")
        scales = self.scales[:, start // self.group : stop // self.group]
        return self._like(self.codes[:, start:stop], scales, self.bias if part == 0 else None)

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        values = self.table[self.codes[ids].int()].view(len(ids), -1, self.group)
        return (values * self.scales[ids][..., None]).view(len(ids), -1).to(self.dtype)

    def dense(self) -> Tensor:
        """The whole matrix."""
        return self.rows(torch.arange(self.shape[0], device=self.codes.device))

    def bytes(self) -> int:
        """Codes as if they were packed, scales and bias."""
        bits = max(1, (len(self.table) - 1).bit_length())
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.codes.numel() * bits // 8 + self.scales.nbytes + bias

    def _like(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Self:
        return type(self)(codes.contiguous(), self.table, scales.contiguous(), self.dtype, bias, self.name)


def _whole(table: Tensor) -> tuple[Tensor, float]:
    """Whole numbers [n] up to 127 and a unit: table ~ numbers * unit, exactly if one of a few units makes it so."""
    top = float(table.abs().max())
    if not top:
        return torch.zeros_like(table, dtype=torch.int16), 1.0
    for unit in (1.0, 0.5, 0.25):
        steps = table / unit
        if torch.equal(steps.round(), steps) and top / unit <= 127:
            return steps.to(torch.int16), unit
    unit = top / 127.0
    return (table / unit).round().to(torch.int16), unit


def nibbles(raw: Tensor, *, high_first: bool = False) -> Tensor:
    """raw [..., n] uint8 -> codes [..., 2 n], the low half of a byte first unless told."""
    halves = (raw >> 4, raw & 15) if high_first else (raw & 15, raw >> 4)
    return torch.stack(halves, -1).flatten(-2)
