"""Weights in the layout that the native matmuls read. Owns: packing, and the buffer that the packed form lives in.

One layout serves every instruction set (csrc/pack.h), so packed bytes may be kept or memory-mapped. Knows nothing of
layers or of the cache that finds a tensor's packed form.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from tokenmill import _native
from tokenmill.compute.forward import Packed
from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.fp8 import BLOCK
from tokenmill.kernels.grid import FP4, whole_entries

Format = Literal["f32", "bf16", "f16", "int2", "int3", "int4", "int5", "int6", "int8"]
FORMATS: dict[str, int] = {"f32": 0, "bf16": 1, "int8": 2, "int4": 3, "int2": 16, "int3": 18, "f16": 26}
WITH_ZEROS: dict[str, int] = {"int2": 17, "int3": 19, "int4": 4, "int5": 20, "int6": 21, "int8": 22}
TABLE, NVFP4, FP8 = 23, 24, 25
SPARSE: dict[torch.dtype, int] = {torch.bfloat16: 27, torch.float16: 28}
BLOCKS: dict[str, int] = {
    "Q8_0": 2,
    "Q4_0": 3,
    "Q4_1": 5,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q2_K": 8,
    "Q3_K": 9,
    "Q4_K": 10,
    "Q5_K": 11,
    "Q6_K": 12,
    "IQ4_NL": 13,
    "IQ4_XS": 14,
    "MXFP4": 15,
}
"""GGUF types that are multiplied as they are: their codes and scales are kept, in another order."""
TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}
_PLAIN: dict[torch.dtype, Format] = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
STORED: dict[torch.dtype, int] = {**TYPES, torch.int8: 2, torch.uint8: 3}
"""What keys and values may be stored as."""
ALIGNMENT = 64
HUGE_PAGE = 1 << 21
_TRIED, _ZEROS = 64, 0.3
"""A matrix is packed without zeros if they are such a part of so many of its rows."""
_PIECE = 1 << 23
"""Bytes that are packed at a time."""
_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a matrix in one packed format; `group` columns share a scale where the format leaves that open."""

    buffer: Tensor
    rows: int
    format: int
    group: int = 0


class PackedMatrix:
    """A matrix [n, k] packed in one format or, by rows, in several, with the bias that goes with it. apart: activations
    of this magnitude or more are not rounded (int8 alone; 0: all are)."""

    __slots__ = ("bias", "k", "n", "native", "parts")

    def __init__(self, parts: list[Part], k: int, bias: Tensor | None, apart: float = 0.0) -> None:
        self.parts = parts
        self.n, self.k = sum(part.rows for part in parts), k
        self.bias = None if bias is None else bias.to(torch.float32).contiguous()
        address = 0 if self.bias is None else self.bias.data_ptr()
        said = [(part.buffer.data_ptr(), part.rows, part.format, part.group) for part in parts]
        self.native = _native.Matrix(said, k, address, *([apart] if apart else ()))

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Dense rows [len(ids), k]: what an embedding tied to this matrix needs."""
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty(ids.numel(), self.k, dtype=dtype)
        self.native.rows(ids.data_ptr(), ids.numel(), out.data_ptr(), TYPES[dtype])
        return out

    def pieces(self) -> None:
        """Nothing: experts are named one by one (bound.py)."""

    def bytes(self) -> int:
        """Bytes of the packed buffers and the bias."""
        return sum(part.buffer.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)


def pack_dense(weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
    """weight [n, k] in float32, bfloat16 or float16 -> the same numbers, packed."""
    n, k = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    fmt = _PLAIN[weight.dtype]
    buffer = _buffer(_native.packed_bytes(FORMATS[fmt], n, k, 0))
    stride = weight.stride(0)
    kind = TYPES.get(weight.dtype, 0)
    _native.pack_dense(weight.data_ptr(), kind, n, k, stride, FORMATS[fmt], buffer.data_ptr())
    return PackedMatrix([Part(buffer, n, FORMATS[fmt])], k, bias)


def pack_sparse(weight: Tensor, bias: Tensor | None = None, *, slowly: bool = False) -> PackedMatrix | None:
    """weight [n, k] in bfloat16 or float16 -> the same numbers, packed without zeros; None: too few are zeros, or this
    machine is slow at it (unless `slowly`)."""
    if weight.dtype not in SPARSE or not (slowly or _native.expands()):
        return None
    n, k = weight.shape
    some = weight[:: max(1, n // _TRIED)]
    if float((some == 0).sum()) < _ZEROS * some.numel():
        return None
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    fmt, about = SPARSE[weight.dtype], (weight.data_ptr(), n, k, weight.stride(0))
    size = _native.pack_sparse(*about, fmt, 0)
    if size > (1.0 - _ZEROS / 2) * weight.nbytes:
        return None
    buffer = _buffer(size)
    _native.pack_sparse(*about, fmt, buffer.data_ptr())
    return PackedMatrix([Part(buffer, n, fmt)], k, bias)


def pack_quantised(
    q: Tensor,
    scales: Tensor,
    fmt: Format,
    bias: Tensor | None = None,
    group: int = 0,
    zeros: Tensor | None = None,
    apart: float = 0.0,
) -> PackedMatrix:
    """q [n, k] int8 (int4: -8..7, and so on) with scales [n, ceil(k / group)] float16 -> packed.

    group: a multiple of 32; 0: the smallest that fits the scales (which is ambiguous when k is not its multiple).
    zeros, shaped like scales, whole or not: numbers that mean (q - zeros) * scales.
    """
    n, k = q.shape
    group = group or group_size(k, scales.shape[1])
    assert scales.shape == (n, math.ceil(k / group))
    native, beside = FORMATS.get(fmt), 0
    if zeros is None and native is None:  # 5 and 6 bits are held with zero points only
        zeros = torch.zeros_like(scales)
    if zeros is not None:
        assert zeros.shape == scales.shape
        middle = 0 if fmt == "int8" else 1 << (int(fmt[3:]) - 1)  # codes of fewer bits are stored from 0 on
        native, q, zeros = WITH_ZEROS[fmt], q + middle, (zeros.float() + middle).half().contiguous()
        beside = zeros.data_ptr()
    assert native is not None
    buffer = _buffer(_native.packed_bytes(native, n, k, group))
    q, scales = q.contiguous(), scales.contiguous()
    _native.pack_quantised(q.data_ptr(), scales.data_ptr(), n, k, group, native, buffer.data_ptr(), beside)
    return PackedMatrix([Part(buffer, n, native, group)], k, bias, apart)


def pack_blocks(
    pieces: Sequence[tuple[str, Tensor]], k: int, bias: Tensor | None = None, done: Callable[[], None] | None = None
) -> PackedMatrix | None:
    """Rows of k columns in GGUF blocks, raw [rows, bytes] under the name of their type -> the same numbers, packed.

    done: called after every few megabytes. None: a type that has no packed form, or two types that meet within a tile
    of 64 rows."""
    if any(name not in BLOCKS or raw.device.type != "cpu" for name, raw in pieces):
        return None
    parts = []
    for name, same in groupby(pieces, key=lambda piece: piece[0]):
        raws = [raw for _, raw in same]
        if any(raw.shape[0] % _native.TILE_COLUMNS for raw in raws[:-1]):
            raws = [torch.cat(raws)]
        parts.append((BLOCKS[name], raws))
    if any(sum(map(len, raws)) % _native.TILE_COLUMNS for _, raws in parts[:-1]):
        return None
    return PackedMatrix([_pack_alike(fmt, raws, k, done or (lambda: None)) for fmt, raws in parts], k, bias)


def _pack_alike(fmt: int, raws: list[Tensor], k: int, done: Callable[[], None]) -> Part:
    sizes = [_native.packed_bytes(fmt, raw.shape[0], k, _native.GROUP) for raw in raws]
    buffer, at = _buffer(sum(sizes)), 0
    for raw, size in zip(raws, sizes, strict=True):
        raw = raw if raw.stride(1) == 1 else raw.contiguous()
        per_tile = size // -(-raw.shape[0] // _native.TILE_COLUMNS)
        tiles = max(_PIECE // per_tile, 1)
        for piece in raw.split(tiles * _native.TILE_COLUMNS):
            to = buffer[at:].data_ptr()
            _native.pack_blocks(piece.data_ptr(), piece.stride(0), piece.shape[0], k, fmt, to)
            at += -(-piece.shape[0] // _native.TILE_COLUMNS) * per_tile
            done()
    return Part(buffer, sum(map(len, raws)), fmt, _native.GROUP)


def pack_numbers(m: StoredMatrix, pruned: str = "auto") -> PackedMatrix | None:
    """Numbers as they are; pruned: see make_kernels."""
    weight = m.part("numbers")
    if weight.dtype not in _PLAIN or weight.device.type != "cpu" or 0 in weight.shape:
        return None
    found = None if pruned == "dense" else pack_sparse(weight, m.bias, slowly=pruned == "packed")
    return found or pack_dense(weight, m.bias)


def _integers(m: StoredMatrix) -> PackedMatrix | None:
    """Integers with or without zeros; None: these groups have no native layout."""
    codes, scales = m.part("codes"), m.part("scales")
    if codes.device.type != "cpu" or codes.shape[1] % _native.GROUP or scales.shape[1] * 256 < codes.shape[1]:
        return None
    apart = m.find("apart")
    most = 0.0 if apart is None else float(apart)
    fmt = _KINDS[m.kind.removesuffix("-zeros")]
    return pack_quantised(codes, scales, fmt, m.bias, zeros=m.find("zeros"), apart=most)


def _table(m: StoredMatrix) -> PackedMatrix | None:
    """Codes of 16 entries in groups of 32 n, or NVFP4; None: other groups have no native layout.

    Entries are whole numbers of at most 127 times a unit; scales are half precision numbers times a factor per row.
    """
    codes, table = m.part("codes"), m.part("table")
    if codes.device.type != "cpu" or len(table) > 16 or codes.shape[1] % _native.GROUP or 0 in codes.shape:
        return None
    scales, factors = m.part("scales").float(), m.part("factors").float()
    n, k = codes.shape
    group = k // scales.shape[1]
    if group == 16:
        bytes_ = scales.to(torch.float8_e4m3fn)
        if not torch.equal(table, torch.tensor(FP4)) or not torch.equal(bytes_.float(), scales):
            return None
        entries, unit, native, held = torch.zeros(16), 0.5, NVFP4, bytes_.contiguous()
    else:
        size = next((g for g in (256, 128, 64, 32) if group % g == 0), 0)
        if not size:
            return None
        entries, unit = whole_entries(table)
        top = scales.abs().amax(1)
        held = torch.where(top[:, None] > 0, scales / top[:, None], 0.0).half()
        held = held.repeat_interleave(group // size, 1).contiguous()
        native, group, factors = TABLE, size, factors * top
    said = torch.nn.functional.pad(entries + 128, (0, 16 - len(entries))).to(torch.uint8)
    factors = (factors * unit).contiguous()
    buffer = _buffer(_native.packed_bytes(native, n, k, group))
    codes = codes.contiguous()
    pointers = (codes.data_ptr(), held.data_ptr(), factors.data_ptr(), said.data_ptr())
    _native.pack_table(pointers, n, k, group, native, buffer.data_ptr())
    return PackedMatrix([Part(buffer, n, native, group)], k, m.bias)


def _eights(m: StoredMatrix) -> PackedMatrix | None:
    """float8 with a scale per row or per block; None: columns that are not whole blocks."""
    data, scales = m.part("codes"), m.part("scales").float()
    (n, k), group = data.shape, 0
    if data.device.type != "cpu" or 0 in data.shape:
        return None
    if m.kind == "fp8-blocks":
        scales, group = scales.repeat_interleave(BLOCK, 0)[:n], BLOCK
    buffer = _buffer(_native.packed_bytes(FP8, n, k, group))
    data, scales = data.contiguous(), scales.contiguous()
    _native.pack_eights(data.data_ptr(), scales.data_ptr(), n, k, group, buffer.data_ptr())
    return PackedMatrix([Part(buffer, n, FP8, group)], k, m.bias)


def _blocks(m: StoredMatrix) -> PackedMatrix | None:
    return pack_blocks(m.parts, m.shape[1], m.bias, m.taken)


_KINDS: dict[str, Format] = {
    "int2": "int2", "int3": "int3", "int4": "int4", "int5": "int5", "int6": "int6", "int8": "int8",
}  # fmt: skip

PACKERS: dict[str, Callable[[StoredMatrix], Packed | None]] = {
    "dense": pack_numbers,
    **{kind + zeros: _integers for kind in _KINDS for zeros in ("", "-zeros")},
    "table": _table,
    "fp8": _eights,
    "fp8-blocks": _eights,
    "blocks": _blocks,
}
"""kind -> the packed form of a matrix of this kind, or None where its shape or a type in it has none."""


def quantise(weight: Tensor, fmt: Format, group: int = 32) -> tuple[Tensor, Tensor]:
    """weight [n, k] -> (q [n, k] int8, scales [n, ceil(k / group)] float16), rounded to nearest."""
    n, k = weight.shape
    weight = weight.contiguous()
    q = torch.empty(n, k, dtype=torch.int8)
    scales = torch.empty(n, -(-k // group), dtype=torch.float16)
    _native.quantise(
        weight.data_ptr(), TYPES[weight.dtype], n, k, k, FORMATS[fmt], group, q.data_ptr(), scales.data_ptr()
    )
    return q, scales


def group_size(k: int, groups: int) -> int:
    """The smallest multiple of 32 that cuts k columns into that many groups."""
    least = math.ceil(k / groups)
    group = math.ceil(least / _native.GROUP) * _native.GROUP
    if -(-k // group) != groups:
        raise ValueError(f"{groups} scales a row do not fit {k} columns: groups are multiples of {_native.GROUP}")
    return group


def _buffer(size: int) -> Tensor:
    """`size` bytes that begin on a cache line (a large page, if there are that many), with some to spare behind them:
    kernels prefetch past the end. Memory that is never touched costs nothing.

    Large ones are asked of the system, not of the heap: between what loading allocates and frees they would keep holes
    of its size, and a page of the heap that was touched before stays a small one."""
    align = HUGE_PAGE if size >= HUGE_PAGE else ALIGNMENT
    room = size + align + ALIGNMENT
    whole = torch.frombuffer(mmap.mmap(-1, room, **_PRIVATE), dtype=torch.uint8) if size >= HUGE_PAGE else None
    whole = torch.empty(room, dtype=torch.uint8) if whole is None else whole
    skip = -whole.data_ptr() % align
    buffer = whole[skip : skip + size]
    if align == HUGE_PAGE:
        _native.use_huge_pages(buffer.data_ptr(), size)
    return buffer
