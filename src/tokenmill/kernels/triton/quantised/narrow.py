"""Matrices of 8 and 4 bit numbers as Triton kernels read them. Owns: their layout in memory, packing and unpacking.

    8 bits  data [N, K] float8 (e4m3) or int8; scales float32 [N], or float32 [N / 128, K / 128], or float16 [K / g, N]
    4 bits  data [N, K / 4] int16: element j of each 32 holds columns j, 32 + j, 64 + j, 96 + j of its 128, lowest bits
            first: q + 8, or codes of a table (codes.py); scales float16 or bfloat16 [K / g, N], and bfloat16 zeros of
            that shape or None
K of 4 bit matrices is filled up to a multiple of 128 with columns whose scale is 0. Two elements lie in one register
with equal columns side by side, so that one `and` and one `or` give two bfloat16 numbers.
Must not know: kernels, layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.compute.forward import Packed
from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.grid import whole_entries
from tokenmill.kernels.triton.common import has_fp8
from tokenmill.kernels.triton.quantised.codes import entries_of, table_of

BLOCK = 128
"""Rows and columns that share a scale in a matrix of blocks; columns that 4 bit numbers are packed in."""
LARGEST8 = 448.0
"""The largest number in float8 (e4m3)."""
TINY = 2.0**-100
"""More than nothing: what all scales of a row that are 0 count as."""
_PIECE = 4096
"""Rows that are packed at a time, so that a large vocabulary needs no large temporary."""


@dataclass(frozen=True, slots=True)
class NarrowForm:
    """A NarrowMatrix without its numbers."""

    shape: tuple[int, int]
    bits: int
    group: int
    blocks: bool
    table: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class NarrowMatrix:
    """A packed matrix. shape: rows and columns before filling up; group: columns per scale, 0: one scale a row; table:
    what codes of 4 bits mean (codes.py), 0: integers.

    row_scales and row_zeros (int8): those of groups once more, [N, groups], for the kernel that takes one row.
    row_steps [N] float32: given where many rows are rounded to 8 bits, and what this matrix in float8 is multiplied
    with then. widened [N, K]: the same numbers in 16 bits, kept beside them for many rows."""

    data: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    shape: tuple[int, int]
    bits: int
    group: int
    blocks: bool = False
    row_scales: Tensor | None = None
    row_zeros: Tensor | None = None
    table: int = 0
    row_steps: Tensor | None = None
    widened: Tensor | None = None

    @property
    def plain(self) -> bool:
        """One scale per row: the matrix multiplies rounded activations on tensor cores."""
        return self.group == 0

    def pieces(self) -> tuple[NarrowForm, dict[str, Tensor | None]]:
        """What matrices must have in common to be stacked, and the tensors that would be."""
        form = NarrowForm(self.shape, self.bits, self.group, self.blocks, self.table)
        return form, {"table": self.data, "scales": self.scales, "zeros": self.zeros, "bias": self.bias}

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Dense rows [n, K]."""
        bits = torch.int16 if self.bits == 4 else torch.uint8
        stored = self.data.view(bits)[ids].view(self.data.dtype)  # not every device gathers float8
        if self.plain:
            return (stored.float() * self.scales[ids, None]).to(dtype)
        if self.blocks:
            scales = self.scales[ids // BLOCK].repeat_interleave(BLOCK, 1)[:, : self.shape[1]]
            return (stored.float() * scales).to(dtype)
        q = stored.float() if self.bits == 8 else self._numbers(unpack4(stored))
        if self.zeros is not None:
            q -= self.zeros[:, ids].T.float().repeat_interleave(self.group, 1)[:, : q.shape[1]]
        scales = self.scales[:, ids].T.float().repeat_interleave(self.group, 1)
        return (q * scales[:, : q.shape[1]])[:, : self.shape[1]].to(dtype)

    def _numbers(self, q: Tensor) -> Tensor:
        """What codes less 8 mean, in float32."""
        if not self.table:
            return q.float()
        entries = torch.tensor(entries_of(self.table), dtype=torch.float32, device=q.device)
        return entries[q.int() + 8]

    def bytes(self) -> int:
        """Bytes that a product reads."""
        return sum(t.nbytes for t in (self.data, self.scales, self.zeros, self.bias) if t is not None)


def can_pack8(q: Tensor, scales: Tensor) -> bool:
    """Whole groups of a multiple of 32 columns, or one."""
    groups = scales.shape[1]
    return groups == 1 or (q.shape[1] % groups == 0 and q.shape[1] // groups % 32 == 0)


def can_pack4(q: Tensor, scales: Tensor) -> bool:
    """Whole groups of 16, 32, 64 or a multiple of 128 columns, or one."""
    group = q.shape[1] // scales.shape[1]
    return scales.shape[1] == 1 or (
        group * scales.shape[1] == q.shape[1] and (group in (16, 32, 64) or group % BLOCK == 0)
    )


def pack8(data: Tensor, scales: Tensor, bias: Tensor | None, *, blocks: bool = False) -> NarrowMatrix:
    """data [N, K] float8 or int8 with scales [N, 1], or [N / 128, K / 128] (blocks), or [N, groups]."""
    shape = (data.shape[0], data.shape[1])
    if blocks:
        return NarrowMatrix(data, scales.float().contiguous(), None, bias, shape, 8, BLOCK, blocks=True)
    if scales.shape[1] == 1:
        return NarrowMatrix(data, scales.float().flatten().contiguous(), None, bias, shape, 8, 0)
    group = shape[1] // scales.shape[1]
    lying = scales.half().contiguous()
    return NarrowMatrix(data, lying.T.contiguous(), None, bias, shape, 8, group, row_scales=lying)


def pack4(q: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> NarrowMatrix:
    """q [N, K] int8 (-8..7), scales and zeros [N, groups] (can_pack4). Scales of bfloat16 stay so."""
    rows, columns = q.shape
    group = columns // scales.shape[1]
    if scales.shape[1] == 1:
        group = -(-columns // BLOCK) * BLOCK
    filled = _wider(q, -columns % BLOCK)
    data = torch.empty(rows, filled.shape[1] // 4, dtype=torch.int16, device=q.device)
    shifts = torch.arange(0, 16, 4, device=q.device, dtype=torch.int16).view(4, 1)
    for start in range(0, rows, _PIECE):
        nibbles = filled[start : start + _PIECE].to(torch.int16).add_(8).view(-1, filled.shape[1] // BLOCK, 4, 32)
        words = data[start : start + _PIECE].view(-1, filled.shape[1] // BLOCK, 32)
        torch.sum(nibbles << shifts, 2, dtype=torch.int16, out=words)  # no bit is in two of them
    groups = filled.shape[1] // group
    more = groups - scales.shape[1]
    lying = _wider(scales if scales.dtype == torch.bfloat16 else scales.half(), more).contiguous()
    shape = (rows, columns)
    if zeros is None:
        return NarrowMatrix(data, lying.T.contiguous(), None, bias, shape, 4, group, row_scales=lying)
    offsets = _wider(zeros, more).contiguous()
    standing = offsets.T.to(torch.bfloat16).contiguous()
    return NarrowMatrix(data, lying.T.contiguous(), standing, bias, shape, 4, group, False, lying, offsets)


def _wider(x: Tensor, more: int) -> Tensor:
    """So many columns of zeros behind the others."""
    return F.pad(x, (0, more)) if more else x


def unpack4(data: Tensor) -> Tensor:
    """The inverse of `pack4`: data [n, K / 4] int16 -> [n, K] int8."""
    words = data.view(data.shape[0], -1, 1, 32)
    shifts = torch.arange(0, 16, 4, device=data.device, dtype=torch.int16).view(1, 1, 4, 1)
    return (((words >> shifts) & 15) - 8).to(torch.int8).reshape(data.shape[0], -1)


def _eight(m: StoredMatrix) -> NarrowMatrix | None:
    codes, scales = m.part("codes"), m.part("scales")
    if m.find("apart") is not None and scales.shape[1] == 1:  # by groups, activations are not rounded row by row
        if codes.shape[1] % 32:
            return None
        scales = scales.expand(-1, codes.shape[1] // 32)
    return pack8(codes, scales, m.bias) if can_pack8(codes, scales) else None


def _four(m: StoredMatrix) -> NarrowMatrix | None:
    codes, scales = m.part("codes"), m.part("scales")
    zeros = m.find("zeros")
    fractions = zeros is not None and zeros.is_floating_point()  # the kernel of one row has them as int8
    if fractions or not can_pack4(codes, scales):
        return None
    made = pack4(codes, scales, zeros, m.bias)
    if m.find("rounds-inputs") is None or not has_fp8():
        return made
    most = 8.0 if zeros is None else torch.maximum(zeros.float() + 8.0, 7.0 - zeros.float())
    return replace(made, row_steps=(scales.float() * most).amax(1).clamp(min=TINY) / LARGEST8)


def _table(m: StoredMatrix) -> NarrowMatrix | None:
    """Codes of up to sixteen entries: whole numbers of at most 127 times a unit, which goes into the scales."""
    codes, table = m.part("codes"), m.part("table")
    scales = m.part("scales").float() * m.part("factors").float()[:, None]
    if len(table) > 16 or not can_pack4(codes, scales):
        return None
    steps, unit = whole_entries(table)
    entries = table_of(steps)
    if not entries:
        return None
    return replace(pack4(codes.to(torch.int8) - 8, _short(scales * unit), None, m.bias), table=entries)


def _short(scales: Tensor) -> Tensor:
    """float32 scales in bfloat16 where that is exact, as of powers of two, or where float16 has not their range; else
    in float16."""
    brief, half = scales.bfloat16(), scales.half()
    if torch.equal(brief.float(), scales):
        return brief
    near = (half.float() - scales).abs() <= scales.abs() * 2.0**-10
    return half if bool(near.all()) else brief


def _float8(m: StoredMatrix) -> NarrowMatrix | None:
    return pack8(m.part("codes"), m.part("scales"), m.bias, blocks=m.kind == "fp8-blocks") if has_fp8() else None


PACKERS: dict[str, Callable[[StoredMatrix], Packed | None]] = {
    "int8": _eight,
    "int4": _four,
    "int4-zeros": _four,
    "table": _table,
    "fp8": _float8,
    "fp8-blocks": _float8,
}
"""kind -> the packed form of a matrix of this kind, or None where its groups or this GPU have none."""
