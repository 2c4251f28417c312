"""Several tokens through their experts. Owns: one kernel that multiplies each touched expert with its tokens' rows.

A token and one of its experts are a pair. Weights are the left operand, up to BM pairs of one expert the right one.
Experts of 8 bits meet rows that were rounded to their type, one scale each, so that tensor cores take both as they lie.
Few pairs (SCAN): a program belongs to an expert and looks through all pairs for its own; an expert without any is not
read. Many: pairs were sorted by expert (`sorting.py`), and a program takes one tile of the sorted order.
Must not know: how experts were chosen, gates, layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.kernels.triton.common import INTERPRETED, act_parts, begin, gated_act, plain_act, wait
from tokenmill.kernels.triton.experts.sorting import FEW, Sorted, room_for
from tokenmill.kernels.triton.quantised.narrow import BLOCK
from tokenmill.kernels.triton.quantised.narrow_round import round_rows
from tokenmill.kernels.triton.quantised.narrow_thin import multiply


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix per expert as one tensor: table [E, N, K], bias [E, N] or None.

    scales: of 8 bit tables, float32 [E, N], or [E, N / 128, K / 128]."""

    table: Tensor
    bias: Tensor | None
    scales: Tensor | None = None

    @property
    def scaling(self) -> int:
        """How kernels call it: 0 nothing, 1 a scale for each row, 2 for each block of 128 x 128."""
        return 0 if self.scales is None else self.scales.dim() - 1


@dataclass(frozen=True, slots=True)
class Tiling:
    """Pairs, columns (of gate and of up, each) and inner entries of a tile; how it is pipelined.

    bulk: weights come through the copy engine, in whole tiles."""

    pairs: int
    columns: int
    inner: int
    stages: int
    warps: int
    bulk: bool = False


STEADY = Tiling(16, 32, 32, 1, 4) if INTERPRETED else Tiling(64, 64, 32, 3, 4)
"""The one tile where a result must not depend on how many tokens there are. It fits every GPU and type."""


@triton.jit
def span(id_ptr, tile_ptr, pairs, BP: tl.constexpr, SCAN: tl.constexpr):
    """What this program works on -> expert, the first of its places, one beyond the last; and for `pair_of`, which of
    all pairs are the expert's, and their places among those."""
    if SCAN:
        expert = tl.program_id(1)
        p = tl.arange(0, BP)
        mine = tl.load(id_ptr + p, mask=p < pairs, other=-1).to(tl.int32) == expert
        place = tl.cumsum(mine.to(tl.int32), axis=0) - 1
        first = 0
        last = tl.sum(mine.to(tl.int32), axis=0)
    else:
        # Tiles: [expert, first place in the sorted order, one beyond the last] each.
        expert = tl.load(tile_ptr + tl.program_id(1) * 3)
        first = tl.load(tile_ptr + tl.program_id(1) * 3 + 1)
        last = tl.load(tile_ptr + tl.program_id(1) * 3 + 2)
        mine = tl.full((BP,), 0, dtype=tl.int1)
        place = tl.zeros((BP,), dtype=tl.int32)
    return expert, first, last, mine, place


@triton.jit
def pair_of(slot, mine, place, order_ptr, BP: tl.constexpr, SCAN: tl.constexpr):
    """Places [BM] -> their pairs, and where rows of those lie in a tensor that was written in this order."""
    if SCAN:
        hit = mine[None, :] & (place[None, :] == slot[:, None])
        pair = tl.sum(tl.where(hit, tl.arange(0, BP)[None, :], 0), axis=1)
        slot = pair
    else:
        pair = tl.load(order_ptr + slot)
    return pair, slot


@triton.jit
def _tile(
    x_rows, w_rows, row, k, blocks, K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, GATED: tl.constexpr, SCALING: tl.constexpr, WIDE: tl.constexpr, STREAM: tl.constexpr,
    BULK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """w_rows [BN, BK] and x_rows [BK, BM] pointers to the first entries -> products [BN, BM] (two if gated), without
    scales of rows.

    BULK: w_rows describes all matrices, one below the other, and `row` is the first one's number. blocks: the scale of
    the first block.

    Rows of no pair repeat a real one: their results are not stored."""
    WHOLE: tl.constexpr = x_rows.dtype.element_ty == tl.int8 and not WIDE
    acc = tl.zeros((BN, BM), dtype=tl.int32 if WHOLE else tl.float32)
    acc_u = acc
    LONG: tl.constexpr = (K + 127) // 128
    EVEN: tl.constexpr = K % BK == 0
    for at in tl.range(0, K, BK, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_rows + at)
        else:
            x = tl.load(x_rows + at, mask=(at + k < K)[:, None], other=0.0)
        if BULK:
            w = w_rows.load([row, at])
        elif EVEN and STREAM:
            w = tl.load(w_rows + at, eviction_policy="evict_first")
        elif EVEN:
            w = tl.load(w_rows + at)
        else:
            w = tl.load(w_rows + at, mask=(at + k < K)[None, :], other=0.0)
        if GATED:
            if BULK:
                u = w_rows.load([row + N, at])
            elif EVEN and STREAM:
                u = tl.load(w_rows + (N * K + at), eviction_policy="evict_first")
            elif EVEN:
                u = tl.load(w_rows + (N * K + at))
            else:
                u = tl.load(w_rows + (N * K + at), mask=(at + k < K)[None, :], other=0.0)
        if SCALING == 2:
            none = tl.zeros((BN, BM), dtype=tl.float32)
            acc += multiply(w, x, none, WIDE) * tl.load(blocks + at // 128)
            if GATED:
                acc_u += multiply(u, x, none, WIDE) * tl.load(blocks + (N // 128 * LONG + at // 128))
        else:
            acc = multiply(w, x, acc, WIDE)
            if GATED:
                acc_u = multiply(u, x, acc_u, WIDE)
    return acc, acc_u


@triton.jit(do_not_specialize=["pairs"])
def _grouped_kernel(
    x_ptr, step_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, id_ptr, order_ptr, tile_ptr, pairs,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
    PER_ROW: tl.constexpr, FROM_PAIR: tl.constexpr, TO_PAIR: tl.constexpr, SCAN: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, SCALING: tl.constexpr, WIDE: tl.constexpr,
    BULK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SCALING: scale_ptr has the experts' scales (Stack), and step_ptr those of the rows of x."""
    begin(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    real_n = n < N
    ROWS: tl.constexpr = 2 * N if GATED else N
    wait(PDL)
    expert, first, last, mine, place = span(id_ptr, tile_ptr, pairs, BP, SCAN)
    row = expert * ROWS + tl.program_id(0) * BN
    if BULK:
        w_rows = w_ptr
    else:
        w_rows = w_ptr + (expert.to(tl.int64) * ROWS + tl.where(real_n, n, 0)[:, None]) * K + k[None, :]
    blocks = scale_ptr
    if SCALING == 2:
        TALL: tl.constexpr = (ROWS + 127) // 128
        blocks += (expert * TALL + tl.program_id(0) * BN // 128) * ((K + 127) // 128)
    for start in range(first, last, BM):
        real_m = start + m < last
        pair, slot = pair_of(tl.minimum(start + m, last - 1), mine, place, order_ptr, BP, SCAN)
        source = pair if FROM_PAIR else slot
        x_rows = x_ptr + (source // PER_ROW).to(tl.int64)[None, :] * K + k[:, None]
        acc, acc_u = _tile(x_rows, w_rows, row, k, blocks, K, N, BN, BM, BK, GATED, SCALING, WIDE, SCAN, BULK, STAGES)
        if SCALING > 0:
            step = tl.load(step_ptr + source // PER_ROW)[None, :]
            acc = acc.to(tl.float32) * step
            if GATED:
                acc_u = acc_u.to(tl.float32) * step
        if SCALING == 1:
            acc *= tl.load(scale_ptr + expert * ROWS + n, mask=real_n, other=0.0)[:, None]
            if GATED:
                acc_u *= tl.load(scale_ptr + expert * ROWS + N + n, mask=real_n, other=0.0)[:, None]
        if BIAS:
            acc += tl.load(bias_ptr + expert * ROWS + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                acc_u += tl.load(bias_ptr + expert * ROWS + N + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            y = gated_act(acc, acc_u, ACT)
        else:
            y = plain_act(acc, ACT)
        target = pair if TO_PAIR else slot
        place_out = out_ptr + target.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place_out, y.to(out_ptr.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


def grouped(
    x: Tensor, weight: Stack, ids: Tensor, order: Sorted | None, act: str | None, *,
    up: bool, pdl: bool, modest: bool = False, tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """One of the two products of every pair, weight [E, N, K], ids [T, k].

    up: x [T, K] -> act(x @ weight[id].T + bias[id]) [T * k, N'], in sorted order where `order` is given.
    Else x [T * k, K], in that order -> [T * k, N] in the order of pairs. Rows of pairs without an expert: undefined.
    modest: no copy engine, or little shared memory."""
    kind, gated = act_parts(act)
    table, scaling = weight.table, weight.scaling
    count, rows, inner = table.shape
    width, pairs = rows // 2 if gated else rows, ids.numel()
    out = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    steps = None
    if scaling:
        x, steps = round_rows(x, table.dtype, pdl=pdl)
    t = tiling or pick_tiling(pairs, count, scaling, gated=gated, modest=modest or x.dtype == torch.float32)
    assert scaling < 2 or (BLOCK % t.columns == 0 and BLOCK % t.inner == 0), "a tile lies within one block of scales"
    bulk = t.bulk and inner * x.element_size() % 16 == 0 and table.data_ptr() % 16 == 0
    matrices = TensorDescriptor.from_tensor(table.view(-1, inner), [t.columns, t.inner]) if bulk else table
    units = count if order is None else order.tiles.shape[0]
    _grouped_kernel[(triton.cdiv(width, t.columns), units)](
        x, steps, matrices, weight.scales, weight.bias, out,
        ids, None if order is None else order.order, None if order is None else order.tiles, pairs,
        N=width, K=inner, BM=t.pairs, BN=t.columns, BK=t.inner, BP=room_for(pairs) if order is None else 1,
        PER_ROW=ids.shape[1] if up else 1, FROM_PAIR=up, TO_PAIR=not up or order is None, SCAN=order is None,
        ACT=kind, GATED=gated, BIAS=weight.bias is not None, SCALING=scaling,
        WIDE=INTERPRETED or x.dtype == torch.float32, BULK=bulk, STAGES=t.stages, PDL=pdl, num_warps=t.warps,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def pick_tiling(pairs: int, experts: int, scaling: int, *, gated: bool, modest: bool = False) -> Tiling:
    """A tile for so many pairs over so many experts; scaling: of a Stack. Measured on an H200."""
    if INTERPRETED:
        return Tiling(16, 32, 32, 1, 4)
    high = pairs_per_tile(pairs, experts)
    if modest:
        return Tiling(high, 64, 32, 3, 4)
    if scaling:
        if high <= 64:
            return Tiling(high, 64, 128, 4, 4, True) if gated else Tiling(high, 128, 128, 3, 4, True)
        return Tiling(128, 128, 128, 4, 8, True) if gated or scaling == 2 else Tiling(128, 256, 128, 3, 8, True)
    if high == 16:
        return Tiling(16, 64, 128, 3, 4, True) if gated else Tiling(16, 128, 128, 3, 4, True)
    if high <= 64:
        return Tiling(high, 64, 64, 4, 4, True) if gated else Tiling(high, 128, 64, 4, 8, True)
    return Tiling(128, 128, 64, 4, 8, True) if gated else Tiling(128, 256, 64, 4, 8, True)


def looks(pairs: int, experts: int) -> bool:
    """Do programs look for their own pairs? Where these are few, and few of them are one expert's."""
    return pairs <= FEW and pairs_per_tile(pairs, experts) <= 32


def pairs_per_tile(pairs: int, experts: int) -> int:
    """How many pairs a tile takes, so that most experts need one tile while there are few."""
    if INTERPRETED:
        return 16
    mean = pairs / experts
    return 16 if mean <= 8 else 32 if mean <= 20 else 64 if mean <= 96 else 128
