"""Attention of sequences with several new tokens. Owns: flash attention over paged keys and values, ragged batches.

Rows of a program are (query, head) pairs that share a key/value head: BQ queries times GROUP heads. Programs find
their sequence by searching `query_start`: sequence i owns tiles query_start[i] // BQ + i and the following ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan
from tokenmill.kernels.triton.attention.decode_records import Partial
from tokenmill.kernels.triton.attention.paging import (
    FLOOR,
    bend,
    further,
    head_and_tile,
    locate,
    path_of,
    path_parts,
    place_of,
    reach,
)
from tokenmill.kernels.triton.attention.partial import join_here, parts_of, programs_for_a_tile, weigh_sinks
from tokenmill.kernels.triton.attention.stored import kinds_of, scale_strides, scales_of, spot_in, widened
from tokenmill.kernels.triton.common import (
    INTERPRETED,
    Scratch,
    asynchronous,
    begin,
    multiprocessors,
    pow2,
    product,
    shared_memory,
    wait,
)

_LEAST = 1 if INTERPRETED else 2
"""Tiles of keys that a program has at the least."""


@triton.jit
def _visit(
    acc, top, total, q, at, keys, values, key_scales, value_scales, table, first, entries, kv_len, path,
    query_position, slope, real, d, v, n,
    key_block, key_row, value_block, value_row,
    key_scale_block, key_scale_row, value_scale_block, value_scale_row, scale, softcap, window,
    D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, TREE: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of keys. MASKED: some may be out of some row's sight; else all rows see all of them."""
    index = at + n
    d_place, v_place = spot_in(d, K_KIND, D), spot_in(v, V_KIND, DV)
    if MASKED:
        block, offset, position, known = locate(at, n, table, first, entries, kv_len, path, SIZE, FIRST, TREE, False)
        k = tl.load(
            keys + block[None, :] * key_block + offset[None, :] * key_row + d_place[:, None],
            mask=known[None, :] & (d < D)[:, None], other=0.0,
        )  # fmt: skip
    else:
        position = index
        known = index >= 0
        if TREE:
            index += further(position, known, path)
        block = tl.load(table + index // SIZE).to(tl.int64)
        offset = index % SIZE
        spots = keys + block[None, :] * key_block + offset[None, :] * key_row + d_place[:, None]
        if EVEN:
            k = tl.load(spots)
        else:
            k = tl.load(spots, mask=(d < D)[:, None], other=0.0)
    factor = key_scales + key_scale_block * block + key_scale_row * offset
    k = widened(k, factor[None, :], d[:, None], known[None, :], q.dtype, K_KIND, D)
    scores = product(q, k, tl.zeros((q.shape[0], n.shape[0]), dtype=tl.float32), WIDE)
    if K_KIND.PER > 1 and K_KIND.WHOLE:
        scores = scores * tl.load(factor, mask=known, other=0.0).to(tl.float32)[None, :]
    scores = bend(scores, query_position[:, None], position[None, :], slope, scale, softcap, SOFTCAP, ALIBI)
    if MASKED:
        distance = query_position[:, None] - position[None, :]
        seen = known[None, :] & (distance >= 0)
        if WINDOW:
            seen = seen & (distance < window[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    factor = value_scales + value_scale_block * block + value_scale_row * offset
    if V_KIND.PER > 1 and V_KIND.WHOLE:
        p = p * tl.load(factor, mask=known, other=0.0).to(tl.float32)[None, :]
    spots = values + block[:, None] * value_block + offset[:, None] * value_row + v_place[None, :]
    if MASKED:
        val = tl.load(spots, mask=known[:, None] & (v < DV)[None, :], other=0.0)
    elif EVEN:
        val = tl.load(spots)
    else:
        val = tl.load(spots, mask=(v < DV)[None, :], other=0.0)
    val = widened(val, factor[:, None], v[None, :], known[:, None], q.dtype, V_KIND, DV)
    acc = product(p.to(q.dtype), val, acc * shrink[:, None], WIDE)
    return acc, new_top, total


@triton.jit(do_not_specialize=["S", "table_stride", "places_stride"])
def _prefill_kernel(
    q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, first_ptr, entries_ptr, start_ptr, len_ptr,
    root_ptr, place_ptr, sink_ptr, slope_ptr, out_ptr, partial,
    S, table_stride, places_stride, key_block, key_head, key_row, value_block, value_head, value_row,
    key_scale_block, key_scale_head, key_scale_row, value_scale_block, value_scale_head, value_scale_row,
    scale, softcap, window,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    BQ: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    FIRST: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    TREE: tl.constexpr, MIXED: tl.constexpr, SPLIT: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SPLIT: the second dimension of the grid shares the keys of a tile out; the last one to end joins the parts."""
    begin(PDL)
    kv_head, tile = head_and_tile(H // GROUP)
    wait(PDL)
    seq, local = place_of(tile, start_ptr, S, BQ)
    start = tl.load(start_ptr + seq)
    queries = tl.load(start_ptr + seq + 1) - start
    if local >= queries:
        return
    if MIXED:
        if queries == 1:
            return  # the decode kernel's
    kv_len = tl.load(len_ptr + seq)
    row = tl.arange(0, BQ * BG)
    query = local + row // BG
    in_group = row % BG
    real = (query < queries) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    query_position = kv_len - queries + query
    if WINDOW:
        window = reach(query_position, window)
    d = tl.arange(0, BD)
    v = tl.arange(0, BV)
    n = tl.arange(0, BN)
    token = (start + query).to(tl.int64)
    q = tl.load(
        q_ptr + token[:, None] * (H * D) + head[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :],
        other=0.0,
    )  # fmt: skip
    slope = tl.zeros((BQ * BG,), dtype=tl.float32)
    if ALIBI:
        slope = tl.load(slope_ptr + head, mask=real, other=0.0).to(tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    first = first_ptr
    entries = 0
    path = (0, 0)
    if TREE:
        path = path_of(root_ptr, place_ptr, seq, places_stride)
    oldest = kv_len - queries + local
    newest = tl.minimum(oldest + BQ, kv_len)
    begin_at = 0
    end = newest
    plain = oldest // BN * BN
    if FIRST:
        first = first_ptr + seq.to(tl.int64) * table_stride
        entries = tl.load(entries_ptr + seq)
        end = entries * SIZE
        plain = 0
    elif WINDOW:
        begin_at = tl.maximum(tl.min(query_position - window, axis=0) + 1, 0) // BN * BN
        plain = begin_at
    active = 1
    if SPLIT:
        chunk = tl.cdiv(tl.cdiv(end - begin_at, BN), tl.num_programs(1)) * BN
        active = tl.cdiv(end - begin_at, chunk)
        if tl.program_id(1) >= active:
            return
        begin_at += tl.program_id(1) * chunk
        end = tl.minimum(end, begin_at + chunk)
        plain = tl.minimum(tl.maximum(plain, begin_at), end)
    keys = key_ptr + kv_head.to(tl.int64) * key_head
    values = value_ptr + kv_head.to(tl.int64) * value_head
    key_scales = key_scale_ptr + kv_head.to(tl.int64) * key_scale_head
    value_scales = value_scale_ptr + kv_head.to(tl.int64) * value_scale_head
    acc = tl.zeros((BQ * BG, BV), dtype=tl.float32)
    top = tl.full((BQ * BG,), FLOOR, dtype=tl.float32)
    total = tl.zeros((BQ * BG,), dtype=tl.float32)
    EVEN: tl.constexpr = D == BD and DV == BV
    if not FIRST and not WINDOW:
        for at in tl.range(begin_at, plain, BN, num_stages=STAGES):
            acc, top, total = _visit(
                acc, top, total, q, at, keys, values, key_scales, value_scales, table, first, entries, kv_len,
                path, query_position, slope, real, d, v, n, key_block, key_row, value_block, value_row,
                key_scale_block, key_scale_row, value_scale_block, value_scale_row, scale, softcap, window,
                D, DV, SIZE, FIRST, WINDOW, SOFTCAP, ALIBI, TREE, False, EVEN, K_KIND, V_KIND, WIDE,
            )  # fmt: skip
    for at in tl.range(plain, end, BN, num_stages=STAGES):
        acc, top, total = _visit(
            acc, top, total, q, at, keys, values, key_scales, value_scales, table, first, entries, kv_len,
            path, query_position, slope, real, d, v, n, key_block, key_row, value_block, value_row,
            key_scale_block, key_scale_row, value_scale_block, value_scale_row, scale, softcap, window,
            D, DV, SIZE, FIRST, WINDOW, SOFTCAP, ALIBI, TREE, True, EVEN, K_KIND, V_KIND, WIDE,
        )  # fmt: skip
    joins = True
    if SPLIT:
        joins, acc, top, total = join_here(acc, top, total, row, real, v, partial, active, BQ * BG, BV, DV)
    if joins:
        if SINKS:
            acc, total = weigh_sinks(acc, top, total, head, real, sink_ptr)
        y = acc / tl.where(real, total, 1.0)[:, None]
        place = out_ptr + token[:, None] * (H * DV) + head[:, None] * DV + v[None, :]
        tl.store(place, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & (v < DV)[None, :])


def attend_many(
    q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext, scratch: Scratch, *,
    pdl: bool, mixed: bool = False, steady: bool = False, config: tuple[int, int, int, int] | None = None,
) -> None:  # fmt: skip
    """q [T, H, Dk] -> out [T, H * Dv]; mixed: leave sequences with one new token alone.

    steady: one shape of tile whatever the batch, and nothing is split. config (rows, BN, warps, stages)."""
    kv, plan = ctx.kv[spec.layer], ctx.groups[spec.group]
    seqs, heads = plan.tables.shape[0], spec.kv.heads
    roots, places, apart = path_parts(None if mixed else plan.paths)  # a node has one new token
    group = spec.heads // heads
    chosen = config or (STEADY if steady else prefill_config(spec, plan, ctx.max_query))
    rows, block_n, warps, stages = chosen
    if not INTERPRETED:
        rows, block_n, warps, stages = fitting(chosen, spec, q.element_size(), shared_memory(), asynchronous())
    packed = pow2(group)
    block_q = max(1, (rows if steady else max(16, min(rows, pow2(ctx.max_query) * packed))) // packed)
    tiles = q.shape[0] // block_q + seqs
    splits, partial = 1, None
    if not steady and plan.first is None:
        needed = seqs * triton.cdiv(ctx.max_query, block_q)  # of the others some have no queries
        units = heads * tiles, heads * min(tiles, needed)
        splits, partial = share_keys(units, block_q * packed, block_n, spec, ctx, scratch)
    _prefill_kernel[(heads * tiles, splits)](
        q, kv.key, kv.value, *scales_of(kv), plan.tables, plan.first, plan.entries,
        ctx.query_start, ctx.kv_len, roots, places, spec.sinks, spec.alibi, out, partial,
        seqs, plan.tables.stride(0), apart, *kv.key.stride()[:3], *kv.value.stride()[:3],
        *scale_strides(kv), spec.scale, spec.softcap, spec.window,
        H=spec.heads, GROUP=group, D=spec.kv.key_dim, DV=spec.kv.value_dim, SIZE=ctx.block_size,
        BQ=block_q, BG=packed, BN=block_n, BD=max(16, pow2(spec.kv.key_dim)), BV=max(16, pow2(spec.kv.value_dim)),
        FIRST=plan.first is not None, WINDOW=spec.window != 0, SOFTCAP=spec.softcap > 0,
        SINKS=spec.sinks is not None, ALIBI=spec.alibi is not None, TREE=roots is not None, MIXED=mixed,
        SPLIT=splits > 1, **kinds_of(kv), WIDE=INTERPRETED or q.dtype == torch.float32,
        STAGES=stages, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip


def share_keys(
    units: tuple[int, int], rows: int, block_n: int, spec: AttentionSpec, ctx: ForwardContext, scratch: Scratch
) -> tuple[int, Partial | None]:
    """How many programs share the keys of each tile of rows, and where they leave their parts. A few new tokens after
    many others, as drafts or a next question are, would have most multiprocessors wait else. units: tiles, and how many
    of them have queries at the most."""
    plan = ctx.groups[spec.group]
    longest = plan.tables.shape[1] * ctx.block_size
    if spec.window > 0:
        longest = min(longest, spec.window + ctx.max_query)
    elif spec.window < 0:
        longest = min(longest, -spec.window)
    every, busy = units
    room = scratch.floats // (every * rows * (spec.kv.value_dim + 2))
    places = 4 * busy if INTERPRETED else multiprocessors()
    splits = programs_for_a_tile(places // busy, room, longest // (_LEAST * block_n))
    if splits == 1 or every > scratch.num_counters:
        return 1, None
    return splits, parts_of(scratch, every * splits * rows * spec.kv.value_dim, ctx.kv_len.device)


def fitting(
    config: tuple[int, int, int, int], spec: AttentionSpec, size: int, room: int, asynchronous: bool = False
) -> tuple[int, int, int, int]:
    """The config, cut until it fits a device with so much shared memory; size: bytes of a query's number.

    Follows from what was compiled: queries, scores, every second stage a tile of keys and values; a wide result passes
    through shared memory in float32 on Hopper. Asynchronous products (64 rows in 16 bits) hold one tile more, which is
    still read while the next one comes. Nothing of the batch counts, so steady tiles stay steady."""
    width, values = max(16, pow2(spec.kv.key_dim)), max(16, pow2(spec.kv.value_dim))
    rows, block_n, warps, stages = config
    while True:
        held = max(1, stages // 2) + (asynchronous and size == 2 and rows >= 64)
        tiles = held * block_n * (width + values)
        taken = max(size * (rows * (width + block_n) + tiles), rows * (size * width + 4 * values)) + 1024
        if taken <= room or (stages, block_n, rows) == (2, 16, 16):
            return rows, block_n, warps, stages
        if stages > 3:
            stages = 3
        elif rows > 32:
            rows //= 2
        elif block_n > 32:
            block_n //= 2
        elif stages > 2:
            stages = 2
        elif rows > 16:
            rows //= 2
        else:
            block_n //= 2


STEADY = (32, 32, 4, 1) if INTERPRETED else (64, 64, 4, 3)
"""Small tiles: decode steps run them, too."""


def prefill_config(spec: AttentionSpec, plan: GroupPlan, longest: int) -> tuple[int, int, int, int]:
    """(rows, BN, warps, stages): measured on an H200. Long chunks come here if their keys cannot be gathered; where
    there are merely too many of them, the shorter chunks' kernel serves, which is compiled by then. A few tokens of a
    row, drafts say, wait for each tile of keys: they take large ones."""
    width = max(spec.kv.key_dim, spec.kv.value_dim)
    if INTERPRETED:
        return 32, 32, 4, 1
    if width > 128:
        return (64 if width <= 256 else 32), 32, 4, 2
    if longest * pow2(spec.heads // spec.kv.heads) <= 32:
        return 32, 128, 4, 3
    never_gathered = plan.first is not None or spec.window != 0 or spec.alibi is not None
    return (256, 64, 8, 5) if longest >= 2048 and never_gathered else (128, 64, 8, 5)
