"""One row times a matrix of 8 bit numbers. Owns: the kernel that streams it once, widening in registers.

As gemv.py, with a scale per row of the weight (applied to the sum) or per block of 128 x 128 (applied to the
activations on their way in, which all rows of a program share). Activations are not rounded.
Must not know: who made the scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.core.forward import NormSpec
from tokenmill.kernels.triton.common import act_parts, begin, gated_act, plain_act, wait
from tokenmill.kernels.triton.narrow import BLOCK, NarrowMatrix


@triton.jit
def _piece(rows, start, k, K: tl.constexpr, BK: tl.constexpr):
    """Weights [BN, BK] from column `start` on."""
    if K % BK == 0:
        return tl.load(rows + start, eviction_policy="evict_first")
    return tl.load(rows + start, mask=start + k < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, N, eps,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)[None, :]
    real = n < N
    safe = tl.where(real, n, 0)
    EVEN: tl.constexpr = K % BK == 0
    rows = w_ptr + safe[:, None].to(tl.int64) * K + k
    partners = w_ptr + (safe + N)[:, None].to(tl.int64) * K + k
    w = _piece(rows, 0, k, K, BK)
    if GATED:
        u = _piece(partners, 0, k, K, BK)
    if SPAN == 1:
        scale = tl.load(scale_ptr + safe)
        if GATED:
            scale_u = tl.load(scale_ptr + safe + N)
    else:
        BLOCKS: tl.constexpr = (K + SPAN - 1) // SPAN
        blocks = scale_ptr + (tl.program_id(0) * BN // SPAN) * BLOCKS
        blocks_u = scale_ptr + ((N + tl.program_id(0) * BN) // SPAN) * BLOCKS
    wait(PDL)
    acc = tl.zeros((BN, BK), dtype=tl.float32)
    if GATED:
        acc_u = tl.zeros((BN, BK), dtype=tl.float32)
    if NORM:
        squares = tl.zeros((1, BK), dtype=tl.float32)
    for start in tl.static_range(0, K, BK):
        if start + BK < K:
            w_next = _piece(rows, start + BK, k, K, BK)
            if GATED:
                u_next = _piece(partners, start + BK, k, K, BK)
        if EVEN:
            x = tl.load(x_ptr + start + k).to(tl.float32)
        else:
            x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            if EVEN:
                g = tl.load(norm_ptr + start + k).to(tl.float32)
            else:
                g = tl.load(norm_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            x = x * (g + OFFSET)
        if SPAN == 1:
            acc += x * w.to(tl.float32)
            if GATED:
                acc_u += x * u.to(tl.float32)
        else:
            place = tl.minimum(start + k, K - 1) // SPAN
            acc += (x * tl.load(blocks + place)) * w.to(tl.float32)
            if GATED:
                acc_u += (x * tl.load(blocks_u + place)) * u.to(tl.float32)
        if start + BK < K:
            w = w_next
            if GATED:
                u = u_next
    y = tl.sum(acc, axis=1)
    if GATED:
        y_u = tl.sum(acc_u, axis=1)
    if SPAN == 1:
        y = y * scale
        if GATED:
            y_u = y_u * scale_u
    if NORM:
        root = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)
        y = y * root
        if GATED:
            y_u = y_u * root
    if BIAS:
        y += tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)
        if GATED:
            y_u += tl.load(bias_ptr + N + n, mask=real, other=0.0).to(tl.float32)
    if GATED:
        y = gated_act(y, y_u, ACT)
    else:
        y = plain_act(y, ACT)
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=real)


def narrow_gemv(
    x: Tensor, weight: NarrowMatrix, norm: NormSpec | None, act: str | None, residual: Tensor | None,
    *, pdl: bool, config: tuple[int, int, int],
) -> Tensor:  # fmt: skip
    """x [1, K] -> residual + act(norm(x) @ weight.T + bias); config (BN, BK, warps). BN must divide a block of scales.

    Blocks: with a gated activation both halves must begin at a block's border."""
    inner = x.shape[1]
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_n, block_k, warps = config
    out = torch.empty((1, width), dtype=x.dtype, device=x.device)
    _gemv_kernel[(triton.cdiv(width, block_n),)](
        x, weight.data, weight.scales, weight.bias, None if norm is None else norm.weight, residual, out,
        width, 0.0 if norm is None else norm.eps,
        K=inner, BN=block_n, BK=block_k, SPAN=BLOCK if weight.blocks else 1,
        ACT=kind, GATED=gated, BIAS=weight.bias is not None, NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset, RESIDUAL=residual is not None, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
