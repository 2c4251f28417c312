"""Adapters of experts: what those of a mixture's two products add to every pair of a token and one of its experts.

Pairs come sorted by expert (`sorting.py`). A program has a tile of one expert's pairs and goes over the adapters that
these have, as `products/adapters.py` does with tokens; an adapter's matrices lie by expert, then by slot
(compute/adapters.py: SiteStack). The activation of the first product comes later, and gates are not applied here.
Must not know: how experts were chosen, gates, layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.adapters import SiteStack
from tokenmill.kernels.triton.common import act_parts, begin, gated_act, plain_act, pow2, wait
from tokenmill.kernels.triton.experts.sorting import Sorted
from tokenmill.kernels.triton.products.adapters import carried, shrink_rows
from tokenmill.kernels.triton.sampling.logit_pieces import any_of

_BLOCK = 16
"""Pairs that are multiplied together."""


class Whose(NamedTuple):
    """Each token's slot [T], and how many experts a token has."""

    slots: Tensor
    top: int


@triton.jit
def _pairs_of(start, last, order_ptr, slots_ptr, TOP, BM: tl.constexpr):
    """Places start .. start + BM of the sorted order -> places, which are real, their pairs, their slots (or 0)."""
    place = start + tl.arange(0, BM)
    real = place < last
    pair = tl.load(order_ptr + place, mask=real, other=0)
    return place, real, pair, tl.load(slots_ptr + pair // TOP, mask=real, other=0)


@triton.jit
def _lanes_kernel(
    x_ptr, down_ptr, ranks_ptr, slots_ptr, order_ptr, tile_ptr, low_ptr, P, K, K_EACH, parts, TOP, SLOTS,
    LANES: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, FROM_TOKEN: tl.constexpr,
    IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    wait(PDL)
    expert = tl.load(tile_ptr + tl.program_id(0) * 3)
    first = tl.load(tile_ptr + tl.program_id(0) * 3 + 1)
    last = tl.load(tile_ptr + tl.program_id(0) * 3 + 2)
    down = down_ptr + (expert * SLOTS).to(tl.int64) * K * LANES
    low = low_ptr + tl.program_id(1).to(tl.int64) * P * LANES
    for start in range(first, last, BM):
        place, _, pair, slots = _pairs_of(start, last, order_ptr, slots_ptr, TOP, BM)
        source = pair // TOP if FROM_TOKEN else place
        shrink_rows(x_ptr, source, down, ranks_ptr + expert * SLOTS, low, place, slots, tl.program_id(1) * K_EACH,
                    K, K_EACH, K, parts, LANES, BM, BK, BL, IEEE)  # fmt: skip


@triton.jit
def _pairs_kernel(
    y_ptr, low_ptr, up_ptr, ranks_ptr, slots_ptr, order_ptr, tile_ptr, out_ptr, P, N, WIDTH, most_rank, TOP,
    SLOTS, PARTS: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, LAST: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LAST: no activation follows, and rows of y lie in the order of pairs, not in the sorted one."""
    begin(PDL)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = n < WIDTH
    wait(PDL)
    expert = tl.load(tile_ptr + tl.program_id(0) * 3)
    first = tl.load(tile_ptr + tl.program_id(0) * 3 + 1)
    last = tl.load(tile_ptr + tl.program_id(0) * 3 + 2)
    ranks = ranks_ptr + expert * SLOTS
    up = up_ptr + (expert * SLOTS).to(tl.int64) * most_rank * N
    for start in range(first, last, BM):
        place, real, pair, slots = _pairs_of(start, last, order_ptr, slots_ptr, TOP, BM)
        if not LAST or any_of(slots > 0):
            row = (pair if LAST else place).to(tl.int64)
            both = real[:, None] & ok[None, :]
            at = row[:, None] * N + n[None, :]
            y = tl.load(y_ptr + at, mask=both, other=0.0).to(tl.float32)
            y += carried(low_ptr, up, ranks, slots, place, P, n, ok, 0, most_rank, N, SPLITS, LANES, BM, BN, BR, IEEE)
            if GATED:
                other = tl.load(y_ptr + at + WIDTH, mask=both, other=0.0).to(tl.float32)
                other += carried(low_ptr, up, ranks, slots, place, P, n + WIDTH, ok, PARTS - 1, most_rank, N,
                                 SPLITS, LANES, BM, BN, BR, IEEE)  # fmt: skip
                y = gated_act(y, other, ACT)
            else:
                y = plain_act(y, ACT)
            tl.store(out_ptr + row[:, None] * WIDTH + n[None, :], y.to(out_ptr.dtype.element_ty), mask=both)


def pair_lanes(x: Tensor, stack: SiteStack, order: Sorted, whose: Whose, *, up: bool, pdl: bool) -> Tensor:
    """down @ x of every pair's adapter, in parts of the sum: [splits, P, lanes] float32, in the sorted order. x [T, K],
    or [P, K] in that order if this is not the first product."""
    assert stack.down is not None
    pairs, (_, slots, inputs, lanes) = order.order.shape[0], stack.down.shape
    splits = max(1, min(4, inputs // 256))
    low = torch.empty((splits, pairs, lanes), dtype=torch.float32, device=x.device)
    _lanes_kernel[(order.tiles.shape[0], splits)](
        x, stack.down, stack.ranks, whose.slots, order.order, order.tiles, low, pairs, inputs,
        -(-triton.cdiv(inputs, splits) // 64) * 64, stack.parts, whose.top, slots,
        LANES=lanes, BM=_BLOCK, BK=64, BL=min(64, pow2(lanes)), FROM_TOKEN=up, IEEE=x.dtype == torch.float32, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return low


def finish_pairs(
    y: Tensor, low: Tensor, stack: SiteStack, order: Sorted, whose: Whose, act: str | None, *, pdl: bool
) -> Tensor:
    """act(y + up @ low). With an activation y [P, N] lies in the sorted order, [P, 2N] -> [P, N] if that is gated; else
    in that of pairs. What is not gated takes y's place."""
    assert stack.up is not None
    kind, gated = act_parts(act)
    pairs, columns = y.shape
    width = columns // 2 if gated else columns
    assert not gated or stack.parts == 1 or stack.borders == (0, width, columns), "gates, then what they let through"
    out = torch.empty((pairs, width), dtype=y.dtype, device=y.device) if gated else y
    most = stack.up.shape[2]
    _pairs_kernel[(order.tiles.shape[0], triton.cdiv(width, 64))](
        y, low, stack.up, stack.ranks, whose.slots, order.order, order.tiles, out, pairs, columns, width,
        most, whose.top, stack.up.shape[1],
        PARTS=stack.parts, SPLITS=low.shape[0], LANES=low.shape[2], ACT=kind, GATED=gated, BM=_BLOCK, BN=64,
        BR=max(16, min(64, pow2(most))), LAST=act is None, IEEE=y.dtype == torch.float32, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
