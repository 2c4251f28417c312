"""Activations of few rows as sparse_cores.py takes them. Owns: the order in which they lie, and what is done on the
way: a norm, and dividing rows for float16.

[K / 64 (weights of 8 bits: K / 128), tiles of 8 rows, 32 threads, 8 words (16)]: a thread's words of a block are
neighbours. Rows that a last tile has not are zeros. Must not know: weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import begin, pow2, size_bits, wait

LARGEST = 16384.0
"""What the largest number of a row becomes in float16, before a float8 weight."""


def tiles_of(rows: int) -> int:
    """Tiles of 8 rows, a power of two of them."""
    return pow2(triton.cdiv(max(1, rows), 8))


@triton.jit
def place_of(row, k, TILES: tl.constexpr, SMALL: tl.constexpr):
    """Where column k of a row lies, counted in numbers."""
    FOURS: tl.constexpr = 8 if SMALL else 4  # of a thread
    four = k % (16 * FOURS) // 4
    part = four % FOURS
    inner = four // FOURS + 4 * (part % 2)  # the four, as its multiplication counts them
    register = 4 * (part // 2) + inner // 2
    thread = row % 8 * 4 + 2 * (inner % 2) + k % 4 // 2
    return ((k // (16 * FOURS) * TILES + row // 8) * 32 + thread) * (4 * FOURS) + 2 * register + k % 2


@triton.jit(do_not_specialize=["M"])
def _lay_kernel(
    x_ptr, norm_ptr, out_ptr, step_ptr, M, K, x_stride, eps, TILES: tl.constexpr, SMALL: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, k = tl.program_id(0), tl.arange(0, BLOCK)
    real = k < K
    if NORM:
        gain = tl.load(norm_ptr + k, mask=real, other=0.0).to(tl.float32) + OFFSET
    wait(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + k, mask=real & (row < M), other=0.0).to(tl.float32)
    if NORM:
        x = x / tl.sqrt(tl.sum(x * x) / K + eps) * gain
    if SMALL:
        step = tl.max(size_bits(x)).to(tl.float32, bitcast=True) / LARGEST
        tl.store(step_ptr + row, step, mask=row < M)
        x = x * (1.0 / tl.where(step > 0.0, step, 1.0))
    tl.store(out_ptr + place_of(row, k, TILES, SMALL), x.to(out_ptr.dtype.element_ty), mask=real)


def lay_out(x: Tensor, dtype: torch.dtype, norm: NormSpec | None, *, pdl: bool) -> tuple[Tensor, Tensor | None]:
    """norm(x) of x [M <= 64, K] in this order for weights of dtype, and what rows were divided by [M] before those of 8
    bits; norm: rms without bias."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, width), small = x.shape, dtype.itemsize == 1
    tiles, block = tiles_of(rows), pow2(width)
    out = torch.empty(8 * tiles * width, dtype=torch.float16 if small else dtype, device=x.device)
    steps = torch.empty(rows, dtype=torch.float32, device=x.device) if small else None
    _lay_kernel[(8 * tiles,)](
        x, None if norm is None else norm.weight, out, steps, rows, width, x.stride(0),
        0.0 if norm is None else norm.eps, TILES=tiles, SMALL=small, LARGEST=LARGEST, BLOCK=block,
        NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset, PDL=pdl, num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out, steps
