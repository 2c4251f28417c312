"""Attention of one new token per sequence. Owns: splitting a sequence's keys over programs, and joining their parts.

A program serves all query heads of one key/value head (they share what it reads) over one split of one sequence. The
last program of a (sequence, head) to finish joins the parts, in order, so no second launch is needed.
Fresh: q, k and v come as the product left them; the program norms and rotates them, stores the new key, and reads the
older keys before it waits for that product. Else `prepare.py` has done so. A prefix that all sequences share can be
left to `shared.py`: its parts come first, and splits begin behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.core.forward import AttentionSpec, ForwardContext
from tokenmill.kernels.triton.attention.narrow_keys import fold_pairs, in_pairs, joined, kind_of, split_query
from tokenmill.kernels.triton.attention.paging import FLOOR, LOG2E, bend, locate, product, rounded
from tokenmill.kernels.triton.attention.prepare import rotated, scale_strides
from tokenmill.kernels.triton.common import INTERPRETED, Scratch, begin, pow2, prefetch, wait
from tokenmill.kernels.triton.quantised.narrow_words import bfloat_at


@triton.jit
def _tile(
    index, high, keys, values, key_scales, value_scales, table, first, entries, kv_len, query_position, d, v,
    key_block, key_row, value_block, value_row, scale_block, scale_row, window,
    D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Keys [BD, BN] and values [BN, BV] of these indexes, their scales [BN], positions, and which are seen.
    SCALED: D, DV and all strides count pairs of numbers."""
    block, offset, position, known = locate(index, table, first, entries, kv_len, SIZE, FIRST)
    seen = known & (index < high)
    if WINDOW:
        seen = seen & (query_position - position < window)
    k = tl.load(
        keys + block[None, :] * key_block + offset[None, :] * key_row + d[:, None],
        mask=seen[None, :] & (d < D)[:, None], other=0.0,
    )  # fmt: skip
    # Values of unseen keys are zeros, not leftovers: 0 * NaN would leak.
    val = tl.load(
        values + block[:, None] * value_block + offset[:, None] * value_row + v[None, :],
        mask=seen[:, None] & (v < DV)[None, :], other=0.0,
    )  # fmt: skip
    k_scale = 1.0
    v_scale = 1.0
    if SCALED:
        spot = block * scale_block + offset * scale_row
        k_scale = bfloat_at(key_scales, spot, seen)
        v_scale = bfloat_at(value_scales, spot, seen)
    return k, val, k_scale, v_scale, position, seen


@triton.jit
def _fold(
    acc, top, total, q, k, val, position, seen, query_position, slope, scale, softcap,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running result."""
    scores = product(q, k, tl.zeros((q.shape[0], k.shape[1]), dtype=tl.float32), WIDE)
    scores = bend(scores, query_position, position[None, :], slope, scale, softcap, SOFTCAP, ALIBI)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    acc = product(p.to(q.dtype), val, acc * shrink[:, None], WIDE)
    return acc, new_top, total


@triton.jit(do_not_specialize=["table_stride", "q_stride"])
def _decode_kernel(
    q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
    table_ptr, first_ptr, entries_ptr, start_ptr, len_ptr, shared_ptr, slot_ptr,
    sink_ptr, slope_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, out_ptr, part_ptr, top_ptr, count_ptr,
    q_stride, table_stride, key_block, key_head, key_row, value_block, value_head, value_row,
    scale_block, scale_head, scale_row, scale, softcap, window, q_eps, k_eps,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    SPLITS: tl.constexpr, BEFORE: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
    FIRST: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    MIXED: tl.constexpr, FRESH: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    Q_OFFSET: tl.constexpr, K_OFFSET: tl.constexpr, ROPE: tl.constexpr, START: tl.constexpr, DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr, NEAR: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    SCALED: tl.constexpr = KIND is not None
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    # Lengths and tables are older than the embedding, an ordinary launch: they need no waiting for.
    query = seq.to(tl.int64)
    if MIXED:
        query = tl.load(start_ptr + seq).to(tl.int64)
        count = tl.load(start_ptr + seq + 1) - query
    kv_len = tl.load(len_ptr + seq)
    query_position = kv_len - 1
    if FRESH:
        kv_len = query_position  # the newest key is not in the cache yet
    end = kv_len
    entries = 0
    if FIRST:
        entries = tl.load(entries_ptr + seq)
        end = entries * SIZE
    begin_at = 0
    if BEFORE > 0:
        wait(PDL)
        begin_at = tl.load(shared_ptr).to(tl.int32) * SIZE
    if WINDOW and not FIRST:
        begin_at = tl.maximum(begin_at, (query_position - window + 1) // BN * BN)
        begin_at = tl.maximum(begin_at, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(end - begin_at, BN), SPLITS), LEAST) * BN
    # Short sequences need fewer splits than there are programs.
    active = tl.minimum(SPLITS, tl.maximum(tl.cdiv(end - begin_at, tl.maximum(chunk, 1)), 1))
    low = begin_at + split * chunk
    high = tl.minimum(low + chunk, end)
    if split == active - 1:
        high = end
    table = table_ptr + seq.to(tl.int64) * table_stride
    first = first_ptr
    if FIRST:
        first = first_ptr + seq.to(tl.int64) * table_stride
    keys = key_ptr + kv_head.to(tl.int64) * key_head
    values = value_ptr + kv_head.to(tl.int64) * value_head
    key_scales = key_scale_ptr
    value_scales = value_scale_ptr
    if SCALED:
        key_scales += kv_head.to(tl.int64) * scale_head
        value_scales += kv_head.to(tl.int64) * scale_head
    row = tl.arange(0, BH)
    real = row < GROUP
    head = kv_head * GROUP + row
    d = tl.arange(0, BD)
    v = tl.arange(0, BV)
    n = tl.arange(0, BN)
    # Of a key in 8 bits, pairs are read: half as many, twice as wide.
    PAIR: tl.constexpr = 2 if SCALED else 1
    pair_d = tl.arange(0, BD // PAIR)
    pair_v = tl.arange(0, BV // PAIR)
    if FRESH:
        # All keys in the cache are older than this step: load the first ones, bring the following near.
        k, val, k_scale, v_scale, position, seen = _tile(
            low + n, high, keys, values, key_scales, value_scales, table, first, entries, kv_len, query_position,
            pair_d, pair_v, key_block, key_row, value_block, value_row, scale_block, scale_row, window,
            D // PAIR, DV // PAIR, SIZE, FIRST, WINDOW, SCALED,
        )  # fmt: skip
        slot = tl.load(slot_ptr + seq)
    if PDL and BEFORE == 0:
        line = tl.arange(0, LINES)[None, :] * LINE
        for tile in tl.static_range(NEAR):
            early = low + (tile + FRESH) * BN + n
            early = tl.maximum(tl.minimum(early, tl.minimum(high, end) - 1), 0)
            block, offset, _, _ = locate(early, table, first, entries, kv_len, SIZE, FIRST)
            prefetch(keys + (block * key_block + offset * key_row)[:, None] + line)
            prefetch(values + (block * value_block + offset * value_row)[:, None] + line)
    wait(PDL)
    if split >= active:
        return
    if MIXED:
        if count != 1:
            return  # the other kernel's

    slope = tl.zeros((BH,), dtype=tl.float32)
    if ALIBI:
        slope = tl.load(slope_ptr + head, mask=real, other=0.0).to(tl.float32)
    acc = tl.zeros((BH, BV // PAIR), dtype=tl.float32)
    odd = tl.zeros((BH, BV // PAIR), dtype=tl.float32)
    top = tl.full((BH,), FLOOR, dtype=tl.float32)
    total = tl.zeros((BH,), dtype=tl.float32)
    if FRESH:
        KV: tl.constexpr = H // GROUP
        source = q_ptr + query * q_stride
        at_position = query_position.to(tl.int64)
        q = rotated(source + head[:, None] * D, q_norm_ptr, cos_ptr, sin_ptr, at_position, real[:, None], d, q_eps,
                    D, Q_NORM, Q_OFFSET, ROPE, START, DIM, INTERLEAVED).to(q_ptr.dtype.element_ty)  # fmt: skip
        one = tl.arange(0, 1)[:, None]
        new_key = rotated(source + (H + kv_head) * D + one, k_norm_ptr, cos_ptr, sin_ptr, at_position, one == 0, d,
                          k_eps, D, K_NORM, K_OFFSET, ROPE, START, DIM, INTERLEAVED)  # fmt: skip
        new_value = tl.load(source + (H + KV) * D + kv_head * DV + one + v[None, :], mask=(v < DV)[None, :], other=0.0)
        new_key_scale = 1.0
        new_value_scale = 1.0
        if SCALED:
            new_key = tl.where((d < D)[None, :], new_key.to(q_ptr.dtype.element_ty).to(tl.float32), 0.0)
            new_key, a_scale = rounded(new_key, KIND)
            new_value, b_scale = rounded(new_value.to(tl.float32), KIND)
            new_key_scale = tl.sum(a_scale.to(tl.float32))
            new_value_scale = tl.sum(b_scale.to(tl.float32))
        else:
            new_key = new_key.to(key_ptr.dtype.element_ty)
            new_value = new_value.to(value_ptr.dtype.element_ty)
        if split == active - 1:
            spot = keys + slot // SIZE * key_block + slot % SIZE * key_row
            spot_v = values + slot // SIZE * value_block + slot % SIZE * value_row
            if SCALED:
                spot = spot.to(tl.pointer_type(KIND))
                spot_v = spot_v.to(tl.pointer_type(KIND))
            tl.store(spot + d[None, :] + one, new_key, mask=(d < D)[None, :])
            tl.store(spot_v + v[None, :] + one, new_value, mask=(v < DV)[None, :])
            if SCALED:
                spot_s = slot // SIZE * scale_block + slot % SIZE * scale_row
                tl.store(key_scales + spot_s, new_key_scale.to(key_scale_ptr.dtype.element_ty))
                tl.store(value_scales + spot_s, new_value_scale.to(key_scale_ptr.dtype.element_ty))
    else:
        q = tl.load(
            q_ptr + query * q_stride + head[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
        )
    if SCALED:
        q_even, q_odd, most = split_query(q, BH, BD)
    if FRESH:
        if SCALED:
            acc, odd, top, total = fold_pairs(
                acc, odd, top, total, q_even, q_odd, most, k, val, k_scale, v_scale, position, seen, query_position,
                slope, scale, softcap, SOFTCAP, ALIBI, KIND, WIDE,
            )  # fmt: skip
        else:
            acc, top, total = _fold(acc, top, total, q, k, val, position, seen, query_position, slope, scale, softcap,
                                    SOFTCAP, ALIBI, WIDE)  # fmt: skip
    for at in tl.range(low + FRESH * BN, high, BN, num_stages=STAGES):
        k, val, k_scale, v_scale, position, seen = _tile(
            at + n, high, keys, values, key_scales, value_scales, table, first, entries, kv_len, query_position,
            pair_d, pair_v, key_block, key_row, value_block, value_row, scale_block, scale_row, window,
            D // PAIR, DV // PAIR, SIZE, FIRST, WINDOW, SCALED,
        )  # fmt: skip
        if SCALED:
            acc, odd, top, total = fold_pairs(
                acc, odd, top, total, q_even, q_odd, most, k, val, k_scale, v_scale, position, seen, query_position,
                slope, scale, softcap, SOFTCAP, ALIBI, KIND, WIDE,
            )  # fmt: skip
        else:
            acc, top, total = _fold(acc, top, total, q, k, val, position, seen, query_position, slope, scale, softcap,
                                    SOFTCAP, ALIBI, WIDE)  # fmt: skip
    if SCALED:
        acc = joined(acc, odd, BH, BV)
    if FRESH:
        if split == active - 1:
            newest = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), axis=1) * new_key_scale
            newest = bend(newest, 0, 0, slope, scale, softcap, SOFTCAP, False)
            higher = tl.maximum(top, newest)
            weight = tl.exp2(newest - higher)
            total = total * tl.exp2(top - higher) + weight
            acc = acc * tl.exp2(top - higher)[:, None]
            acc += (weight * new_value_scale).to(q.dtype).to(tl.float32)[:, None] * new_value.to(tl.float32)
            top = higher

    last = True
    if PARTS > 1:
        # Parts of one sequence and head lie together: [PARTS, GROUP, DV], their maxima and sums beside them.
        unit = seq * tl.num_programs(1) + kv_head
        origin = unit.to(tl.int64) * PARTS * GROUP
        if SPLITS == 1:
            # Nobody else works on this: join the shared parts right here.
            for other in tl.static_range(BEFORE):
                place = origin + other * GROUP + row
                their_top = tl.load(top_ptr + place * 2, mask=real, other=FLOOR)
                theirs = tl.load(top_ptr + place * 2 + 1, mask=real, other=0.0)
                part = tl.load(
                    part_ptr + place[:, None] * DV + v[None, :],
                    mask=(real & (theirs != 0.0))[:, None] & (v < DV)[None, :],
                    other=0.0,
                )
                new_top = tl.maximum(top, their_top)
                old, new = tl.exp2(top - new_top), tl.exp2(their_top - new_top)
                total = total * old + tl.where(theirs == 0.0, 0.0, theirs * new)
                acc = acc * old[:, None] + part * new[:, None]
                top = new_top
        elif BEFORE + active > 1:
            place = origin + (BEFORE + split) * GROUP + row
            tl.store(
                part_ptr + place[:, None] * DV + v[None, :],
                acc,
                mask=real[:, None] & (v < DV)[None, :],
                cache_modifier=".cg",
            )
            tl.store(top_ptr + place * 2, top, mask=real, cache_modifier=".cg")
            tl.store(top_ptr + place * 2 + 1, total, mask=real, cache_modifier=".cg")
            tl.debug_barrier()
            last = tl.atomic_add(count_ptr + unit, 1, sem="acq_rel") == active - 1
            if last:
                tl.store(count_ptr + unit, 0)
                parts = BEFORE + active
                every = tl.arange(0, PARTS_BLOCK)
                spots = origin + every[:, None] * GROUP + row[None, :]
                there = (every < parts)[:, None] & real[None, :]
                tops = tl.load(top_ptr + spots * 2, mask=there, other=FLOOR, cache_modifier=".cg")
                totals = tl.load(top_ptr + spots * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                top = tl.max(tops, axis=0)
                # A part without keys left no values; NaN sums must stay, so ask for zero, not for "greater".
                total = tl.sum(tl.where(totals == 0.0, 0.0, totals * tl.exp2(tops - top[None, :])), axis=0)
                acc = tl.zeros((BH, BV), dtype=tl.float32)
                for other in tl.range(0, parts, loop_unroll_factor=4):
                    place = origin + other * GROUP + row
                    their_top = tl.load(top_ptr + place * 2, mask=real, other=FLOOR, cache_modifier=".cg")
                    theirs = tl.load(top_ptr + place * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
                    part = tl.load(
                        part_ptr + place[:, None] * DV + v[None, :],
                        mask=(real & (theirs != 0.0))[:, None] & (v < DV)[None, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    acc += part * tl.exp2(their_top - top)[:, None]
    if last:
        if SINKS:
            sink = tl.load(sink_ptr + head, mask=real, other=FLOOR).to(tl.float32) * LOG2E
            new_top = tl.maximum(top, sink)
            total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
            acc = acc * tl.exp2(top - new_top)[:, None]
        y = acc / tl.where(real, total, 1.0)[:, None]
        target = out_ptr + query * H * DV + head[:, None] * DV + v[None, :]
        tl.store(target, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & (v < DV)[None, :])


def attend_one(
    q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext, scratch: Scratch, *,
    pdl: bool, mixed: bool = False, fresh: bool = False, before: int = 0, shared: Tensor | None = None,
    config: tuple[int, int, int, int, int, int] | None = None,
) -> None:  # fmt: skip
    """q [T, H, Dk] -> out [T, H * Dv], for the sequences with one new token.

    fresh: q is [T, all heads] as the product left it, and each sequence has one new token, whose key is stored here.
    before: parts that `shared.py` has put in front, for the first `shared` table entries.
    config (most splits, BN, warps, stages, tiles to bring near, least tiles of a split)."""
    kv, plan, rope = ctx.kv[spec.layer], ctx.groups[spec.group], spec.rope
    seqs, heads = plan.tables.shape[0], spec.kv.heads
    group = spec.heads // heads
    longest = plan.tables.shape[1] * ctx.block_size
    cut = config or decode_config(seqs * heads, longest, spec, mixed=mixed, eight=kv.key_scale is not None)
    splits, block_n, warps, stages, near, least = cut
    room = scratch.floats // (seqs * spec.heads * (spec.kv.value_dim + 2))
    splits = max(1, min(splits, room - before))
    parts = before + splits
    assert parts == 1 or room >= parts, "a prefix is shared only where its parts fit"
    assert seqs * heads <= scratch.num_counters
    keys, values, least_width, kind = kv.key, kv.value, 16, kind_of(kv)
    if kind is not None:
        keys, values, least_width = in_pairs(keys), in_pairs(values), 32
    line = 128 // keys.element_size()
    partial = scratch.partial(q.device)
    tops = partial[seqs * spec.heads * parts * spec.kv.value_dim :] if parts > 1 else partial
    q_norm, k_norm = (spec.q_norm, spec.k_norm) if fresh else (None, None)
    _decode_kernel[(seqs, heads, splits)](
        q, keys, values, kv.key_scale, kv.value_scale,
        plan.tables, plan.first, plan.entries, ctx.query_start, ctx.kv_len, shared,
        plan.slots if fresh else None, spec.sinks, spec.alibi,
        None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
        rope.cos if fresh and rope else None, rope.sin if fresh and rope else None,
        out, partial, tops, scratch.counters(q.device),
        q.stride(0), plan.tables.stride(0), *keys.stride()[:3], *values.stride()[:3],
        *scale_strides(kv), spec.scale, spec.softcap, spec.window,
        0.0 if q_norm is None else q_norm.eps, 0.0 if k_norm is None else k_norm.eps,
        H=spec.heads, GROUP=group, D=spec.kv.key_dim, DV=spec.kv.value_dim, SIZE=ctx.block_size,
        BH=max(16, pow2(group)), BN=block_n,
        BD=max(least_width, pow2(spec.kv.key_dim)), BV=max(least_width, pow2(spec.kv.value_dim)),
        SPLITS=splits, BEFORE=before, PARTS=parts, PARTS_BLOCK=pow2(parts),
        FIRST=plan.first is not None, WINDOW=spec.window > 0, SOFTCAP=spec.softcap > 0,
        SINKS=spec.sinks is not None, ALIBI=spec.alibi is not None, MIXED=mixed, FRESH=fresh,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        Q_OFFSET=0.0 if q_norm is None else q_norm.offset, K_OFFSET=0.0 if k_norm is None else k_norm.offset,
        ROPE=fresh and rope is not None, START=rope.start if fresh and rope else 0,
        DIM=rope.dim if fresh and rope else 0, INTERLEAVED=fresh and rope is not None and rope.interleaved,
        KIND=kind, WIDE=INTERPRETED or q.dtype == torch.float32, STAGES=stages,
        LINE=line, LINES=pow2(max(1, min(keys.shape[3], values.shape[3]) // line) + 1) // 2,
        NEAR=near, LEAST=least, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip


def early_keys(units: int) -> bool:
    """Does it pay to keep the first keys in registers before the new ones exist? (It halves how many programs fit.)"""
    return units <= 64 or 128 < units <= 256


def decode_config(
    units: int, longest: int, spec: AttentionSpec, *, mixed: bool = False, eight: bool = False, beside: bool = False
) -> tuple[int, int, int, int, int, int]:
    """(most splits, BN, warps, stages, tiles to bring near, least tiles of a split) for `units` = sequences *
    key/value heads: measured on an H200. eight: keys are stored in 8 bits; beside: a shared prefix is read elsewhere.

    Powers of two keep the kernels few that must be compiled. Tables are looked up one pipeline stage before keys are
    loaded: five stages hold two tiles of keys."""
    width = spec.kv.key_dim + spec.kv.value_dim
    block_n = 64 if width <= 256 else 32
    if mixed:  # beside prefills it matters little: two kernels, which the engine compiles when it starts
        return (4 if units <= 512 else 1), block_n, 4, 3, 1, 1
    if eight and units > 128:
        # Unpacking is work: small tiles of few warps, of which many run at once.
        return (1, 32, 1, 5, 1, 1) if units >= 1024 else (1, block_n, 2 if units > 256 else 4, 5, 1, 1)
    if units >= 1024 and beside:  # what is left is short: many small programs at once
        return 1, min(block_n, 32), 2, 3, 1, 1
    if units >= 1024:
        return 1, block_n, 2, 5, 1, 1
    if 128 < units <= 256:
        return 1, block_n, 8, 3, 2, 1
    splits = 16 if units < 64 else 8
    while splits > 1 and (splits * units > (1056 if units < 256 else 528) or splits * block_n > 2 * longest):
        splits //= 2
    return (splits, min(block_n, 32), 8, 3, 0, 1) if units <= 64 else (splits, block_n, 4, 3, 1, 1)
