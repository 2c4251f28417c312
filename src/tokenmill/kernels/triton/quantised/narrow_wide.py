"""Many rows in 8 bits times a matrix in 8 bits. Owns: the tensor-core product with scales, bias, activation and
residual applied before anything is written.

Rows and weights are of one type (float8 with float32 sums, or int8 with int32 sums); a gated activation takes both its
halves in one program. Blocks of 128 x 128 scales multiply the sums of every 128 columns.
Must not know: who rounded the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.common import INTERPRETED, act_parts, begin, gated_act, plain_act, wait
from tokenmill.kernels.triton.quantised.narrow import BLOCK, NarrowMatrix


@triton.jit
def _dot(x, w, acc, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(x, w, acc, out_dtype=acc.dtype)


@triton.jit(do_not_specialize=["M"])
def _wide_kernel(
    x_ptr, step_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, M, N,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr, BAND: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    # Programs that run at once share rows and columns: bands of BAND row tiles, all columns of a band in turn.
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    band = tl.program_id(0) // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * tiles_n)
    m = (band * BAND + within % height) * BM + tl.arange(0, BM)
    tile = within // height
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    m_safe = tl.where(m < M, m, 0)
    n_safe = tl.where(n < N, n, 0)
    wait(PDL)
    x_at = x_ptr + m_safe[:, None].to(tl.int64) * K + k[None, :]
    w_at = w_ptr + n_safe[None, :].to(tl.int64) * K + k[:, None]
    u_at = w_ptr + (n_safe + N)[None, :].to(tl.int64) * K + k[:, None]
    INTEGER: tl.constexpr = w_ptr.dtype.element_ty == tl.int8 and not WIDE
    acc = tl.zeros((BM, BN), dtype=tl.int32 if INTEGER else tl.float32)
    if GATED:
        acc_u = tl.zeros((BM, BN), dtype=tl.int32 if INTEGER else tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            x = tl.load(x_at + start)
            w = tl.load(w_at + start)
            if GATED:
                u = tl.load(u_at + start)
        else:
            inside = start + k < K
            x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=inside[:, None], other=0.0)
            if GATED:
                u = tl.load(u_at + start, mask=inside[:, None], other=0.0)
        if SPAN == 1:
            acc = _dot(x, w, acc, WIDE)
            if GATED:
                acc_u = _dot(x, u, acc_u, WIDE)
        else:
            none = tl.zeros((BM, BN), dtype=tl.float32)
            BLOCKS: tl.constexpr = (K + SPAN - 1) // SPAN
            acc += _dot(x, w, none, WIDE) * tl.load(scale_ptr + tile * BN // SPAN * BLOCKS + start // SPAN)
            if GATED:
                acc_u += _dot(x, u, none, WIDE) * tl.load(scale_ptr + (N + tile * BN) // SPAN * BLOCKS + start // SPAN)
    step = tl.load(step_ptr + m_safe)[:, None]
    real_n = n < N
    y = acc.to(tl.float32) * step
    if SPAN == 1:
        y = y * tl.load(scale_ptr + n_safe)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=real_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = acc_u.to(tl.float32) * step
        if SPAN == 1:
            up = up * tl.load(scale_ptr + n_safe + N)[None, :]
        if BIAS:
            up += tl.load(bias_ptr + N + n, mask=real_n, other=0.0).to(tl.float32)[None, :]
        y = gated_act(y, up, ACT)
    else:
        y = plain_act(y, ACT)
    place = m[:, None].to(tl.int64) * N + n[None, :]
    keep = (m < M)[:, None] & real_n[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=keep)


def narrow_wide(
    x: Tensor, steps: Tensor, weight: NarrowMatrix, act: str | None, residual: Tensor | None, dtype: torch.dtype,
    *, pdl: bool, config: tuple[int, int, int, int, int],
) -> Tensor:  # fmt: skip
    """x [M, K] in the weight's type with steps [M] -> residual + act(x @ weight.T + bias) [M, out] in dtype.

    config (BM, BN, BK, stages, warps)."""
    rows, inner = x.shape
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_m, block_n, block_k, stages, warps = config
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    _wide_kernel[(triton.cdiv(rows, block_m) * triton.cdiv(width, block_n),)](
        x, steps, weight.data, weight.scales, weight.bias, residual, out, rows, width,
        K=inner, BM=block_m, BN=block_n, BK=block_k, SPAN=BLOCK if weight.blocks else 1, BAND=8,
        ACT=kind, GATED=gated, BIAS=weight.bias is not None, RESIDUAL=residual is not None,
        WIDE=INTERPRETED, STAGES=stages, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
