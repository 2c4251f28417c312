"""Pairs of (token, expert) in the order of experts. Owns: a stable counting sort (two launches; one for few pairs), its
tiles, and tokens' rows laid in that order.

Must not know: what is done with them. A pair without an expert (id outside 0..E-1) is in no tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.common import INTERPRETED, Scratch, begin, pow2, wait

_BLOCK = 16 if INTERPRETED else 128
"""Pairs that one program ranks at once."""
FEW = 64 if INTERPRETED else 1024
"""Pairs up to which programs look through all of them for their own."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """order [P] (int32): pairs by expert. tiles [n, 3] (int32): expert, first place, one beyond the last; those that
    are not needed are empty."""

    order: Tensor
    tiles: Tensor


@triton.jit
def _write_tiles(tile_ptr, held, tiles, BE: tl.constexpr, BM: tl.constexpr):
    """The tiles of experts that have so many pairs each [BE] -> where each expert's begin."""
    e = tl.arange(0, BE)
    begins = tl.cumsum(held, axis=0) - held
    needed = tl.cdiv(held, BM)
    tile = tl.cumsum(needed, axis=0) - needed
    for i in range(0, tl.max(needed, axis=0)):
        here = tile_ptr + (tile + i) * 3
        tl.store(here, e, mask=i < needed)
        tl.store(here + 1, begins + i * BM, mask=i < needed)
        tl.store(here + 2, tl.minimum(begins + (i + 1) * BM, begins + held), mask=i < needed)
    used = tl.sum(needed, axis=0)
    for i in range(0, tl.cdiv(tiles - used, BE)):
        spare = used + i * BE + e
        tl.store(tile_ptr + spare * 3, 0, mask=spare < tiles)
        tl.store(tile_ptr + spare * 3 + 1, 0, mask=spare < tiles)
        tl.store(tile_ptr + spare * 3 + 2, 0, mask=spare < tiles)
    return begins


@triton.jit(do_not_specialize=["pairs", "blocks", "tiles", "rounds"])
def _count_kernel(
    id_ptr, rank_ptr, start_ptr, tile_ptr, counter_ptr, pairs, blocks, tiles, rounds,
    E: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    block = tl.program_id(0)
    e = tl.arange(0, BE)
    first = block * rounds * BP
    wait(PDL)
    tl.store(start_ptr + block * BE + e, 0)
    tl.debug_barrier()
    for i in range(rounds):
        p = first + i * BP + tl.arange(0, BP)
        expert = tl.load(id_ptr + p, mask=p < pairs, other=-1).to(tl.int32)
        real = (expert >= 0) & (expert < E)
        # Those of earlier rounds are counted already, those of this one are looked for.
        earlier = tl.load(start_ptr + block * BE + expert, mask=real, other=0, cache_modifier=".cg")
        before = tl.zeros((BP, 16), dtype=tl.int32)
        for j in tl.static_range(0, BP, 16):
            q = first + i * BP + j + tl.arange(0, 16)
            other = tl.load(id_ptr + q, mask=q < pairs, other=-1).to(tl.int32)
            before += ((other[None, :] == expert[:, None]) & (q[None, :] < p[:, None])).to(tl.int32)
        tl.store(rank_ptr + p, earlier + tl.sum(before, axis=1), mask=p < pairs)
        tl.debug_barrier()
        tl.atomic_add(start_ptr + block * BE + expert, 1, mask=real, sem="relaxed")
        tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == blocks - 1:
        # The last one: where each expert begins, then where each block's pairs of each expert begin.
        tl.store(counter_ptr, 0)
        held = tl.zeros((BE,), dtype=tl.int32)
        for at in range(0, blocks, BB):
            b = (at + tl.arange(0, BB))[:, None]
            held += tl.sum(tl.load(start_ptr + b * BE + e[None, :], mask=b < blocks, other=0, cache_modifier=".cg"), 0)
        held = tl.where(e < E, held, 0)
        begins = _write_tiles(tile_ptr, held, tiles, BE, BM)
        for at in range(0, blocks, BB):
            b = (at + tl.arange(0, BB))[:, None]
            spots = start_ptr + b * BE + e[None, :]
            count = tl.load(spots, mask=b < blocks, other=0, cache_modifier=".cg")
            tl.store(spots, begins[None, :] + tl.cumsum(count, axis=0) - count, mask=b < blocks)
            begins += tl.sum(count, axis=0)


@triton.jit(do_not_specialize=["pairs", "rounds"])
def _place_kernel(
    id_ptr, rank_ptr, start_ptr, order_ptr, pairs, rounds, E: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    block = tl.program_id(0)
    p = block * BP + tl.arange(0, BP)
    wait(PDL)
    expert = tl.load(id_ptr + p, mask=p < pairs, other=-1).to(tl.int32)
    real = (expert >= 0) & (expert < E)
    start = tl.load(start_ptr + block // rounds * BE + expert, mask=real, other=0)
    tl.store(order_ptr + start + tl.load(rank_ptr + p, mask=real, other=0), p, mask=real)


@triton.jit
def _lay_row(x_ptr, out_ptr, source, target, K: tl.constexpr):
    """One row of x to where it belongs."""
    STEP: tl.constexpr = 2048
    for at in tl.static_range(0, K, STEP):
        k = at + tl.arange(0, STEP)
        row = tl.load(x_ptr + source.to(tl.int64) * K + k, mask=k < K)
        tl.store(out_ptr + target.to(tl.int64) * K + k, row, mask=k < K)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _few_kernel(
    id_ptr, order_ptr, tile_ptr, x_ptr, out_ptr, pairs, tiles, TOP,
    E: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first program writes the tiles, each other one finds the place of one pair. BP: at least all pairs."""
    begin(PDL)
    me = tl.program_id(0) - 1
    p = tl.arange(0, BP)
    wait(PDL)
    ids = tl.load(id_ptr + p, mask=p < pairs, other=-1).to(tl.int32)
    ids = tl.where((ids >= 0) & (ids < E), ids, E)
    if me < 0:
        held = tl.histogram(ids, BE)
        _write_tiles(tile_ptr, tl.where(tl.arange(0, BE) < E, held, 0), tiles, BE, BM)
    else:
        expert = tl.load(id_ptr + me).to(tl.int32)
        if (expert >= 0) & (expert < E):
            slot = tl.sum(((ids < expert) | ((ids == expert) & (p < me))).to(tl.int32), axis=0)
            tl.store(order_ptr + slot, me)
            _lay_row(x_ptr, out_ptr, me // TOP, slot, K)


@triton.jit(do_not_specialize=["pairs"])
def _lay_kernel(x_ptr, order_ptr, out_ptr, pairs, TOP, K: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    slot = tl.program_id(0)
    wait(PDL)
    pair = tl.load(order_ptr + slot)
    if (pair >= 0) & (pair < pairs):  # places of pairs without an expert hold anything
        _lay_row(x_ptr, out_ptr, pair // TOP, slot, K)


def sort_rows(
    x: Tensor, ids: Tensor, experts: int, per_tile: int, scratch: Scratch, *, pdl: bool
) -> tuple[Sorted, Tensor]:
    """ids [T, k] sorted as `sort_pairs` does, and rows of x [T, K] in that order [T * k, K]; those of pairs without an
    expert: undefined."""
    pairs, top, device = ids.numel(), ids.shape[1], ids.device
    rows = torch.empty((pairs, x.shape[1]), dtype=x.dtype, device=device)
    if pairs > FEW:
        order = sort_pairs(ids, experts, per_tile, scratch, pdl=pdl)
        _lay_kernel[(pairs,)](x, order.order, rows, pairs, top, K=x.shape[1], PDL=pdl, num_warps=4, launch_pdl=pdl)
        return order, rows
    order = _unsorted(ids, experts, per_tile)
    _few_kernel[(1 + pairs,)](
        ids, order.order, order.tiles, x, rows, pairs, len(order.tiles), top, E=experts, BE=pow2(experts + 1),
        BP=room_for(pairs), BM=per_tile, K=x.shape[1], PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return order, rows


def sort_pairs(ids: Tensor, experts: int, per_tile: int, scratch: Scratch, *, pdl: bool) -> Sorted:
    """ids [T, k] -> the pairs t * k + j by expert, equal ones in their order, in tiles of at most `per_tile`."""
    pairs, device = ids.numel(), ids.device
    wide = max(16, pow2(experts))
    rounds = min(8, pow2(triton.cdiv(pairs, 64 * _BLOCK)))
    blocks = triton.cdiv(pairs, _BLOCK * rounds)
    found = _unsorted(ids, experts, per_tile)
    rank = torch.empty_like(found.order)
    starts = torch.empty((blocks, wide), dtype=torch.int32, device=device)
    _count_kernel[(blocks,)](
        ids, rank, starts, found.tiles, scratch.counters(device), pairs, blocks, len(found.tiles), rounds,
        E=experts, BE=wide, BP=_BLOCK, BM=per_tile,
        BB=max(32 if wide <= 128 else 16, 4096 // wide), PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    _place_kernel[(triton.cdiv(pairs, _BLOCK),)](
        ids, rank, starts, found.order, pairs, rounds, E=experts, BE=wide, BP=_BLOCK, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return found


def room_for(pairs: int) -> int:
    """In few sizes, because each is a kernel to compile."""
    return next(size for size in (64, 256, FEW) if pairs <= size)


def _unsorted(ids: Tensor, experts: int, per_tile: int) -> Sorted:
    """Room for the order of these pairs, and for as many tiles as there may be."""
    pairs = ids.numel()
    tiles = min(experts, pairs) + pairs // per_tile
    return Sorted(*(torch.empty(shape, dtype=torch.int32, device=ids.device) for shape in ((pairs,), (tiles, 3))))
