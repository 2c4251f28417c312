"""Up to a few hundred rows times a matrix of 8 or 4 bit numbers. Owns: the kernel that streams the packed weight into
tensor cores.

As thin.py: the weight is the tall operand, K is cut into SPLIT parts, and the program that finishes a tile last adds
them in order. Weights are widened in registers on their way, or, where the activations were rounded to the weight's
own type before, multiplied as they are. Scales multiply the sums: once at the end, or after every group.
Must not know: who rounded the activations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from tokenmill.kernels.triton.quantised.codes import looks_up, plane, planes
from tokenmill.kernels.triton.quantised.narrow import BLOCK, NarrowMatrix

Rounded = tuple[Tensor, Tensor]
"""Activations [M, K] in the weight's type, and their scales [M] float32."""


@triton.jit
def multiply(w, x, acc, WIDE: tl.constexpr):
    if WIDE:
        acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    elif w.dtype == x.dtype:
        acc = tl.dot(w, x, acc, out_dtype=acc.dtype)
    else:
        acc = tl.dot(w.to(x.dtype), x, acc)
    return acc


@triton.jit
def packed(
    rows, x_rows, x_ok, scales, zeros, chunk, first, N, acc,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """acc + one block of 128 columns of 4 bit weights times activations. Loads lie here so that they are pipelined.

    Groups of 16 are half a plane: rows and x_rows point to 16 words and columns then, else to 32."""
    GROUPS: tl.constexpr = 1 if GROUP >= 128 else 128 // GROUP if GROUP >= 32 else 4
    PLANES: tl.constexpr = 4 // GROUPS
    WORDS: tl.constexpr = 16 if GROUP == 16 else 32
    LIKE: tl.constexpr = x_rows.dtype.element_ty
    AT_ONCE: tl.constexpr = looks_up(TABLE, LIKE, WIDE)
    for half in tl.static_range(32 // WORDS):
        w = tl.load(rows + (chunk * 32 + half * WORDS), eviction_policy="evict_first")
        if AT_ONCE:
            every = planes(w, LIKE, TABLE)
        for g in tl.static_range(GROUPS):
            at = ((first + chunk * 128) // GROUP + g * (32 // WORDS) + half) * N
            scale = tl.load(scales + at).to(tl.float32)
            zero = tl.zeros((BN,), dtype=tl.float32)
            if ZERO:
                zero += tl.load(zeros + at).to(tl.float32)
            part = tl.zeros((BN, BM), dtype=tl.float32)
            for p in tl.static_range(PLANES):
                column = chunk * 128 + (g * PLANES + p) * 32 + half * WORDS
                if EVEN:
                    x = tl.load(x_rows + column, mask=x_ok, other=0.0)
                else:
                    inside = (first + column + tl.arange(0, WORDS) < K)[:, None]
                    x = tl.load(x_rows + column, mask=x_ok & inside, other=0.0)
                if AT_ONCE:
                    q = every[g * PLANES + p]
                else:
                    q = plane(w, zero, LIKE, (g * PLANES + p) * 4, TABLE, WIDE)
                part = multiply(q, x, part, WIDE)
            acc += part * scale[:, None]
    return acc


@triton.jit(do_not_specialize=["M"])
def _thin_kernel(
    x_ptr, round_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, out_ptr, part_ptr, count_ptr,
    M, N, ROWS, x_stride,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, CHUNKS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    ROUNDED: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    WIDE: tl.constexpr, PREFETCH: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUPS: a power of two, at least so many groups of scales lie in one part of K."""
    begin(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    real_n = n < N
    n_safe = tl.where(real_n, n, 0)
    first = part * CHUNKS * BK
    # Bytes of a row: BK elements are BK (8 bits) or BK / 4 int16 (4 bits) stored ones.
    WIDTH: tl.constexpr = BK if BITS == 8 else 32
    COLUMNS: tl.constexpr = 16 if BITS == 4 and GROUP == 16 else WIDTH
    STRIDE: tl.constexpr = K if BITS == 8 else (K + 127) // 128 * 32
    STEP: tl.constexpr = 1 if BITS == 8 else 4
    k = tl.arange(0, COLUMNS)
    w_rows = w_ptr + n_safe[:, None].to(tl.int64) * STRIDE + first // STEP + k[None, :]
    u_rows = w_ptr + (n_safe + N)[:, None].to(tl.int64) * STRIDE + first // STEP + k[None, :]
    if PREFETCH > 0:
        LINE: tl.constexpr = 128 if BITS == 8 else 64
        LINES: tl.constexpr = PREFETCH * WIDTH // LINE if PREFETCH * WIDTH > LINE else 1
        ahead = tl.minimum(first // STEP + tl.arange(0, LINES) * LINE, STRIDE - 1)
        prefetch(w_ptr + n_safe[:, None].to(tl.int64) * STRIDE + ahead[None, :])
        if GATED:
            prefetch(w_ptr + (n_safe + N)[:, None].to(tl.int64) * STRIDE + ahead[None, :])
        if GROUP > 0 and SPAN == 1:
            # Scales are read in the loop without a pipeline: let them come from the L2 at least.
            groups = tl.minimum(first // GROUP + tl.arange(0, GROUPS), (K - 1) // GROUP) * ROWS
            line = tl.minimum(tile * BN + tl.arange(0, BN // 32) * 32, N - 1)
            prefetch(scale_ptr + groups[:, None] + line[None, :])
            if GATED:
                prefetch(scale_ptr + groups[:, None] + line[None, :] + N)
            if ZERO:
                prefetch(zero_ptr + groups[:, None] + line[None, :])
                if GATED:
                    prefetch(zero_ptr + groups[:, None] + line[None, :] + N)
    wait(PDL)
    x_rows = x_ptr + m[None, :].to(tl.int64) * x_stride + first + k[:, None]
    real_m = m < M
    INTEGER: tl.constexpr = ROUNDED and w_ptr.dtype.element_ty == tl.int8 and not WIDE
    acc = tl.zeros((BN, BM), dtype=tl.int32 if INTEGER else tl.float32)
    acc_u = tl.zeros((BN, BM), dtype=tl.int32 if INTEGER else tl.float32)
    EVEN: tl.constexpr = K == BK * SPLIT * CHUNKS
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        if BITS == 4:
            if EVEN or first + chunk * BK < K:
                acc = packed(
                    w_rows, x_rows, real_m[None, :], scale_ptr + n_safe, zero_ptr + n_safe, chunk, first, ROWS, acc,
                    K, BM, BN, GROUP, ZERO, TABLE, EVEN, WIDE,
                )  # fmt: skip
                if GATED:
                    acc_u = packed(
                        u_rows, x_rows, real_m[None, :], scale_ptr + n_safe + N, zero_ptr + n_safe + N, chunk, first,
                        ROWS, acc_u, K, BM, BN, GROUP, ZERO, TABLE, EVEN, WIDE,
                    )  # fmt: skip
        else:
            if EVEN:
                w = tl.load(w_rows + chunk * BK, eviction_policy="evict_first")
                x = tl.load(x_rows + chunk * BK, mask=real_m[None, :], other=0.0)
                if GATED:
                    u = tl.load(u_rows + chunk * BK, eviction_policy="evict_first")
            else:
                inside = first + chunk * BK + k < K
                w = tl.load(w_rows + chunk * BK, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
                x = tl.load(x_rows + chunk * BK, mask=inside[:, None] & real_m[None, :], other=0.0)
                if GATED:
                    u = tl.load(u_rows + chunk * BK, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            if GROUP == 0:
                acc = multiply(w, x, acc, WIDE)
                if GATED:
                    acc_u = multiply(u, x, acc_u, WIDE)
            else:
                group = tl.minimum(first + chunk * BK, K - 1) // GROUP
                none = tl.zeros((BN, BM), dtype=tl.float32)
                if SPAN == 1:
                    scale = tl.load(scale_ptr + group * ROWS + n_safe).to(tl.float32)[:, None]
                else:
                    scale = tl.load(scale_ptr + tile * BN // SPAN * ((K + GROUP - 1) // GROUP) + group)
                acc += multiply(w, x, none, WIDE) * scale
                if GATED:
                    if SPAN == 1:
                        scale = tl.load(scale_ptr + group * ROWS + n_safe + N).to(tl.float32)[:, None]
                    else:
                        scale = tl.load(scale_ptr + (N + tile * BN) // SPAN * ((K + GROUP - 1) // GROUP) + group)
                    acc_u += multiply(u, x, none, WIDE) * scale
    acc = acc.to(tl.float32)
    acc_u = acc_u.to(tl.float32)
    last = True
    if SPLIT > 1:
        # Parts of one tile lie together: [row tile, tile, part, (gate, up), BN, BM].
        SIZE: tl.constexpr = BN * BM * (2 if GATED else 1)
        at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        whole = tl.program_id(2) * tl.num_programs(0) + tile
        tl.store(part_ptr + (whole * SPLIT + part).to(tl.int64) * SIZE + at, acc, cache_modifier=".cg")
        if GATED:
            mine = part_ptr + (whole * SPLIT + part).to(tl.int64) * SIZE + BN * BM
            tl.store(mine + at, acc_u, cache_modifier=".cg")
        tl.debug_barrier()
        last = tl.atomic_add(count_ptr + whole, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(count_ptr + whole, 0)
            acc = tl.zeros((BN, BM), dtype=tl.float32)
            acc_u = tl.zeros((BN, BM), dtype=tl.float32)
            for other in tl.static_range(SPLIT):
                theirs = part_ptr + (whole * SPLIT + other).to(tl.int64) * SIZE
                acc += tl.load(theirs + at, cache_modifier=".cg")
                if GATED:
                    acc_u += tl.load(theirs + BN * BM + at, cache_modifier=".cg")
    if last:
        if ROUNDED:
            step = tl.load(round_ptr + m, mask=real_m, other=0.0)[None, :]
            acc = acc * step
            acc_u = acc_u * step
        if GROUP == 0:
            acc = acc * tl.load(scale_ptr + n_safe)[:, None]
            if GATED:
                acc_u = acc_u * tl.load(scale_ptr + n_safe + N)[:, None]
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                acc_u += tl.load(bias_ptr + N + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            y = gated_act(acc, acc_u, ACT)
        else:
            y = plain_act(acc, ACT)
        place = m[None, :].to(tl.int64) * N + n[:, None]
        keep = real_n[:, None] & real_m[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + place, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=keep)


def narrow_thin(
    x: Tensor | Rounded, weight: NarrowMatrix, act: str | None, residual: Tensor | None, dtype: torch.dtype,
    *, scratch: Scratch, pdl: bool, config: tuple[int, int, int, int, int, int],
) -> Tensor:  # fmt: skip
    """x [M, K] -> residual + act(x @ weight.T + bias) [M, out] in dtype.

    config (BN, BK, split, stages, warps, chunks to prefetch). BK is 128 for 4 bits, and divides a group otherwise."""
    rounding = None
    if isinstance(x, tuple):
        x, rounding = x
    rows, inner = x.shape
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_m = min(128, max(16, pow2(rows)))
    block_n, block_k, split, stages, warps, ahead = config
    if weight.bits == 4:
        block_k = BLOCK
    elif weight.group:
        block_k = min(block_k, weight.group)
    chunks = triton.cdiv(triton.cdiv(inner, block_k), split)
    tiles, high = triton.cdiv(width, block_n), triton.cdiv(rows, block_m)
    size = block_n * block_m * (2 if gated else 1)
    if tiles * high * split * size > scratch.floats or tiles * high > scratch.num_counters:
        split, chunks = 1, triton.cdiv(inner, block_k)
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    _thin_kernel[(tiles, split, high)](
        x, rounding, weight.data, weight.scales, weight.zeros if weight.zeros is not None else weight.scales,
        weight.bias, residual, out, scratch.partial(x.device), scratch.counters(x.device),
        rows, width, weight.shape[0], x.stride(0),
        K=inner, BM=block_m, BN=block_n, BK=block_k, SPLIT=split, CHUNKS=chunks,
        BITS=weight.bits, GROUP=weight.group, SPAN=BLOCK if weight.blocks else 1, ZERO=weight.zeros is not None,
        TABLE=weight.table, ROUNDED=rounding is not None, ACT=kind, GATED=gated, BIAS=weight.bias is not None,
        RESIDUAL=residual is not None, WIDE=INTERPRETED or x.dtype == torch.float32,
        PREFETCH=0 if INTERPRETED or not pdl else ahead,
        GROUPS=pow2(triton.cdiv(chunks * block_k, weight.group)) if weight.group else 1,
        STAGES=stages, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
