"""Attention sums that several programs share, and their ends. Owns: storing a part, joining all parts, sinks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.triton.attention.decode_records import Partial
from tokenmill.kernels.triton.attention.paging import FLOOR, LOG2E
from tokenmill.kernels.triton.common import Scratch

PARTS = tl.constexpr(32)
"""The most programs that share the keys of several queries."""


def programs_for_a_tile(*limits: int) -> int:
    """How many programs share the keys of a tile: the largest power of two that no limit forbids."""
    return 1 << max(1, min(PARTS.value, *limits)).bit_length() - 1


def parts_of(scratch: Scratch, values: int, device: torch.device) -> Partial:
    """Where so many values of parts may lie, their tops and sums behind them."""
    partial = scratch.partial(device)
    return Partial(partial, partial[values:], scratch.counters(device))


@triton.jit
def _part(place, partial, real, v, DV: tl.constexpr, CACHE: tl.constexpr):
    """A part that some program has left: the largest score of each row, the sum, and the values."""
    top = tl.load(partial.top + place * 2, mask=real, other=FLOOR, cache_modifier=CACHE)
    total = tl.load(partial.top + place * 2 + 1, mask=real, other=0.0, cache_modifier=CACHE)
    part = tl.load(
        partial.part + place[:, None] * DV + v[None, :],
        mask=(real & (total != 0.0))[:, None] & (v < DV)[None, :],
        other=0.0,
        cache_modifier=CACHE,
    )
    return top, total, part


@triton.jit
def join_shared(acc, top, total, origin, partial, row, real, v, SHAPE: tl.constexpr, CUT: tl.constexpr):
    """Take the parts of a shared prefix into the result: nobody else works on this sequence and head."""
    BEFORE: tl.constexpr = CUT.BEFORE  # a range asks for a constexpr
    for other in tl.static_range(BEFORE):
        place = origin + other * SHAPE.GROUP + row
        their_top, theirs, part = _part(place, partial, real, v, SHAPE.DV, "")
        new_top = tl.maximum(top, their_top)
        old, new = tl.exp2(top - new_top), tl.exp2(their_top - new_top)
        total = total * old + tl.where(theirs == 0.0, 0.0, theirs * new)
        acc = acc * old[:, None] + part * new[:, None]
        top = new_top
    return acc, top, total


@triton.jit
def leave_part(acc, top, total, place, unit, partial, real, v, active, DV: tl.constexpr):
    """Leave this split's part where the others find it -> have they all done so?"""
    tl.store(
        partial.part + place[:, None] * DV + v[None, :],
        acc,
        mask=real[:, None] & (v < DV)[None, :],
        cache_modifier=".cg",
    )
    tl.store(partial.top + place * 2, top, mask=real, cache_modifier=".cg")
    tl.store(partial.top + place * 2 + 1, total, mask=real, cache_modifier=".cg")
    tl.debug_barrier()
    return tl.atomic_add(partial.count + unit, 1, sem="acq_rel") == active - 1


@triton.jit
def join_all(
    origin, parts, unit, partial, row, real, v,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, BV: tl.constexpr, DV: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """All parts of a unit, in order, up to MOST, STRIDE rows apart; the counter is ready for the next launch then."""
    tl.store(partial.count + unit, 0)
    every = tl.arange(0, MOST)
    spots = origin + every[:, None] * STRIDE + row[None, :]
    there = (every < parts)[:, None] & real[None, :]
    tops = tl.load(partial.top + spots * 2, mask=there, other=FLOOR, cache_modifier=".cg")
    totals = tl.load(partial.top + spots * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, axis=0)
    # A part without keys left no values; NaN sums must stay, so ask for zero, not for "greater".
    total = tl.sum(tl.where(totals == 0.0, 0.0, totals * tl.exp2(tops - top[None, :])), axis=0)
    acc = tl.zeros((ROWS, BV), dtype=tl.float32)
    for other in tl.range(0, parts, loop_unroll_factor=4):
        place = origin + other * STRIDE + row
        their_top, _, part = _part(place, partial, real, v, DV, ".cg")
        acc += part * tl.exp2(their_top - top)[:, None]
    return acc, top, total


@triton.jit
def join_here(
    acc, top, total, row, real, v, partial, active, ROWS: tl.constexpr, BV: tl.constexpr, DV: tl.constexpr
):  # fmt: skip
    """The second dimension of the grid shares out the keys of what the first one counts, `active` parts of them with
    keys -> is this the program that has the whole result, and the result."""
    joins = True
    if active > 1:
        unit = tl.program_id(0)
        origin = unit.to(tl.int64) * tl.num_programs(1) * ROWS
        mine = origin + tl.program_id(1) * ROWS + row
        joins = leave_part(acc, top, total, mine, unit, partial, real, v, active, DV)
        if joins:
            acc, top, total = join_all(origin, active, unit, partial, row, real, v, ROWS, ROWS, BV, DV, PARTS)
    return joins, acc, top, total


@triton.jit
def weigh_sinks(acc, top, total, head, real, sinks):
    """A score of each head that no value belongs to."""
    sink = tl.load(sinks + head, mask=real, other=FLOOR).to(tl.float32) * LOG2E
    new_top = tl.maximum(top, sink)
    total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
    return acc * tl.exp2(top - new_top)[:, None], total


@triton.jit
def finish(acc, top, total, query, head, real, v, out_ptr, sinks, SHAPE: tl.constexpr, SINKS: tl.constexpr):
    """Weigh the sinks, divide, store."""
    if SINKS:
        acc, total = weigh_sinks(acc, top, total, head, real, sinks)
    y = acc / tl.where(real, total, 1.0)[:, None]
    target = out_ptr + query * SHAPE.H * SHAPE.DV + head[:, None] * SHAPE.DV + v[None, :]
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & (v < SHAPE.DV)[None, :])
