"""Few rows (2 to 64) times a matrix on tensor cores. Owns: the kernel that streams a weight once for all of them.

The weight is the left operand (its rows fill the tensor core's tall side), the activations are the narrow right one.
K is cut into SPLIT parts so that the whole chip reads; the program that finishes a tile last adds the parts in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import (
    INTERPRETED,
    Scratch,
    act_parts,
    begin,
    gated_act,
    plain_act,
    pow2,
    prefetch,
    wait,
)

Config = tuple[int, int, int, int, int, int]
"""BN, BK, split, stages, warps, chunks to prefetch."""


@triton.jit(do_not_specialize=["M"])
def _thin_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, part_ptr, count_ptr,
    M, N, x_stride, eps,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, CHUNKS: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    RESIDUAL: tl.constexpr, WIDE: tl.constexpr, PREFETCH: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    real_n = n < N
    n_safe = tl.where(real_n, n, 0)
    first = part * CHUNKS * BK
    w_rows = w_ptr + n_safe[:, None].to(tl.int64) * K + first + k[None, :]
    u_rows = w_ptr + (n_safe + N)[:, None].to(tl.int64) * K + first + k[None, :]
    if PREFETCH > 0:
        ahead = tl.minimum(first + tl.arange(0, PREFETCH * BK // 64) * 64, K - 1)
        prefetch(w_ptr + n_safe[:, None].to(tl.int64) * K + ahead[None, :])
        if GATED:
            prefetch(w_ptr + (n_safe + N)[:, None].to(tl.int64) * K + ahead[None, :])
    wait(PDL)
    x_rows = x_ptr + m[None, :] * x_stride + first + k[:, None]
    real_m = m < M
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    acc_u = tl.zeros((BN, BM), dtype=tl.float32)
    squares = tl.zeros((BM,), dtype=tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        if K % (BK * SPLIT * CHUNKS) == 0 and K == BK * SPLIT * CHUNKS:
            w = tl.load(w_rows + chunk * BK, eviction_policy="evict_first")
            x = tl.load(x_rows + chunk * BK, mask=real_m[None, :], other=0.0)
            if GATED:
                u = tl.load(u_rows + chunk * BK, eviction_policy="evict_first")
            if NORM:
                g = tl.load(norm_ptr + first + chunk * BK + k).to(tl.float32) + OFFSET
        else:
            inside = first + chunk * BK + k < K
            w = tl.load(w_rows + chunk * BK, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_rows + chunk * BK, mask=inside[:, None] & real_m[None, :], other=0.0)
            if GATED:
                u = tl.load(u_rows + chunk * BK, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            if NORM:
                g = tl.load(norm_ptr + first + chunk * BK + k, mask=inside, other=0.0).to(tl.float32) + OFFSET
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=0)
            x = (wide * g[:, None]).to(x.dtype)
        if WIDE:
            acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
            if GATED:
                acc_u = tl.dot(u.to(tl.float32), x.to(tl.float32), acc_u, input_precision="ieee")
        else:
            acc = tl.dot(w, x, acc)
            if GATED:
                acc_u = tl.dot(u, x, acc_u)
    last = True
    if SPLIT > 1:
        # Parts of one tile lie together: [tile, part, (gate, up, squares), BN, BM].
        SIZE: tl.constexpr = BN * BM * (2 if GATED else 1) + BM
        at = tl.arange(0, BN)[:, None] * BM + m[None, :]
        mine = part_ptr + (tile * SPLIT + part).to(tl.int64) * SIZE
        tl.store(mine + at, acc, cache_modifier=".cg")
        if GATED:
            tl.store(mine + BN * BM + at, acc_u, cache_modifier=".cg")
        if NORM:
            tl.store(mine + (SIZE - BM) + m, squares, cache_modifier=".cg")
        tl.debug_barrier()
        last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(count_ptr + tile, 0)
            acc = tl.zeros((BN, BM), dtype=tl.float32)
            acc_u = tl.zeros((BN, BM), dtype=tl.float32)
            squares = tl.zeros((BM,), dtype=tl.float32)
            for other in tl.static_range(SPLIT):
                theirs = part_ptr + (tile * SPLIT + other).to(tl.int64) * SIZE
                acc += tl.load(theirs + at, cache_modifier=".cg")
                if GATED:
                    acc_u += tl.load(theirs + BN * BM + at, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(theirs + (SIZE - BM) + m, cache_modifier=".cg")
    if last:
        if NORM:
            scale = 1.0 / tl.sqrt(squares / K + eps)
            acc = acc * scale[None, :]
            acc_u = acc_u * scale[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                acc_u += tl.load(bias_ptr + N + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            y = gated_act(acc, acc_u, ACT)
        else:
            y = plain_act(acc, ACT)
        place = m[None, :] * N + n[:, None]
        keep = real_n[:, None] & real_m[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + place, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=keep)


def thin(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: NormSpec | None, act: str | None, residual: Tensor | None,
    *, scratch: Scratch, pdl: bool, config: Config,
) -> Tensor:  # fmt: skip
    """x [M <= 64, K], weight [N, K] -> residual + act(norm(x) @ weight.T + bias)."""
    rows, inner = x.shape
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_m = max(16, pow2(rows))
    block_n, block_k, split, stages, warps, prefetch = config
    chunks = triton.cdiv(triton.cdiv(inner, block_k), split)
    tiles = triton.cdiv(width, block_n)
    size = block_n * block_m * (2 if gated else 1) + block_m
    if tiles * split * size > scratch.floats or tiles > scratch.num_counters:
        split, chunks = 1, triton.cdiv(inner, block_k)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    partial, counters = scratch.partial(x.device), scratch.counters(x.device)
    _thin_kernel[(tiles, split)](
        x, weight, bias, None if norm is None else norm.weight, residual, out, partial, counters,
        rows, width, x.stride(0), 0.0 if norm is None else norm.eps,
        K=inner, BM=block_m, BN=block_n, BK=block_k, SPLIT=split, CHUNKS=chunks,
        ACT=kind, GATED=gated, BIAS=bias is not None, NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset, RESIDUAL=residual is not None,
        WIDE=INTERPRETED or x.dtype == torch.float32, PREFETCH=0 if INTERPRETED or not pdl else prefetch,
        STAGES=stages, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
