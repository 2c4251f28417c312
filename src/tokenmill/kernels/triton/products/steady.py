"""Products whose rows do not depend on the other rows. Owns: one order of additions for every number of rows.

A row's sums run over K from the first column to the last, sixteen at a time, on the same tensor core instruction for
every tile; K is never cut. Tiles grow with the number of rows, which moves work and changes no result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.common import INTERPRETED, act_parts, begin, gated_act, plain_act, pow2, wait

GROUP = 8
"""Tiles of rows that follow each other before the next tile of columns: what they share stays in the L2 cache."""


@triton.jit(do_not_specialize=["M"])
def _steady_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, M, N, x_stride, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row_tiles = tl.cdiv(M, BM)
    band = GROUP * tl.cdiv(N, BN)
    program = tl.program_id(0)
    height = tl.minimum(row_tiles - program // band * GROUP, GROUP)
    n = program % band // height * BN + tl.arange(0, BN)
    m = (program // band * GROUP + program % band % height) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    real_n = n < N
    n_safe = tl.where(real_n, n, 0).to(tl.int64)
    m_safe = tl.where(m < M, m, 0).to(tl.int64)
    w_rows = w_ptr + n_safe[:, None] * K + k[None, :]
    u_rows = w_ptr + (n_safe + N)[:, None] * K + k[None, :]
    x_rows = x_ptr + m_safe[None, :] * x_stride + k[:, None]
    wait(PDL)
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    acc_u = tl.zeros((BN, BM), dtype=tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            w = tl.load(w_rows + at)
            x = tl.load(x_rows + at)
            if GATED:
                u = tl.load(u_rows + at)
        else:
            inside = at + k < K
            w = tl.load(w_rows + at, mask=inside[None, :], other=0.0)
            x = tl.load(x_rows + at, mask=inside[:, None], other=0.0)
            if GATED:
                u = tl.load(u_rows + at, mask=inside[None, :], other=0.0)
        if WIDE:
            acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
            if GATED:
                acc_u = tl.dot(u.to(tl.float32), x.to(tl.float32), acc_u, input_precision="ieee")
        else:
            acc = tl.dot(w, x, acc)
            if GATED:
                acc_u = tl.dot(u, x, acc_u)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_u += tl.load(bias_ptr + N + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        y = gated_act(acc, acc_u, ACT)
    else:
        y = plain_act(acc, ACT)
    place = m.to(tl.int64)[None, :] * N + n[:, None]
    keep = real_n[:, None] & (m < M)[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=keep)


def steady(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None, residual: Tensor | None, *, pdl: bool
) -> Tensor:
    """x [M, K], weight [N, K], any M -> residual + act(x @ weight.T + bias)."""
    rows, inner = x.shape
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    block_m = max(16, min(128, pow2(rows)))
    wide = INTERPRETED or x.dtype == torch.float32
    large = block_m == 128 and not gated and not wide
    block_n, warps, stages = (128, 8, 4) if large else (64, 8 if block_m == 128 else 4, 2 if wide else 4)
    _steady_kernel[(triton.cdiv(rows, block_m) * triton.cdiv(width, block_n),)](
        x, weight, bias, residual, out, rows, width, x.stride(0), K=inner,
        BM=block_m, BN=block_n, BK=32 if wide else 64, GROUP=GROUP, ACT=kind, GATED=gated, BIAS=bias is not None,
        RESIDUAL=residual is not None, WIDE=wide, STAGES=1 if INTERPRETED else stages, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
