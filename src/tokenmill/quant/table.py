"""Weights whose codes name an entry of a table: NF4, the 4 bit floats, and any other table of at most 256 numbers.

    weight[n, k] = table[codes[n, k]] * scale[n, k // group] * factor[n]
Owns: the form as files have it, and what it settles into: a backend's own form of it (codes as they are; entries
rounded to 8 bits, unless they are whole numbers times a constant, as those of 4 bit floats are); else int8 with the
same scales; groups that no kernel knows (such that end within a row) are rounded anew in groups of 32. Must not know:
files, layers.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tokenmill.compute.forward import Kernels, StoredMatrix, Weight
from tokenmill.core.errors import UnevenError
from tokenmill.kernels.grid import SMALLEST_HALF, beyond_half, whole_entries
from tokenmill.quant.base import known
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.grid import GridWeight
from tokenmill.quant.half_scales import too_small
from tokenmill.quant.packed import PackedWeight, joined_bias

_GROUP = 32


class TableWeight(PackedWeight):
    """codes [out, in] uint8, table [n] float32 on the host, scales [out, in / group] float32. factors: [out] float32,
    applied to all scales of a row, or None. `name`: for messages."""

    def __init__(
        self,
        codes: Tensor,
        table: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None,
        name: str,
        factors: Tensor | None = None,
    ) -> None:
        self.codes: Tensor | None = codes
        self.table, self.scales = table.float(), scales.float()
        self.factors = scales.new_ones(len(codes), dtype=torch.float32) if factors is None else factors.float()
        self.dtype, self.bias, self.name = dtype, bias, name
        self.shape = (codes.shape[0], codes.shape[1])
        self.group = self.shape[1] // scales.shape[1]
        assert self.group * scales.shape[1] == self.shape[1]

    def to(self, device: torch.device) -> Self:
        """A copy on another device. The weight must not be settled yet."""
        codes, scales, factors = (t.to(device) for t in (self.numbers(), self.scales, self.factors))
        return type(self)(codes, self.table, scales, self.dtype, self.bias, self.name, factors)

    def numbers(self) -> Tensor:
        """The codes. The weight must not be settled yet."""
        assert self.codes is not None, "a settled weight is not taken apart"
        return self.codes

    def stored(self) -> StoredMatrix:
        """A matrix of kind "table"."""
        parts = ("codes", self.numbers()), ("table", self.table), ("scales", self.scales), ("factors", self.factors)
        return StoredMatrix("table", self.shape, parts, self.dense, self.bias)

    def forget(self) -> None:
        """Free the stored numbers: the packed form has them."""
        self.codes, self.scales = None, self.scales[:0]

    def settle(self, kernels: Kernels) -> Weight:
        """Settle in the backend's form of tables, else as integers with scales."""
        if self.packed is not None or self.packs(kernels):
            return self
        steps, unit = whole_entries(self.table)
        exact, weight = self._integers(kernels, steps, unit)
        if not exact and not isinstance(weight, DenseWeight):
            weight.changed = (self.name,)
        return weight.settle(kernels)

    def packs(self, kernels: Kernels) -> bool:
        """Replace the codes by the backend's form of tables, if it has one for this matrix."""
        self.packed = kernels.pack(self.stored())
        if self.packed is None:
            return False
        if known(self.numbers()):
            steps, unit = whole_entries(self.table)
            some = torch.arange(min(64, self.shape[0]))  # a form that rounds scales rounds all of them
            same = torch.allclose(self.packed.rows(some, torch.float32), self._wide(some), rtol=1e-6, atol=0.0)
            if not (torch.equal(steps * unit, self.table) and same):
                self.changed = (self.name,)
        self.forget()
        return True

    def _integers(self, kernels: Kernels, steps: Tensor, unit: float) -> tuple[bool, GridWeight | DenseWeight]:
        """(Is nothing lost? The integer form to settle.)"""
        if self.shape[1] % _GROUP:
            return True, DenseWeight(self.dense(), self.bias)
        whole = self.scales * self.factors[:, None]
        scales = (whole * unit).half()
        if known(whole) and (too_small(whole * unit) or not bool(torch.isfinite(scales).all())):
            return True, DenseWeight(self.dense(), self.bias)
        used = scales[scales != 0].float().abs()
        fits = bool(torch.isfinite(used).all()) and (not used.numel() or float(used.min()) >= SMALLEST_HALF)
        fits = fits and torch.equal(scales != 0, whole != 0)
        if self.group % _GROUP or not fits:
            wide = self.dense()
            q, scales = kernels.quantise(wide.float(), 8, _GROUP)
            if beyond_half(wide, scales, 8):
                return True, DenseWeight(wide, self.bias)
            return False, GridWeight(q, scales, bits=8, group=_GROUP, dtype=self.dtype, bias=self.bias)
        exact = torch.equal(steps * unit, self.table) and torch.equal(scales.float(), whole * unit)
        group, q = self.group, self._looked_up(steps.to(torch.int8), self.numbers())
        size = next(g for g in (256, 128, 64, 32) if group % g == 0)
        scales = scales.repeat_interleave(group // size, 1)
        return exact, GridWeight(q, scales, bits=8, group=size, dtype=self.dtype, bias=self.bias)

    def join(self, others: list[Self]) -> Self | None:
        """One matrix with the same table. If any part has a bias, missing ones count as zeros."""
        every = [self, *others]
        if len({(part.group, part.dtype, part.name) for part in every}) > 1:
            return None
        if known(self.table) and not all(torch.equal(part.table, self.table) for part in every):
            return None
        codes, scales = torch.cat([part.numbers() for part in every]), torch.cat([part.scales for part in every])
        factors = torch.cat([part.factors for part in every])
        return self._like(codes, scales, factors, joined_bias(every, codes.device))

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index."""
        bias = None if self.bias is None else self.bias[index]
        return self._like(self.numbers()[index], self.scales[index], self.factors[index], bias)

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0), or along in (1) if it is cut between groups."""
        if parts == 1:
            return self
        start, stop = self.part_range(dim, part, parts)
        codes = self.numbers()
        if dim == 0:
            bias = None if self.bias is None else self.bias[start:stop]
            return self._like(codes[start:stop], self.scales[start:stop], self.factors[start:stop], bias)
        if start % self.group or stop % self.group:
            raise UnevenError(f"a matrix of {self.shape[1]} columns in groups of {self.group}", parts)
        scales = self.scales[:, start // self.group : stop // self.group]
        return self._like(codes[:, start:stop], scales, self.factors, self.bias if part == 0 else None)

    def stored_rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        return self._wide(ids).to(self.dtype)

    def _wide(self, ids: Tensor) -> Tensor:
        values = self._looked_up(self.table, self.numbers()[ids]).view(len(ids), -1, self.group)
        scales = self.scales[ids] * self.factors[ids, None]
        return (values * scales[..., None]).view(len(ids), -1)

    @staticmethod
    def _looked_up(entries: Tensor, codes: Tensor) -> Tensor:
        return entries.to(codes.device)[codes.int()]

    def stored_bytes(self) -> int:
        """Bytes of the codes, counted as packed, and of the scales."""
        bits = max(1, (len(self.table) - 1).bit_length())
        return self.numbers().numel() * bits // 8 + self.scales.nbytes

    def _like(self, codes: Tensor, scales: Tensor, factors: Tensor, bias: Tensor | None) -> Self:
        parts = codes.contiguous(), self.table, scales.contiguous()
        return type(self)(*parts, self.dtype, bias, self.name, factors.contiguous())


def nibbles(raw: Tensor, *, high_first: bool = False) -> Tensor:
    """raw [..., n] uint8 -> codes [..., 2 n]. The low half of a byte comes first unless told otherwise."""
    halves = (raw >> 4, raw & 15) if high_first else (raw & 15, raw >> 4)
    return torch.stack(halves, -1).flatten(-2)
