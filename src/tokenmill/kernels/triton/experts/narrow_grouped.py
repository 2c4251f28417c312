"""Tokens through experts of 4 bit numbers. Owns: the kernel that widens an expert's matrix while it reads it.

Work is divided as in grouped.py, and numbers are widened as in narrow_thin.py. Activations are not rounded. Scales
multiply each part of the sums. Must not know: gates, layers, who made the scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.common import INTERPRETED, act_parts, begin, gated_act, plain_act, wait
from tokenmill.kernels.triton.experts.grouped import Tiling, pair_of, pairs_per_tile, span
from tokenmill.kernels.triton.experts.sorting import Sorted, room_for
from tokenmill.kernels.triton.quantised.narrow_thin import packed


@dataclass(frozen=True, slots=True)
class NarrowStack:
    """One matrix of 4 bit numbers per expert (narrow.py): data, scales, zeros and biases have one dimension more.

    shape: rows and columns of one matrix before filling up; group: columns per scale; table: what codes mean
    (codes.py)."""

    data: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    shape: tuple[int, int]
    group: int
    table: int = 0


@triton.jit
def _product(
    w_rows, x_rows, x_ok, scales, zeros, acc, ROWS, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM] + these rows of a matrix times these columns of activations."""
    for chunk in tl.range(0, tl.cdiv(K, 128), num_stages=STAGES):
        acc = packed(w_rows, x_rows, x_ok, scales, zeros, chunk, 0, ROWS, acc,
                      K, BM, BN, GROUP, ZERO, TABLE, K % 128 == 0, WIDE)  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["pairs"])
def _narrow_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, id_ptr, order_ptr, tile_ptr, pairs,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    PER_ROW: tl.constexpr, FROM_PAIR: tl.constexpr, TO_PAIR: tl.constexpr, SCAN: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    real_n = n < N
    safe = tl.where(real_n, n, 0)
    ROWS: tl.constexpr = 2 * N if GATED else N
    STRIDE: tl.constexpr = (K + 127) // 128 * 32
    k = tl.arange(0, 16 if GROUP == 16 else 32)
    wait(PDL)
    expert, first, last, mine, place = span(id_ptr, tile_ptr, pairs, BP, SCAN)
    row = expert.to(tl.int64) * ROWS + safe
    w_rows = w_ptr + row[:, None] * STRIDE + k[None, :]
    GROUPS: tl.constexpr = (K + 127) // 128 * 128 // GROUP
    scales = scale_ptr + expert.to(tl.int64) * ROWS * GROUPS + safe
    zeros = zero_ptr
    if ZERO:
        zeros = zero_ptr + expert.to(tl.int64) * ROWS * GROUPS + safe
    for start in range(first, last, BM):
        real_m = start + m < last
        pair, slot = pair_of(tl.minimum(start + m, last - 1), mine, place, order_ptr, BP, SCAN)
        source = pair if FROM_PAIR else slot
        x_rows = x_ptr + (source // PER_ROW).to(tl.int64)[None, :] * K + k[:, None]
        acc = _product(
            w_rows, x_rows, real_m[None, :], scales, zeros, tl.zeros((BN, BM), dtype=tl.float32), ROWS,
            K, BM, BN, GROUP, ZERO, TABLE, WIDE, STAGES,
        )  # fmt: skip
        if GATED:
            acc_u = _product(
                w_rows + N * STRIDE, x_rows, real_m[None, :], scales + N, zeros + N if ZERO else zeros,
                tl.zeros((BN, BM), dtype=tl.float32), ROWS,
                K, BM, BN, GROUP, ZERO, TABLE, WIDE, STAGES,
            )  # fmt: skip
        if BIAS:
            acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
            if GATED:
                acc_u += tl.load(bias_ptr + row + N).to(tl.float32)[:, None]
        if GATED:
            y = gated_act(acc, acc_u, ACT)
        else:
            y = plain_act(acc, ACT)
        target = pair if TO_PAIR else slot
        place_out = out_ptr + target.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place_out, y.to(out_ptr.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


def narrow_grouped(
    x: Tensor, weight: NarrowStack, ids: Tensor, order: Sorted | None, act: str | None, *,
    up: bool, pdl: bool, modest: bool = False, tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """As `grouped`, for packed experts. modest: little shared memory."""
    kind, gated = act_parts(act)
    rows, inner = weight.shape
    count = weight.data.shape[0]
    width, pairs = rows // 2 if gated else rows, ids.numel()
    t = tiling or narrow_tiling(pairs, count, modest=modest)
    out = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    units = count if order is None else order.tiles.shape[0]
    _narrow_kernel[(triton.cdiv(width, t.columns), units)](
        x, weight.data, weight.scales, weight.zeros, weight.bias, out,
        ids, None if order is None else order.order, None if order is None else order.tiles, pairs,
        N=width, K=inner, BM=t.pairs, BN=t.columns,
        BP=room_for(pairs) if order is None else 1, PER_ROW=ids.shape[1] if up else 1,
        FROM_PAIR=up, TO_PAIR=not up or order is None, SCAN=order is None, GROUP=weight.group,
        ZERO=weight.zeros is not None, TABLE=weight.table, ACT=kind, GATED=gated, BIAS=weight.bias is not None,
        WIDE=INTERPRETED or x.dtype == torch.float32, STAGES=t.stages, PDL=pdl, num_warps=t.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def narrow_tiling(pairs: int, experts: int, *, modest: bool = False) -> Tiling:
    """A tile for so many pairs over so many experts."""
    if INTERPRETED:
        return Tiling(16, 32, 32, 1, 4)
    size = pairs_per_tile(pairs, experts)
    if modest:
        return Tiling(size, 64, 64, 2, 4)
    if size == 128:
        return Tiling(128, 128, 64, 3, 8)
    return Tiling(size, 64, 128, 4 if size < 64 else 3, 4)
