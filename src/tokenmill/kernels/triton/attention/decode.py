"""Attention of one new token per sequence. Owns: splitting a sequence's keys over programs, and joining their parts.

A program serves all query heads of one key/value head (they share what it reads) over one split of one sequence. The
last program of a (sequence, head) to finish joins the parts, in order, so no second launch is needed.
Fresh: q, k and v come as the product left them; the program norms and rotates them, stores the new key, and reads the
older keys before it waits for that product. Else `prepare.py` has done so. A prefix that all sequences share can be
left to `cascade.py`: its parts come first, and splits begin behind it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, Touches
from tokenmill.kernels.triton.attention.decode_records import (
    Bends,
    Cut,
    Epsilons,
    Pages,
    Partial,
    Plan,
    Seen,
    Shape,
    Strides,
    Turns,
)
from tokenmill.kernels.triton.attention.narrow_keys import (
    fold_words,
    in_words,
    joined,
    no_values,
    scales_at,
    split_query,
)
from tokenmill.kernels.triton.attention.paging import FLOOR, bend, locate, path_of, path_parts, reach
from tokenmill.kernels.triton.attention.partial import finish, join_all, join_shared, leave_part
from tokenmill.kernels.triton.attention.prepare import (
    Way,
    epsilons,
    rotated,
    touched_values,
    value_start,
    ways,
    weights,
)
from tokenmill.kernels.triton.attention.stored import columns, kinds_of, put, scale_strides, scales_of
from tokenmill.kernels.triton.common import INTERPRETED, Scratch, begin, pow2, prefetch, product, wait

UNIT = 8
"""Words of narrow numbers that addresses step by, where strides allow it: the 16 bytes that are copied at a time."""
SMALL_FROM = 16
"""Sequences times heads beyond which narrow keys are read by small programs: one warp takes half as many instructions
for a key as four."""
_MOST_SPLITS = 32
MOST_UNITS = 1 << 31
"""Units that are counted in 32 bits. (Addresses took a third of the instructions in numbers of 64 bits.)"""
WIDE_HEAD = 256
"""Numbers of a key and its value beyond which heads are wide."""
REGISTERS = 192
"""Of a thread of one warp that reads narrow numbers: ten such programs run beside each other, and little is spilled."""


@triton.jit
def _load_tile(
    at, n, high, here, strides, table, first, entries, kv_len, path, query_position, window,
    SHAPE: tl.constexpr, SEEN: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
):  # fmt: skip
    """Keys [BD, BN] and values [BN, BV] of indexes at + n, their scales [BN], positions, and which are seen.
    Narrow ones are loaded as words: of several numbers, and that many fewer."""
    keys, values, key_scales, value_scales = here
    D: tl.constexpr = SHAPE.D // K_KIND.PER
    DV: tl.constexpr = SHAPE.DV // V_KIND.PER
    d = tl.arange(0, SHAPE.BD // K_KIND.PER)
    v = tl.arange(0, SHAPE.BV // V_KIND.PER)
    # Plain keys are not bound by instructions, and registers for what stays the same would be missed.
    ALIGNED: tl.constexpr = K_KIND.PER > 1 and SHAPE.BN % SHAPE.SIZE == 0
    block, offset, position, known = locate(
        at, n, table, first, entries, kv_len, path, SHAPE.SIZE, SEEN.FIRST, SEEN.TREE, ALIGNED
    )
    seen = known & (at + n < high)
    if SEEN.WINDOW:
        seen = seen & (query_position - position < window)
    UNIT: tl.constexpr = SHAPE.UNIT
    page = block.to(SHAPE.INDEX)  # a block's number fits
    spot = page * strides.key_block + offset * strides.key_row
    spot = (spot[None, :] + (d // UNIT)[:, None]).to(tl.int64) * UNIT + (d % UNIT)[:, None]
    k = tl.load(keys + spot, mask=seen[None, :] & (d < D)[:, None], other=0.0)
    # Values of unseen keys are zeros, not leftovers: 0 * NaN would leak.
    spot = page * strides.value_block + offset * strides.value_row
    spot = (spot[:, None] + (v // UNIT)[None, :]).to(tl.int64) * UNIT + (v % UNIT)[None, :]
    val = tl.load(values + spot, mask=seen[:, None] & (v < DV)[None, :], other=0.0)
    k_scales = scales_at(
        key_scales, block * strides.key_scale_block + offset * strides.key_scale_row, seen, K_KIND
    )  # fmt: skip
    v_scales = scales_at(
        value_scales, block * strides.value_scale_block + offset * strides.value_scale_row, seen, V_KIND
    )  # fmt: skip
    return k, val, k_scales, v_scales, position, seen


@triton.jit
def _bring_near(low, high, here, strides, table, first, entries, kv_len,
                SHAPE: tl.constexpr, CUT: tl.constexpr, FIRST: tl.constexpr, SKIP: tl.constexpr):  # fmt: skip
    """Ask for the keys and values of the first tiles from `low` on, but for SKIP that are loaded already."""
    keys, values = here[0], here[1]
    n = tl.arange(0, SHAPE.BN)
    line = tl.arange(0, CUT.LINES)[None, :] * CUT.LINE
    NEAR: tl.constexpr = CUT.NEAR
    for tile in tl.static_range(NEAR):
        early = low + (tile + SKIP) * SHAPE.BN + n
        early = tl.maximum(tl.minimum(early, high - 1), 0)
        block, offset, _, _ = locate(0, early, table, first, entries, kv_len, (0, 0), SHAPE.SIZE, FIRST, False, False)
        prefetch(keys + ((block * strides.key_block + offset * strides.key_row) * SHAPE.UNIT)[:, None] + line)
        prefetch(values + ((block * strides.value_block + offset * strides.value_row) * SHAPE.UNIT)[:, None] + line)


@triton.jit
def _extent(seq, split, end, kv_len, query_position, window, plan, SHAPE: tl.constexpr, CUT: tl.constexpr,
            SEEN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Which indexes this split reads, and how many splits the sequence needs: short ones fewer than there are."""
    begin_at = 0
    if CUT.BEFORE > 0:
        wait(PDL)
        begin_at = tl.load(plan.shared).to(tl.int32) * SHAPE.SIZE
    if SEEN.WINDOW and not SEEN.FIRST:
        begin_at = tl.maximum(begin_at, (query_position - window + 1) // SHAPE.BN * SHAPE.BN)
        begin_at = tl.maximum(begin_at, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(end - begin_at, SHAPE.BN), CUT.SPLITS), CUT.LEAST) * SHAPE.BN
    active = tl.minimum(CUT.SPLITS, tl.maximum(tl.cdiv(end - begin_at, tl.maximum(chunk, 1)), 1))
    low = begin_at + split * chunk
    high = tl.minimum(low + chunk, end)
    if split == active - 1:
        high = end
    return low, high, active


@triton.jit
def _new_heads(
    source, kv_head, head, real, query_position, turns, eps, like, here, strides, slot, stores,
    SHAPE: tl.constexpr, Q_WAY: tl.constexpr, K_WAY: tl.constexpr, V_WAY: tl.constexpr, V_START: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr,
):  # fmt: skip
    """The product's heads at `source`: q [BH, BD], and the newest key [1, BD] and value [1, BV] as they will be read,
    which this program stores, or another one."""
    D: tl.constexpr = SHAPE.D
    H: tl.constexpr = SHAPE.H
    DV: tl.constexpr = SHAPE.DV
    SIZE: tl.constexpr = SHAPE.SIZE
    d = columns(SHAPE.BD, D, K_KIND.GROUPS)
    v = columns(SHAPE.BV, DV, V_KIND.GROUPS)
    at_position = query_position.to(tl.int64)
    q = rotated(source + head[:, None] * D, head[:, None], turns.q_norm, turns.cos, turns.sin, turns.temper,
                at_position, real[:, None], d, eps.q, D, Q_WAY).to(like)  # fmt: skip
    one = tl.arange(0, 1)
    key = rotated(source + (H + kv_head) * D + one[:, None], kv_head + one[:, None], turns.k_norm, turns.cos, turns.sin,
                  turns.temper, at_position, (one == 0)[:, None], d, eps.k, D, K_WAY)  # fmt: skip
    inside = (one == 0)[:, None] & (v < DV)[None, :]
    value = tl.load(source + V_START + kv_head * DV + one[:, None] + v[None, :], mask=inside, other=0.0)
    value = touched_values(
        value.to(tl.float32), inside, turns.v_norm, kv_head + one[:, None], v, eps.v, like, DV, V_WAY
    )
    keys, values, key_scales, value_scales = here
    block, row = slot // SIZE, slot % SIZE
    stores = stores & (one == 0)
    spot = (block * strides.key_block + row * strides.key_row) * SHAPE.UNIT
    key = put(key.to(like).to(tl.float32), stores, keys + spot + one,
              key_scales + block * strides.key_scale_block + row * strides.key_scale_row + one,
              K_KIND, 1, SHAPE.BD, D)  # fmt: skip
    spot = (block * strides.value_block + row * strides.value_row) * SHAPE.UNIT
    value = put(value, stores, values + spot + one,
                value_scales + block * strides.value_scale_block + row * strides.value_scale_row + one,
                V_KIND, 1, SHAPE.BV, DV)  # fmt: skip
    return q, key.to(like), value.to(like)


@triton.jit
def _fold(
    sums, top, total, q, asked, k, val, k_scales, v_scales, position, seen, query_position, slope, scale, softcap,
    SEEN: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running sums; asked: the query as narrow keys are unpacked."""
    if K_KIND.PER > 1:
        sums, top, total = fold_words(
            sums, top, total, asked, k, val, k_scales, v_scales, position, seen, query_position,
            slope, scale, softcap, SEEN.SOFTCAP, SEEN.ALIBI, K_KIND, V_KIND, WIDE,
        )  # fmt: skip
    else:
        scores = product(q, k, tl.zeros((q.shape[0], k.shape[1]), dtype=tl.float32), WIDE)
        scores = bend(scores, query_position, position[None, :], slope, scale, softcap, SEEN.SOFTCAP, SEEN.ALIBI)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        sums = (product(p.to(q.dtype), val, sums[0] * shrink[:, None], WIDE),)
        top = new_top
    return sums, top, total


@triton.jit
def _fold_newest(acc, top, total, q, key, value, slope, scale, softcap, SOFTCAP: tl.constexpr):
    """Take the newest key into the result: it is at distance 0, and nothing hides it."""
    newest = tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1)
    newest = bend(newest, 0, 0, slope, scale, softcap, SOFTCAP, False)
    higher = tl.maximum(top, newest)
    weight = tl.exp2(newest - higher)
    total = total * tl.exp2(top - higher) + weight
    acc = acc * tl.exp2(top - higher)[:, None]
    acc += weight.to(q.dtype).to(tl.float32)[:, None] * value.to(tl.float32)
    return acc, higher, total


@triton.jit(do_not_specialize=["table_stride", "places_stride", "q_stride"])
def _decode_kernel(
    q_ptr, pages, plan, bends, turns, out_ptr, partial, q_stride, table_stride, places_stride, strides, scale, softcap,
    window, eps,
    SHAPE: tl.constexpr, CUT: tl.constexpr, SEEN: tl.constexpr, FRESH: tl.constexpr, V_START: tl.constexpr,
    Q_WAY: tl.constexpr, K_WAY: tl.constexpr, V_WAY: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    MIXED: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FRESH: q_ptr is the product, whose values begin at V_START, and the newest key is stored here; MIXED: some
    sequences have more new tokens."""
    begin(PDL)
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    # Short sequences leave the last parts empty: their programs come first and go, while the kernel before ends.
    split = CUT.SPLITS - 1 - tl.program_id(2)
    # Lengths and tables are older than an ordinary launch, the embedding or a later stage's copy of its inbox
    # (runner/stage.py): they need no waiting for.
    query = seq.to(tl.int64)
    if MIXED:
        query = tl.load(plan.start + seq).to(tl.int64)
        count = tl.load(plan.start + seq + 1) - query
    kv_len = tl.load(plan.length + seq)
    query_position = kv_len - 1
    if SEEN.WINDOW:
        window = reach(query_position, window)
    if FRESH:
        kv_len = query_position  # the newest key is not in the cache yet
    end = kv_len
    entries = 0
    if SEEN.FIRST:
        entries = tl.load(plan.entries + seq)
        end = entries * SHAPE.SIZE
    low, high, active = _extent(seq, split, end, kv_len, query_position, window, plan, SHAPE, CUT, SEEN, PDL)
    table = plan.table + seq.to(tl.int64) * table_stride
    first = plan.first
    if SEEN.FIRST:
        first = plan.first + seq.to(tl.int64) * table_stride
    path = (0, 0)
    if SEEN.TREE:
        path = path_of(plan.roots, plan.places, seq, places_stride)
    keys = pages.key + kv_head.to(tl.int64) * strides.key_head * SHAPE.UNIT
    values = pages.value + kv_head.to(tl.int64) * strides.value_head * SHAPE.UNIT
    key_scales = pages.key_scale + kv_head.to(tl.int64) * strides.key_scale_head
    value_scales = pages.value_scale + kv_head.to(tl.int64) * strides.value_scale_head
    here = (keys, values, key_scales, value_scales)
    row = tl.arange(0, SHAPE.BH)
    real = row < SHAPE.GROUP
    head = kv_head * SHAPE.GROUP + row
    n = tl.arange(0, SHAPE.BN)
    v = columns(SHAPE.BV, SHAPE.DV, V_KIND.GROUPS)
    if FRESH:
        if split >= active:
            return  # without waiting: the first part of each sequence waits
        # All keys in the cache are older than this step: load the first ones, bring the following near.
        k, val, k_scales, v_scales, position, seen = _load_tile(
            low, n, high, here, strides, table, first, entries, kv_len, path, query_position, window,
            SHAPE, SEEN, K_KIND, V_KIND,
        )  # fmt: skip
        slot = tl.load(plan.slot + seq)
    if PDL and CUT.BEFORE == 0:
        _bring_near(low, tl.minimum(high, end), here, strides, table, first, entries, kv_len,
                    SHAPE, CUT, SEEN.FIRST, FRESH)  # fmt: skip
    wait(PDL)
    if split >= active:
        return
    if MIXED:
        if count != 1:
            return  # the other kernel's

    BH: tl.constexpr = SHAPE.BH
    slope = tl.zeros((BH,), dtype=tl.float32)
    if SEEN.ALIBI:
        slope = tl.load(bends.slope + head, mask=real, other=0.0).to(tl.float32)
    sums = no_values(BH, SHAPE.BV, V_KIND)
    top = tl.full((BH,), FLOOR, dtype=tl.float32)
    total = tl.zeros((BH,), dtype=tl.float32)
    if FRESH:
        q, new_key, new_value = _new_heads(
            q_ptr + query * q_stride, kv_head, head, real, query_position, turns, eps, q_ptr.dtype.element_ty,
            here, strides, slot, split == active - 1, SHAPE, Q_WAY, K_WAY, V_WAY, V_START, K_KIND, V_KIND,
        )  # fmt: skip
    else:
        d = columns(SHAPE.BD, SHAPE.D, K_KIND.GROUPS)
        q = tl.load(q_ptr + query * q_stride + head[:, None] * SHAPE.D + d[None, :],
                    mask=real[:, None] & (d < SHAPE.D)[None, :], other=0.0)  # fmt: skip
    asked = split_query(q, SHAPE.BH, SHAPE.BD, K_KIND, WIDE)
    if FRESH:
        sums, top, total = _fold(sums, top, total, q, asked, k, val, k_scales, v_scales, position, seen,
                                 query_position, slope, scale, softcap, SEEN, K_KIND, V_KIND, WIDE)  # fmt: skip
    for at in tl.range(low + FRESH * SHAPE.BN, high, SHAPE.BN, num_stages=CUT.STAGES):
        k, val, k_scales, v_scales, position, seen = _load_tile(
            at, n, high, here, strides, table, first, entries, kv_len, path, query_position, window,
            SHAPE, SEEN, K_KIND, V_KIND,
        )  # fmt: skip
        sums, top, total = _fold(sums, top, total, q, asked, k, val, k_scales, v_scales, position, seen,
                                 query_position, slope, scale, softcap, SEEN, K_KIND, V_KIND, WIDE)  # fmt: skip
    acc = joined(sums, SHAPE.BH, SHAPE.BV, V_KIND)
    if FRESH:
        if split == active - 1:
            acc, top, total = _fold_newest(acc, top, total, q, new_key, new_value, slope, scale, softcap, SEEN.SOFTCAP)

    last = True
    if CUT.PARTS > 1:
        unit = seq * tl.num_programs(1) + kv_head
        origin = unit.to(tl.int64) * CUT.PARTS * SHAPE.GROUP
        if CUT.SPLITS == 1:
            acc, top, total = join_shared(acc, top, total, origin, partial, row, real, v, SHAPE, CUT)
        elif CUT.BEFORE + active > 1:
            place = origin + (CUT.BEFORE + split) * SHAPE.GROUP + row
            last = leave_part(acc, top, total, place, unit, partial, real, v, active, SHAPE.DV)
            if last:
                acc, top, total = join_all(
                    origin, CUT.BEFORE + active, unit, partial, row, real, v,
                    SHAPE.GROUP, SHAPE.BH, SHAPE.BV, SHAPE.DV, CUT.PARTS_BLOCK,
                )  # fmt: skip
    if last:
        finish(acc, top, total, query, head, real, v, out_ptr, bends.sink, SHAPE, SEEN.SINKS)


def attend_one(
    q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext, scratch: Scratch, *,
    pdl: bool, mixed: bool = False, fresh: bool = False, before: int = 0, shared: Tensor | None = None,
    config: tuple[int, int, int, int, int, int] | None = None,
) -> None:  # fmt: skip
    """q [T, H, Dk] -> out [T, H * Dv], for the sequences with one new token.

    fresh: q is [T, all heads] as the product left it, and each sequence has one new token, whose key is stored here.
    before: parts that `cascade.py` has put in front, for the first `shared` table entries.
    config (most splits, BN, warps, stages, tiles to bring near, least tiles of a split)."""
    kv, plan, rope = ctx.kv[spec.layer], ctx.groups[spec.group], spec.rope
    seqs, heads = plan.tables.shape[0], spec.kv.heads
    group = spec.heads // heads
    longest = plan.tables.shape[1] * ctx.block_size
    cut = config or decode_config(seqs * heads, longest, spec, mixed=mixed, narrow=kv.key_scale is not None)
    splits, block_n, warps, stages, near, least = cut
    room = scratch.floats // (seqs * spec.heads * (spec.kv.value_dim + 2))
    splits = max(1, min(splits, room - before)) if seqs * heads <= scratch.num_counters else 1
    parts = before + splits
    assert parts == 1 or room >= parts, "a prefix is shared only where its parts fit"
    kinds, keys, values = kinds_of(kv), in_words(kv.key), in_words(kv.value)
    line = 128 // keys.element_size()
    partial = scratch.partial(q.device)
    tops = partial[seqs * spec.heads * parts * spec.kv.value_dim :] if parts > 1 else partial
    touches = spec.touches if fresh else Touches()
    if not fresh:
        rope = None
    lines = pow2(max(1, min(keys.shape[3], values.shape[3]) // line) + 1) // 2
    width, value_width = spec.kv.key_dim, spec.kv.value_dim
    q_way, k_way, v_way = ways(spec) if fresh else (Way(), Way(), Way())
    narrow, strides = kinds["K_KIND"].PER > 1, (*keys.stride()[:3], *values.stride()[:3])
    unit, index = _units(keys, values) if narrow else (1, tl.int64)
    _decode_kernel[(seqs, heads, splits)](
        q,
        Pages(keys, values, *scales_of(kv)),
        Plan(
            plan.tables, plan.first, plan.entries, ctx.query_start, ctx.kv_len, shared, plan.slots if fresh else None,
            *path_parts(plan.paths)[:2],
        ),
        Bends(spec.sinks, spec.alibi),
        Turns(
            *weights(touches), None if rope is None else rope.cos, None if rope is None else rope.sin, touches.temper
        ),
        out, Partial(partial, tops, scratch.counters(q.device)), q.stride(0), plan.tables.stride(0),
        path_parts(plan.paths)[2],
        Strides(*(stride // unit for stride in strides), *scale_strides(kv)),
        spec.scale, spec.softcap, spec.window,
        Epsilons(*epsilons(touches)),
        SHAPE=Shape(
            spec.heads, group, width, value_width, ctx.block_size,
            max(16, pow2(group)), block_n, max(16 * kinds["K_KIND"].PER, pow2(width)),
            max(16 * kinds["V_KIND"].PER, pow2(value_width)), unit, index,
        ),
        CUT=Cut(splits, before, parts, pow2(parts), least, stages, near, line, lines),
        SEEN=Seen(plan.first is not None, spec.window != 0, spec.softcap > 0, spec.sinks is not None,
                  spec.alibi is not None, plan.paths is not None),
        FRESH=fresh, V_START=value_start(spec) if fresh else 0, Q_WAY=q_way, K_WAY=k_way, V_WAY=v_way,
        **kinds, MIXED=mixed, WIDE=INTERPRETED or q.dtype == torch.float32, PDL=pdl,
        num_warps=warps, launch_pdl=pdl, maxnreg=REGISTERS if narrow and warps == 1 else None,
    )  # fmt: skip


def _units(keys: Tensor, values: Tensor) -> tuple[int, tl.dtype]:
    """What addresses of these pages step by, and the type that counts it."""
    unit = math.gcd(UNIT, *keys.stride()[:3], *values.stride()[:3])
    last = max(pages.shape[0] * pages.stride(0) for pages in (keys, values)) // unit
    return unit, tl.int32 if last < MOST_UNITS else tl.int64


def early_keys(units: int, *, wide: bool, narrow: bool) -> bool:
    """Does it pay to keep the first keys in registers before the new ones exist? It halves how many programs fit, and
    there are no registers for it where heads are wide, nor in programs of one warp, which unpack narrow keys."""
    if narrow:
        return units <= SMALL_FROM
    return not wide and (units <= 64 or 128 < units <= 256)


def is_wide(spec: AttentionSpec) -> bool:
    """Do a key and its value fill the registers of fewer programs? (Heads of 256 do.)"""
    return spec.kv.key_dim + spec.kv.value_dim > WIDE_HEAD


def decode_config(
    units: int, longest: int, spec: AttentionSpec, *, mixed: bool = False, narrow: bool = False, beside: bool = False
) -> tuple[int, int, int, int, int, int]:
    """(most splits, BN, warps, stages, tiles to bring near, least tiles of a split) for `units` = sequences *
    key/value heads: measured on an H200. narrow: keys are unpacked; beside: a shared prefix is read elsewhere.

    Powers of two keep the kernels few that must be compiled. Tables are looked up one pipeline stage before keys are
    loaded: five stages hold two tiles of keys."""
    width = spec.kv.key_dim + spec.kv.value_dim
    block_n = 64 if width <= WIDE_HEAD else 32
    if mixed:  # beside prefills it matters little: two kernels, which the engine compiles when it starts
        return (4 if units <= 512 else 1), block_n, 4, 3, 1, 1
    if width > WIDE_HEAD and not narrow and not beside:
        return _wide_config(units, longest, most=64 if width <= 512 else 32)
    if narrow and units > SMALL_FROM:
        # Unpacking is work: small tiles of few warps, of which many run at once.
        if units <= 512:
            splits = min(_MOST_SPLITS, 1 << (1320 // units).bit_length() - 1)
            return splits, 32, 1, 5, 1, 2 if units <= 64 else 4
        return (1, 32, 1, 5, 1, 1) if units >= 1024 else (1, block_n, 2, 5, 1, 1)
    if units >= 1024 and beside:  # what is left is short: many small programs at once
        return 1, min(block_n, 32), 2, 3, 1, 1
    if units >= 1024:
        return 1, block_n, 2, 5, 1, 1
    if 128 < units <= 256:  # only long sequences are split
        return 4, block_n, 8, 3, 2, 8
    splits = 16 if units < 64 else 8
    while splits > 1 and (splits * units > (1056 if units < 256 else 528) or splits * block_n > 2 * longest):
        splits //= 2
    many_warps = units <= (16 if width <= WIDE_HEAD else 64)
    return (splits, min(block_n, 32), 8, 3, 0, 1) if many_warps else (splits, block_n, 4, 3, 1, 1)


def _wide_config(units: int, longest: int, most: int) -> tuple[int, int, int, int, int, int]:
    """The same for heads of 256, whose keys are prepared in a launch of their own; most: keys of a tile."""
    if units > 256:
        return 1, 32, 4, 3, 1, 1
    if units > 128:  # only long sequences are split
        return 4, most, 8, 2, 0, 8
    if units > 64:
        return 4, 32, 4, 3, 1, 1
    splits, block_n, stages = (32, 32, 3) if units <= 8 else (8 if units <= 32 else 4, most, 2)
    while splits > 1 and splits * block_n > 2 * longest:
        splits //= 2
    return splits, block_n, 8, stages, 0, 1
