"""Integer weights with one float16 scale per group of a row: int8 and int4. Owns: the two formats, rounded or to be.

    weight[n, k] ~ q[n, k] * scale[n, k // group]         int8: -127..127     int4: -8..7
    weight[n, k] ~ (q[n, k] - zero[n, k // group]) * scale[n, k // group]     files that have zero points, whole or not
Files also have 2, 3, 5, 6 and 7 bits. A backend that has no form of them is given 4 or 8.
Must not know: checkpoints, layers, instruction sets. After settling, only the backend's packed form is held.
"""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor

from tokenmill.compute.forward import Kernels, StoredMatrix, Weight
from tokenmill.core.errors import UnevenError
from tokenmill.kernels.grid import ACTIVATION_GROUP, beyond_half, group_width, widen
from tokenmill.quant.affine import AffineWeight
from tokenmill.quant.at_load import RoundedAtLoad
from tokenmill.quant.base import known
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.packed import PackedWeight, joined_bias


class GridWeight(PackedWeight):
    """q [out, in] int8, scales [out, ceil(in / group)] float16, and zeros of that shape in int8 (8 bits: int16), in
    float32 if they are fractions, or None. `bits` is 2 to 8. apart and rounds_inputs: see compute/matrix.py; apart of
    0: no activations are left as they are."""

    apart: float = 0.0
    rounds_inputs: bool = False

    def __init__(
        self,
        q: Tensor,
        scales: Tensor,
        *,
        bits: int,
        group: int,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        zeros: Tensor | None = None,
    ) -> None:
        self.q: Tensor | None = q.contiguous()
        self.scales: Tensor | None = scales.contiguous()
        self.bits, self.group, self.dtype = bits, group, dtype
        self.bias = bias
        if zeros is not None and not zeros.is_floating_point():
            zeros = zeros.to(torch.int8 if bits <= 4 else torch.int16)
        self.zeros = zeros
        self.shape = (q.shape[0], q.shape[1])

    def to(self, device: torch.device) -> Self:
        """A copy on another device. The weight must not be settled yet."""
        q, scales = self.numbers()
        zeros = None if self.zeros is None else self.zeros.to(device)
        return self._like(q.to(device), scales.to(device), self.bias, zeros)

    def settle(self, kernels: Kernels) -> Weight:
        """Replace the numbers by the backend's packed form. Zero points for which there is none become 8 bits."""
        if self.packed is not None:
            return self
        for bits in sorted({self.bits, 4 if self.bits <= 4 else 8}):
            self.bits = bits
            self.packed = kernels.pack(self.stored())
            if self.packed is not None:
                if self.zeros is not None and known(z := self.zeros) and not torch.equal(z.half().float(), z.float()):
                    self.changed = ("zero points that are not integers",)
                self.forget()
                return self
        if self.zeros is None:
            return self
        q, scales = self.numbers()
        if self.zeros.is_floating_point():
            return self._anew(q, scales, self.zeros, kernels)
        less = q - self.zeros.repeat_interleave(self.group, 1)[:, : self.shape[1]]  # small integers, too
        if known(less) and (int(less.max()) > 127 or int(less.min()) < -128):
            return self._affine(q, scales, self.zeros, kernels)
        self.q, self.bits, self.zeros = less.to(torch.int8), 8, None
        return super().settle(kernels)

    def stored(self) -> StoredMatrix:
        """A matrix of kind "int8", "int4", ..., with zeros if there are any."""
        q, scales = self.numbers()
        parts, kind = [("codes", q), ("scales", scales)], f"int{self.bits}"
        if self.rounds_inputs:
            parts.append(("rounds-inputs", torch.tensor(1)))
        if self.zeros is not None:
            parts.append(("zeros", self.zeros))
            kind += "-zeros"
        elif self.apart:
            parts.append(("apart", torch.tensor(self.apart)))
        return StoredMatrix(kind, self.shape, tuple(parts), self.dense, self.bias)

    def forget(self) -> None:
        """Free the stored numbers: the packed form has them."""
        self.q = self.scales = self.zeros = None

    def _anew(self, q: Tensor, scales: Tensor, zeros: Tensor, kernels: Kernels) -> Weight:
        """Fractional zero points, rounded anew to 8 bits if the backend packs them."""
        wide = self.dense()
        found, steps = kernels.quantise(wide.float(), 8, ACTIVATION_GROUP)
        if beyond_half(wide, steps, 8):
            return DenseWeight(wide, self.bias).settle(kernels)
        grid = GridWeight(found, steps, bits=8, group=ACTIVATION_GROUP, dtype=self.dtype, bias=self.bias)
        if kernels.pack(grid.stored()) is None:
            return self._affine(q, scales, zeros, kernels)
        grid.changed = ("zero points that are not integers",)
        return grid.settle(kernels)

    def _affine(self, q: Tensor, scales: Tensor, zeros: Tensor, kernels: Kernels) -> Weight:
        """Differences that need nine bits: the zero points become offsets."""
        if self.group % ACTIVATION_GROUP:
            return DenseWeight(self.dense(), self.bias).settle(kernels)
        repeat = self.group // ACTIVATION_GROUP
        scale = scales.float()
        scale, offset = (t.repeat_interleave(repeat, 1).contiguous() for t in (scale, -scale * zeros.float()))
        return AffineWeight(q, scale, offset, self.dtype, self.bias).settle(kernels)

    def join(self, others: list[Self]) -> Self | None:
        """One matrix of the same grid. If any part has a bias, missing ones count as zeros."""
        every = [self, *others]
        if len({(part.bits, part.group, part.dtype, part.apart, part.rounds_inputs) for part in every}) > 1:
            return None
        parts = [part.numbers() for part in every]
        zeros = None
        if any(part.zeros is not None for part in every):
            zeros = torch.cat([
                torch.zeros_like(s, dtype=torch.int16) if p.zeros is None else p.zeros
                for p, (_, s) in zip(every, parts, strict=True)
            ])  # fmt: skip
        q = torch.cat([q for q, _ in parts])
        return self._like(q, torch.cat([s for _, s in parts]), joined_bias(every, q.device), zeros)

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index."""
        q, scales = self.numbers()
        bias, zeros = (None if t is None else t[index] for t in (self.bias, self.zeros))
        return self._like(q[index], scales[index], bias, zeros)

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0), or along in (1) if it is cut between groups."""
        if parts == 1:
            return self
        start, stop = self.part_range(dim, part, parts)
        q, scales = self.numbers()
        if dim == 0:
            bias, zeros = (None if t is None else t[start:stop] for t in (self.bias, self.zeros))
            return self._like(q[start:stop], scales[start:stop], bias, zeros)
        finer = math.gcd(self.group, start, stop)
        if finer != self.group and finer % ACTIVATION_GROUP == 0:
            return self._finer(finer).split(1, part, parts)
        if start % self.group or stop % self.group:
            raise UnevenError(f"a matrix of {self.shape[1]} columns in groups of {self.group}", parts)
        first, last = start // self.group, stop // self.group
        zeros = None if self.zeros is None else self.zeros[:, first:last]
        return self._like(q[:, start:stop], scales[:, first:last], self.bias if part == 0 else None, zeros)

    def _finer(self, group: int) -> Self:
        """The same numbers with more scales."""
        q, scales = self.numbers()
        repeat, groups = self.group // group, -(-self.shape[1] // group)
        scales = scales.repeat_interleave(repeat, 1)[:, :groups]
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(repeat, 1)[:, :groups]
        return self._like(q, scales, self.bias, zeros, group)

    def stored_rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        stored, scales = self.numbers()
        q = stored[ids]
        if self.zeros is not None:
            q = q - self.zeros[ids].repeat_interleave(self.group, 1)[:, : self.shape[1]]
        return widen(q, scales[ids]).to(self.dtype)

    def stored_bytes(self) -> int:
        """Bytes of numbers, scales and zero points. 4 bit numbers count as packed ones."""
        q, scales = self.numbers()
        return q.numel() * self.bits // 8 + scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def numbers(self) -> tuple[Tensor, Tensor]:
        """q and scales. The weight must not be settled yet."""
        assert self.q is not None and self.scales is not None, "a settled weight is not taken apart"
        return self.q, self.scales

    def _like(self, q: Tensor, scales: Tensor, bias: Tensor | None, zeros: Tensor | None, group: int = 0) -> Self:
        group = group or self.group
        made = type(self)(q, scales, bits=self.bits, group=group, dtype=self.dtype, bias=bias, zeros=zeros)
        made.apart, made.rounds_inputs, made.changed = self.apart, self.rounds_inputs, self.changed
        return made


class Unrounded(RoundedAtLoad):
    """No group straddles two parts of what is joined before it is rounded."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        bits: int = 8,
        group: int = 0,
        rounds_inputs: bool = False,
        form: str = "",
    ) -> None:
        """group: columns per scale; 0: the backend chooses. rounds_inputs: see GridWeight. form: a stored form that no
        kernel takes, whose numbers these are; the rounded weight tells it."""
        super().__init__(weight, bias)
        self.bits, self.group, self.rounds_inputs, self.form = bits, group, rounds_inputs, form

    def rounded(self, kernels: Kernels, parts: int) -> GridWeight | None:
        """None: half precision cannot hold the scales of one of the parts."""
        columns, wide = self.shape[1], self.dense()
        group = next((g for g in (self.group, 64, 32) if self.group and columns % g == 0), self.group)
        q, scales = kernels.quantise(wide, self.bits, group)
        if beyond_half(wide, scales, self.bits, parts):
            return None
        group = group or group_width(columns, scales.shape[1])
        grid = GridWeight(q, scales, bits=self.bits, group=group, dtype=self.dtype, bias=self.bias)
        grid.rounds_inputs = self.rounds_inputs
        grid.changed = (self.form,) if self.form else ()
        return grid

    def join(self, others: list[Self]) -> Self | None:
        """One matrix, if all of them will be rounded alike."""
        return super().join(others) if all(o._how == self._how for o in others) else None

    def _like(self, weight: Tensor, bias: Tensor | None) -> Self:
        return type(self)(weight, bias, *self._how)

    @property
    def _how(self) -> tuple[int, int, bool, str]:
        return self.bits, self.group, self.rounds_inputs, self.form
