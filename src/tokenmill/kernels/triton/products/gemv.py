"""One row times a matrix. Owns: the kernel that streams a weight once, with what comes before and after.

A program owns BN output columns (with a gated activation also their partners) and reads their weights in pieces of BK,
the first piece before it waits for the kernel before it. The norm (rms) needs no pass of its own: the sum of squares is
gathered along the way and divides the result. All tensors are [BN or 1, BK], so that no layout has to be converted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import act_parts, begin, gated_act, plain_act, wait


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, N, eps,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
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
    if EVEN:
        w = tl.load(rows, eviction_policy="evict_first")
    else:
        w = tl.load(rows, mask=k < K, other=0.0, eviction_policy="evict_first")
    if GATED:
        if EVEN:
            u = tl.load(partners, eviction_policy="evict_first")
        else:
            u = tl.load(partners, mask=k < K, other=0.0, eviction_policy="evict_first")
    wait(PDL)
    acc = tl.zeros((BN, BK), dtype=tl.float32)
    if GATED:
        acc_u = tl.zeros((BN, BK), dtype=tl.float32)
    if NORM:
        squares = tl.zeros((1, BK), dtype=tl.float32)
    for start in tl.static_range(0, K, BK):
        if start + BK < K:
            if EVEN:
                w_next = tl.load(rows + (start + BK), eviction_policy="evict_first")
            else:
                w_next = tl.load(rows + (start + BK), mask=start + BK + k < K, other=0.0, eviction_policy="evict_first")
            if GATED:
                if EVEN:
                    u_next = tl.load(partners + (start + BK), eviction_policy="evict_first")
                else:
                    u_next = tl.load(
                        partners + (start + BK), mask=start + BK + k < K, other=0.0, eviction_policy="evict_first"
                    )
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
        acc += x * w.to(tl.float32)
        if GATED:
            acc_u += x * u.to(tl.float32)
        if start + BK < K:
            w = w_next
            if GATED:
                u = u_next
    y = tl.sum(acc, axis=1)
    if GATED:
        y_u = tl.sum(acc_u, axis=1)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)
        y = y * scale
        if GATED:
            y_u = y_u * scale
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


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: NormSpec | None, act: str | None, residual: Tensor | None,
    *, pdl: bool, config: tuple[int, int, int],
) -> Tensor:  # fmt: skip
    """x [1, K], weight [N, K] -> residual + act(norm(x) @ weight.T + bias); config (BN, BK, warps)."""
    inner = x.shape[1]
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_n, block_k, warps = config
    out = torch.empty((1, width), dtype=x.dtype, device=x.device)
    _gemv_kernel[(triton.cdiv(width, block_n),)](
        x, weight, bias, None if norm is None else norm.weight, residual, out,
        width, 0.0 if norm is None else norm.eps,
        K=inner, BN=block_n, BK=block_k,
        ACT=kind, GATED=gated, BIAS=bias is not None, NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset, RESIDUAL=residual is not None, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
