"""Weights that stay in a GGUF file's own blocks until they settle. Owns: which form each block type settles into.

Rows (embeddings) are decoded from the blocks one by one; joining, splitting and reordering move bytes. Settling gives

- the backend's own form of the blocks, where it has one (kind "blocks"): same numbers, same bits per weight;
- else, of types whose codes are entries of one table, the backend's form of tables;
- else, on a backend with packed integers: int4 or int8 with float16 scales, bit for bit for Q4_0, Q8_0, Q5_0, IQ4_NL
  and MXFP4, and int8 in groups of 32, rounded anew, for all others (codebooks of several numbers have no other form);
- else the file's own integers, scales and offsets.

Must not know: files, names, layers.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Self

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_blocks import FOUR_BIT_FLOATS, NON_LINEAR, Blocks, Grid
from tokenmill.compute.forward import Kernels, Packed, StoredMatrix, Weight
from tokenmill.core.errors import UnevenError
from tokenmill.kernels.grid import SMALLEST_HALF, beyond_half
from tokenmill.quant.affine import AffineWeight
from tokenmill.quant.base import MixedWeight, WeightBase, known
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.grid import GridWeight
from tokenmill.quant.packed import PackedWeight
from tokenmill.quant.table import TableWeight

GROUP = 32
FOUR_BITS = "Q4_0"
EXACT = frozenset({"Q4_0", "Q8_0", "Q5_0", "IQ4_NL", "MXFP4"})
"""Types whose numbers are small integers times a float16 (or a power of two), with one scale per 32."""
TABLES = {"MXFP4": FOUR_BIT_FLOATS, "NVFP4": FOUR_BIT_FLOATS, "IQ4_NL": NON_LINEAR, "IQ4_XS": NON_LINEAR}
"""Types whose codes are entries of a table, and the table."""
TERNARY, TERNARY_GROUP = frozenset({"TQ1_0", "TQ2_0"}), 256
"""Types of -1, 0 and 1, and how many columns share a scale."""
_CLOSE = 2.0**-11
_DEVICE_PIECE = 1 << 24
_PIECE = 1 << 15
"""The weights that are decoded at once: few enough to stay in the cache and to be decoded by one thread."""


class BlockWeight(WeightBase):
    """[blocks; blocks; ...] along out, of any block types, with a bias [out] or None."""

    def __init__(self, parts: list[Blocks], dtype: torch.dtype, bias: Tensor | None = None) -> None:
        self.parts, self.dtype, self.bias = parts, dtype, bias
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])

    def to(self, device: torch.device) -> Self:
        """A copy on another device. The weight must not be settled yet."""
        parts = [replace(part, raw=part.raw.to(device)) for part in self.parts]
        return type(self)(parts, self.dtype, None if self.bias is None else self.bias.to(device))

    def settle(self, kernels: Kernels) -> Weight:
        """The form that the backend multiplies fastest, chosen as the module's text says."""
        raw = tuple((part.type.name, part.raw) for part in self.parts)
        packed = kernels.pack(StoredMatrix("blocks", self.shape, raw, self.dense, self.bias, self._forget))
        if packed is not None:
            return SettledBlocks(packed, self.shape, self.dtype)
        if len({part.type.name for part in self.parts}) > 1:  # one grid would widen the types with fewer bits
            return MixedWeight([part.settle(kernels) for part in self._apart()])
        coded = self._coded()
        if coded is not None and coded.packs(kernels):
            return coded
        exact = all(part.type.name in EXACT for part in self.parts)
        if exact or _packs(kernels, self.shape[1], self.parts[0].raw.device):
            return self._packed(kernels)
        settled: list[Weight] = []
        for part in self._apart():
            grid = part.parts[0].grid()
            if grid is None:
                settled.append(part._packed(kernels))
            else:
                affine = AffineWeight(grid.q, grid.scale, grid.offset, self.dtype, part.bias)
                settled.append(affine.settle(kernels))
        return settled[0] if len(settled) == 1 else MixedWeight(settled)

    def _forget(self) -> None:
        for part in self.parts:
            if part.forget is not None:
                part.forget()

    def _apart(self) -> list[BlockWeight]:
        """Each part as a weight of its own."""
        found, start = [], 0
        for part in self.parts:
            stop = start + part.shape[0]
            found.append(BlockWeight([part], self.dtype, None if self.bias is None else self.bias[start:stop]))
            start = stop
        return found

    def _coded(self) -> TableWeight | None:
        """The form of codes, a table and scales."""
        name = self.parts[0].type.name
        if name not in TABLES:
            return None
        table, codes_of = torch.tensor(TABLES[name], device="cpu"), torch.zeros(256, dtype=torch.uint8, device="cpu")
        codes_of[table + 128] = torch.arange(16, dtype=torch.uint8, device="cpu")
        codes_of = codes_of.to(self.parts[0].raw.device)
        codes, scales = [], []
        for part in self.parts:
            for piece in part.raw.split(max(_DEVICE_PIECE // self.shape[1], 1)):
                grid = replace(part, raw=piece).grid()
                assert grid is not None, "entries times scales"
                codes.append(codes_of[grid.q.int() + 128])
                scales.append(grid.scale)
        return TableWeight(torch.cat(codes), table, torch.cat(scales), self.dtype, self.bias, name)

    def _packed(self, kernels: Kernels) -> Weight:
        rows, columns = self.shape
        device = self.parts[0].raw.device
        q = torch.empty(rows, columns, dtype=torch.int8, device=device)
        scales = torch.empty(rows, columns // GROUP, dtype=torch.float16, device=device)
        changed, at = set(), 0
        for part in self.parts:
            for piece in part.raw.split(max((_PIECE if device.type == "cpu" else _DEVICE_PIECE) // columns, 1)):
                stop = at + len(piece)
                q[at:stop], scales[at:stop], exact = _as_integers(replace(part, raw=piece), kernels)
                at = stop
                if not exact:
                    changed.add(part.type.name)
        # Scales that are zero may have been too small, too.
        odd = known(scales) and not SMALLEST_HALF <= float(scales.abs().max()) < inf
        if odd and beyond_half(self.dense().float(), scales, 8):
            return DenseWeight(self.dense(), self.bias).settle(kernels)
        name, group = self.parts[0].type.name, GROUP
        bits = 4 if name == FOUR_BITS else 2 if name in TERNARY and not changed else 8
        if bits == 2:
            group, scales = TERNARY_GROUP, scales[:, :: TERNARY_GROUP // GROUP].contiguous()
        grid = GridWeight(q, scales, bits=bits, group=group, dtype=self.dtype, bias=self.bias)
        grid.changed = tuple(sorted(changed))
        return grid.settle(kernels)

    def join(self, others: list[Self]) -> Self | None:
        """One weight, whatever the block types of its parts."""
        every = [self, *others]
        if len({weight.dtype for weight in every}) > 1:
            return None
        bias = None
        if any(weight.bias is not None for weight in every):
            bias = torch.cat([w.parts[0].raw.new_zeros(w.shape[0], dtype=w.dtype) if w.bias is None else w.bias
                              for w in every])  # fmt: skip
        return type(self)([part for weight in every for part in weight.parts], self.dtype, bias)

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index. Bytes are moved, nothing is decoded."""
        bias = None if self.bias is None else self.bias[index]
        if len(self.parts) == 1:
            return type(self)([self.parts[0].take(index)], self.dtype, bias)
        starts = torch.tensor([0, *(part.shape[0] for part in self.parts)]).cumsum(0)
        owner = torch.bucketize(index.cpu(), starts[1:], right=True)
        parts, at = [], 0
        for which, count in zip(
            *(t.tolist() for t in torch.unique_consecutive(owner, return_counts=True)), strict=True
        ):
            parts.append(self.parts[which].take(index[at : at + count] - int(starts[which])))
            at += count
        return type(self)(parts, self.dtype, bias)

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0), or along in (1) if it is cut between blocks."""
        if parts == 1:
            return self
        if dim == 0:
            return self.take(self.part_index(part, parts, self.parts[0].raw.device))
        start, stop = self.part_range(1, part, parts)
        widest = max(piece.type.elements for piece in self.parts)
        if start % widest or stop % widest:
            raise UnevenError(f"a matrix of {self.shape[1]} columns in blocks of {widest}", parts)
        bias = self.bias if part == 0 else None
        return type(self)([piece.columns(start, stop) for piece in self.parts], self.dtype, bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in], decoded on every call."""
        return self.take(ids).dense()

    def dense(self) -> Tensor:
        """The whole matrix."""
        return torch.cat([part.dense().to(self.dtype) for part in self.parts])

    def bytes(self) -> int:
        """Bytes of the blocks and the bias."""
        return sum(part.raw.numel() for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)


class SettledBlocks(PackedWeight):
    """The backend's packed form of blocks [out, in]."""

    def __init__(self, packed: Packed, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.packed, self.shape, self.dtype = packed, shape, dtype


def _packs(kernels: Kernels, columns: int, device: torch.device) -> bool:
    """Does this backend pack int8 matrices with rows of this length?"""
    q = torch.zeros(1, columns, dtype=torch.int8, device=device)
    scales = q.new_zeros(1, columns // GROUP, dtype=torch.float16)
    grid = GridWeight(q, scales, bits=8, group=GROUP, dtype=torch.float32)
    return kernels.pack(grid.stored()) is not None


def _as_integers(part: Blocks, kernels: Kernels) -> tuple[Tensor, Tensor, bool]:
    """q int8, scales float16 in groups of 32, and whether these are exactly the numbers of the blocks."""
    grid = part.grid()
    if grid is not None and grid.offset is None and grid.group == GROUP:
        scales, exact = _half_scales(grid)
        if scales is not None:
            return grid.q, scales, exact
    wide = part.dense() if grid is None else grid.dense()
    q, scales = kernels.quantise(wide, 8, GROUP)
    if known(wide) and not bool(torch.isfinite(wide).all()):
        scales = torch.full_like(scales, nan)  # integers would hide that the file's numbers are none
    return q, scales, False


def _half_scales(grid: Grid) -> tuple[Tensor | None, bool]:
    """The scales in float16 if that is close enough, and whether it is exact."""
    scales = grid.scale.half()
    error = (scales.float() - grid.scale).abs()
    if not bool((error <= _CLOSE * grid.scale.abs()).all()):
        return None, False
    return scales, not bool(error.any())
