"""One to a few rows times a matrix. Owns: the kernel that streams a weight once, with what comes before and after.

A program owns BN output columns (with a gated activation also their partners) and reads their weights in pieces of BK,
the first piece before it waits for the kernel before it. The norm (rms) needs no pass of its own: the sum of squares is
gathered along the way and divides the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.core.forward import NormSpec
from tokenmill.kernels.triton.common import act_parts, begin, gated_act, plain_act, pow2, wait


@triton.jit(do_not_specialize=["M"])
def _gemv_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr,
    M, N, x_stride, eps,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    real_n = n < N
    rows = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    partners = w_ptr + (n + N)[:, None].to(tl.int64) * K + k[None, :]
    EVEN: tl.constexpr = K % BK == 0
    mask = real_n[:, None] & (k[None, :] < K)
    w = tl.load(rows, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        u = tl.load(partners, mask=mask, other=0.0, eviction_policy="evict_first")
    wait(PDL)
    acc = tl.zeros((BM, BN, BK), dtype=tl.float32)
    if GATED:
        acc_u = tl.zeros((BM, BN, BK), dtype=tl.float32)
    if NORM:
        squares = tl.zeros((BM, BK), dtype=tl.float32)
    for start in tl.static_range(0, K, BK):
        if start + BK < K:
            if EVEN:
                more = real_n[:, None] & (k[None, :] >= 0)
            else:
                more = real_n[:, None] & (start + BK + k[None, :] < K)
            w_next = tl.load(rows + (start + BK), mask=more, other=0.0, eviction_policy="evict_first")
            if GATED:
                u_next = tl.load(partners + (start + BK), mask=more, other=0.0, eviction_policy="evict_first")
        here = (m[:, None] < M) & (start + k[None, :] < K)
        x = tl.load(x_ptr + m[:, None] * x_stride + start + k[None, :], mask=here, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            g = tl.load(norm_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32) + OFFSET
            x = x * g[None, :]
        acc += x[:, None, :] * w.to(tl.float32)[None, :, :]
        if GATED:
            acc_u += x[:, None, :] * u.to(tl.float32)[None, :, :]
        if start + BK < K:
            w = w_next
            if GATED:
                u = u_next
    y = tl.sum(acc, axis=2)
    if GATED:
        y_u = tl.sum(acc_u, axis=2)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / K + eps)
        y = y * scale[:, None]
        if GATED:
            y_u = y_u * scale[:, None]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=real_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            y_u += tl.load(bias_ptr + N + n, mask=real_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        y = gated_act(y, y_u, ACT)
    else:
        y = plain_act(y, ACT)
    at = m[:, None] * N + n[None, :]
    keep = (m[:, None] < M) & real_n[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=keep)


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: NormSpec | None, act: str | None, residual: Tensor | None,
    *, pdl: bool, config: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """x [M <= 8, K], weight [N, K] -> residual + act(norm(x) @ weight.T + bias); config (BN, BK, warps)."""
    rows, inner = x.shape
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_n, block_k, warps = config or gemv_config(rows, width, inner, gated)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _gemv_kernel[(triton.cdiv(width, block_n),)](
        x, weight, bias, None if norm is None else norm.weight, residual, out,
        rows, width, x.stride(0), 0.0 if norm is None else norm.eps,
        K=inner, BM=pow2(rows), BN=block_n, BK=block_k,
        ACT=kind, GATED=gated, BIAS=bias is not None, NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset, RESIDUAL=residual is not None, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def gemv_config(rows: int, width: int, inner: int, gated: bool) -> tuple[int, int, int]:
    """(BN, BK, warps): measured on an H200, see docs/performance.md."""
    block_k = min(pow2(inner), 4096)
    warps = max(1, min(4, block_k // 512))
    if rows > 1:
        block_k = min(block_k, 4096 // pow2(rows) * 2)
    return 1, block_k, warps
