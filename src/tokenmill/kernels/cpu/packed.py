"""Weights in the layout that the native matmuls read. Owns: packing, and the buffer that the packed form lives in.

One layout serves every instruction set (csrc/pack.h), so packed bytes may be kept or memory-mapped. Knows nothing of
layers or of the cache that finds a tensor's packed form.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from tokenmill import _native

Format = Literal["f32", "bf16", "int8", "int4"]
FORMATS: dict[str, int] = {"f32": 0, "bf16": 1, "int8": 2, "int4": 3}
TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}
ALIGNMENT = 64


class PackedMatrix:
    """A matrix [n, k] packed in some format, with the bias that goes with it."""

    __slots__ = ("bias", "buffer", "format", "group", "k", "n", "native")

    def __init__(self, buffer: Tensor, shape: tuple[int, int], fmt: Format, group: int, bias: Tensor | None) -> None:
        self.buffer, self.format, self.group = buffer, fmt, group
        self.n, self.k = shape
        self.bias = None if bias is None else bias.to(torch.float32).contiguous()
        address = 0 if self.bias is None else self.bias.data_ptr()
        self.native = _native.Matrix(buffer.data_ptr(), self.n, self.k, FORMATS[fmt], group, address)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Dense rows [len(ids), k]: what an embedding tied to this matrix needs."""
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty(ids.numel(), self.k, dtype=dtype)
        self.native.rows(ids.data_ptr(), ids.numel(), out.data_ptr(), TYPES[dtype])
        return out

    def bytes(self) -> int:
        """Bytes of the packed buffer and the bias."""
        return self.buffer.nbytes + (0 if self.bias is None else self.bias.nbytes)


def pack_dense(weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
    """weight [n, k] in float32 or bfloat16 -> the same numbers, packed."""
    n, k = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    fmt: Format = "f32" if weight.dtype == torch.float32 else "bf16"
    buffer = _buffer(_native.packed_bytes(FORMATS[fmt], n, k, 0))
    stride = weight.stride(0)
    _native.pack_dense(weight.data_ptr(), TYPES[weight.dtype], n, k, stride, FORMATS[fmt], buffer.data_ptr())
    return PackedMatrix(buffer, (n, k), fmt, 0, bias)


def pack_quantised(q: Tensor, scales: Tensor, fmt: Format, bias: Tensor | None = None, group: int = 0) -> PackedMatrix:
    """q [n, k] int8 (int4: -8..7) with scales [n, ceil(k / group)] float16 -> packed int8 or int4.

    group: a multiple of 32; 0: the smallest that fits the scales (which is ambiguous when k is not its multiple).
    """
    n, k = q.shape
    group = group or group_size(k, scales.shape[1])
    assert scales.shape == (n, math.ceil(k / group))
    buffer = _buffer(_native.packed_bytes(FORMATS[fmt], n, k, group))
    q, scales = q.contiguous(), scales.contiguous()
    _native.pack_quantised(q.data_ptr(), scales.data_ptr(), n, k, group, FORMATS[fmt], buffer.data_ptr())
    return PackedMatrix(buffer, (n, k), fmt, group, bias)


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
    """`size` bytes that begin on a cache line, with some to spare behind them: kernels prefetch past the end."""
    whole = torch.empty(size + 2 * ALIGNMENT, dtype=torch.uint8)
    skip = -whole.data_ptr() % ALIGNMENT
    return whole[skip : skip + size]
