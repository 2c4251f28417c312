"""Activations in 8 bits. Owns: rounding rows to float8 or int8 with a scale per row, with the norm before it, in one
pass; and widening packed weights for cuBLAS. Must not know: which weights they meet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import begin, pow2, size_bits, wait
from tokenmill.kernels.triton.quantised.codes import entry
from tokenmill.kernels.triton.quantised.narrow import BLOCK, LARGEST8, NarrowMatrix

LARGEST = {torch.float8_e4m3fn: LARGEST8, torch.int8: 127.0}


@triton.jit
def _round_kernel(
    x_ptr, norm_ptr, out_ptr, scale_ptr, D, x_stride, eps, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    real = d < D
    if NORM:
        g = tl.load(norm_ptr + d, mask=real, other=0.0).to(tl.float32) + OFFSET
    wait(PDL)
    x = tl.load(x_ptr + row * x_stride + d, mask=real, other=0.0).to(tl.float32)
    if NORM:
        x = x / tl.sqrt(tl.sum(x * x) / D + eps) * g
    step = tl.max(size_bits(x)).to(tl.float32, bitcast=True) / LARGEST
    y = x * (1.0 / tl.where(step > 0.0, step, 1.0))
    if out_ptr.dtype.element_ty == tl.int8:
        y = (y + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
    tl.store(scale_ptr + row, step)
    tl.store(out_ptr + row * D + d, y.to(out_ptr.dtype.element_ty), mask=real)


def round_rows(x: Tensor, dtype: torch.dtype, norm: NormSpec | None = None, *, pdl: bool) -> tuple[Tensor, Tensor]:
    """norm(x) of x [M, D] -> (rounded [M, D], scales [M] float32); norm: rms without bias."""
    if x.stride(1) != 1:
        x = x.contiguous()
    width = x.shape[1]
    out = torch.empty((x.shape[0], width), dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    block = pow2(width)
    _round_kernel[(x.shape[0],)](
        x, None if norm is None else norm.weight, out, scales, width, x.stride(0), 0.0 if norm is None else norm.eps,
        LARGEST=LARGEST[dtype], BLOCK=block, NORM=norm is not None, OFFSET=0.0 if norm is None else norm.offset,
        PDL=pdl, num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out, scales


@triton.jit
def _widen_kernel(
    w_ptr, scale_ptr, zero_ptr, step_ptr, out_ptr, N, K, STORED, STEP: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """128 columns of 32 rows a program."""
    begin(PDL)
    wait(PDL)
    n = (tl.program_id(0) * 32 + tl.arange(0, 32)).to(tl.int64)[:, None]
    c = tl.arange(0, 128)[None, :]
    k = tl.program_id(1) * 128 + c
    real = (n < N) & (k < K)
    if BITS == 4:
        word = tl.load(w_ptr + n * STORED + tl.program_id(1) * 32 + c % 32, mask=n < N, other=0)
        q = entry((word >> (c // 32 * 4).to(tl.int16)) & 15, TABLE).to(tl.float32)
    else:
        q = tl.load(w_ptr + n * STORED + k, mask=real, other=0.0).to(tl.float32)
    if SPAN > 1:
        scale = tl.load(scale_ptr + n // SPAN * ((K + GROUP - 1) // GROUP) + k // GROUP, mask=real, other=0.0)
    elif GROUP == 0:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
    else:
        if ZERO:
            q -= tl.load(zero_ptr + k // GROUP * N + n, mask=real, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + k // GROUP * N + n, mask=real, other=0.0).to(tl.float32)
    q *= scale
    if STEP:
        q /= tl.load(step_ptr + n, mask=n < N, other=1.0)
    tl.store(out_ptr + n * K + k, q.to(out_ptr.dtype.element_ty), mask=real)


def widened(weight: NarrowMatrix, dtype: torch.dtype, *, pdl: bool) -> Tensor:
    """The matrix [N, K] in dtype."""
    return _widened(weight, dtype, None, pdl=pdl)


def as_float8(weight: NarrowMatrix, *, pdl: bool) -> NarrowMatrix:
    """The same matrix of 4 bits in float8 with a scale per row (its `row_steps`)."""
    assert weight.row_steps is not None, "activations of this matrix are not rounded"
    wide = _widened(weight, torch.float8_e4m3fn, weight.row_steps, pdl=pdl)
    return NarrowMatrix(wide, weight.row_steps, None, weight.bias, weight.shape, 8, 0)


def _widened(weight: NarrowMatrix, dtype: torch.dtype, steps: Tensor | None, *, pdl: bool) -> Tensor:
    rows, columns = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.data.device)
    _widen_kernel[(triton.cdiv(rows, 32), triton.cdiv(columns, BLOCK))](
        weight.data, weight.scales, weight.zeros if weight.zeros is not None else weight.scales, steps, out, rows,
        columns, weight.data.shape[1], STEP=steps is not None, BITS=weight.bits, GROUP=weight.group,
        SPAN=BLOCK if weight.blocks else 1, ZERO=weight.zeros is not None, TABLE=weight.table, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
