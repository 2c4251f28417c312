"""Attention over one small vector per token that all heads share (MLA, absorbed). Owns: storing and reading it, paged.

A vector is [latent | rotated key]; values are its latent part, so a tile is read once and multiplied twice. Rows of a
program are (query, head) pairs: all of them see the same keys. With one new token per sequence keys are split over
programs, and the last one of a (sequence, tile of heads) joins the parts in order. Must not know: projections.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext
from tokenmill.kernels.triton.attention.paging import (
    FLOOR,
    LOG2E,
    further,
    head_and_tile,
    path_of,
    path_parts,
    place_of,
)
from tokenmill.kernels.triton.attention.partial import join_here, parts_of, programs_for_a_tile, weigh_sinks
from tokenmill.kernels.triton.attention.prepare import Way, mates, rotated
from tokenmill.kernels.triton.attention.stored import (
    can_store,
    columns,
    kinds_of,
    put,
    scale_strides,
    scales_of,
    spot_in,
    widened,
)
from tokenmill.kernels.triton.common import (
    INTERPRETED,
    Scratch,
    begin,
    multiprocessors,
    pow2,
    product,
    shared_memory,
    wait,
)


@triton.jit
def _store_kernel(
    qkv_ptr, q_ptr, key_ptr, scale_ptr, slot_ptr, position_ptr, cos_ptr, sin_ptr, temper_ptr,
    stride, key_block, key_row, scale_block, scale_row,
    H: tl.constexpr, L: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr,
    BL: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    TEMPER: tl.constexpr, WAY: tl.constexpr, KIND: tl.constexpr, KEY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """KEY: the vector comes behind the queries, as one more head; else there are only queries. WAY: how one is rotated
    that is rounded as a whole."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    if KEY and KIND.PER > 1:
        if tl.program_id(1) == tl.num_programs(1) - 1:  # the key, whose rounding looks at all of it
            one = tl.arange(0, 1)
            d = columns(BLOCK, L + R, KIND.GROUPS)
            wait(PDL)
            rows = qkv_ptr + token * stride + H * (L + R) + one[:, None]
            x = rotated(rows, one[:, None], cos_ptr, cos_ptr, sin_ptr, cos_ptr, tl.load(position_ptr + token),
                        (one == 0)[:, None], d, 0.0, L + R, WAY)  # fmt: skip
            slot = tl.load(slot_ptr + token)
            put(x.to(qkv_ptr.dtype.element_ty).to(tl.float32), one == 0,
                key_ptr + slot // SIZE * key_block + slot % SIZE * key_row + one,
                scale_ptr + slot // SIZE * scale_block + slot % SIZE * scale_row + one,
                KIND, 1, BLOCK, L + R)  # fmt: skip
            return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    low = tl.arange(0, BL)
    r = tl.arange(0, BR)
    D: tl.constexpr = L + R
    HALF: tl.constexpr = R // 2
    mate, angle, sign = mates(r, R, INTERLEAVED)
    wait(PDL)
    source = qkv_ptr + token * stride + head[:, None] * D
    real = (head < H + KEY)[:, None]
    plain = tl.load(source + low[None, :], mask=real & (low < L)[None, :], other=0.0)
    x = tl.load(source + L + r[None, :], mask=real & (r < R)[None, :], other=0.0).to(tl.float32)
    if ROPE:
        position = tl.load(position_ptr + token)
        cos = tl.load(cos_ptr + position * HALF + angle, mask=r < R, other=1.0)
        sin = tl.load(sin_ptr + position * HALF + angle, mask=r < R, other=0.0) * sign
        other = tl.load(source + L + mate[None, :], mask=real & (r < R)[None, :], other=0.0).to(tl.float32)
        x = x * cos[None, :] + other * sin[None, :]
    if TEMPER:
        by = tl.load(temper_ptr + tl.load(position_ptr + token))
        by = tl.where(head < H, by, 1.0)[:, None]
        plain, x = (plain.to(tl.float32) * by).to(q_ptr.dtype.element_ty), x * by
    target = q_ptr + token * H * D + head[:, None] * D
    query = (head < H)[:, None]
    tl.store(target + low[None, :], plain, mask=query & (low < L)[None, :])
    tl.store(target + L + r[None, :], x.to(q_ptr.dtype.element_ty), mask=query & (r < R)[None, :])
    if KEY and KIND.PER == 1:
        slot = tl.load(slot_ptr + token)
        page = key_ptr + slot // SIZE * key_block + slot % SIZE * key_row + head[:, None] * 0
        key = (head == H)[:, None]
        tl.store(page + low[None, :], plain.to(key_ptr.dtype.element_ty), mask=key & (low < L)[None, :])
        tl.store(page + L + r[None, :], x.to(key_ptr.dtype.element_ty), mask=key & (r < R)[None, :])


def serves(spec: AttentionSpec, ctx: ForwardContext) -> bool:
    """Plain latent attention: keys end in a part that values lack, which rotates or does not; tables are contiguous."""
    kv, rope, view = spec.kv, spec.rope, ctx.kv[spec.layer]
    more = kv.key_dim - kv.value_dim
    rotated = more > 0 and (rope is None or (rope.start == kv.value_dim and rope.dim == more))
    bare = spec.touches.q_norm is None and spec.touches.k_norm is None and spec.alibi is None
    plain = can_store(view) and ctx.groups[spec.group].first is None
    return rotated and bare and plain and not spec.softcap and not spec.window and kv.value_dim <= 512


def prepare_latent(qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext, *, pdl: bool) -> Tensor:
    """qkv [T, H * Dk + Dk] -> q [T, H, Dk], rotated where keys are; the vector goes to its slot."""
    return _prepare(qkv, spec.heads, spec.kv.value_dim, True, spec, ctx, pdl)


def prepare_apart(q: Tensor, vector: Tensor, spec: AttentionSpec, ctx: ForwardContext, *, pdl: bool) -> Tensor:
    """q [T, H, D] that are not absorbed, rotated at their end where keys are; the vector [T, Dk] goes to its slot."""
    _prepare(vector, 0, spec.kv.value_dim, True, spec, ctx, pdl)
    plain = q.shape[2] - (spec.kv.key_dim - spec.kv.value_dim)
    return _prepare(q.flatten(1), q.shape[1], plain, False, spec, ctx, pdl)


def _prepare(
    x: Tensor, heads: int, plain: int, key: bool, spec: AttentionSpec, ctx: ForwardContext, pdl: bool
) -> Tensor:
    """x [T, heads * D], with a vector behind them if there is a key -> [T, heads, D]; plain: how many numbers of each
    stay as they are."""
    tokens, kv, rope, rotates = x.shape[0], ctx.kv[spec.layer], spec.rope, spec.kv.key_dim - spec.kv.value_dim
    q = torch.empty((tokens, heads, plain + rotates), dtype=x.dtype, device=x.device)
    together = max(1, min(pow2(max(1, heads)), 4096 // pow2(plain)))
    kind, scales = kinds_of(kv)["K_KIND"], scale_strides(kv)
    _store_kernel[(tokens, triton.cdiv(heads + key, together) + (key and kind.PER > 1))](
        x, q, kv.key, scales_of(kv)[0], ctx.groups[spec.group].slots, ctx.positions,
        None if rope is None else rope.cos, None if rope is None else rope.sin, spec.touches.temper,
        x.stride(0), kv.key.stride(0), kv.key.stride(2), scales[0], scales[2],
        H=heads, L=plain, R=rotates, SIZE=ctx.block_size, HEADS=together,
        BL=pow2(plain), BR=pow2(rotates), BLOCK=pow2(plain + rotates), ROPE=rope is not None,
        INTERLEAVED=rope is not None and rope.interleaved, TEMPER=spec.touches.temper is not None,
        WAY=Way(ROPE=rope is not None, START=plain, DIM=rotates, INTERLEAVED=rope is not None and rope.interleaved),
        KIND=kind, KEY=key, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize=["S", "table_stride", "places_stride"])
def _latent_kernel(
    q_ptr, key_ptr, scale_ptr, table_ptr, start_ptr, len_ptr, root_ptr, place_ptr, chosen_ptr, sink_ptr, out_ptr,
    partial, S, table_stride, places_stride, key_block, key_row, scale_block, scale_row, scale,
    H: tl.constexpr, L: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr,
    BQ: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    SPLIT: tl.constexpr, TREE: tl.constexpr, CHOSEN: tl.constexpr, SINKS: tl.constexpr, KIND: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SPLIT: the second dimension of the grid shares the vectors of a tile out; the last one to end joins the parts.
    CHOSEN: each token sees the keys of a list of so many positions; 0: all up to its own."""
    begin(PDL)
    HEAD_TILES: tl.constexpr = (H + BH - 1) // BH
    head_tile, tile = head_and_tile(HEAD_TILES)
    wait(PDL)
    seq = tile
    local = 0
    if BQ > 1 or CHOSEN > 0:
        seq, local = place_of(tile, start_ptr, S, BQ)
    start = tl.load(start_ptr + seq)
    queries = tl.load(start_ptr + seq + 1) - start
    if local >= queries:
        return
    kv_len = tl.load(len_ptr + seq)
    row = tl.arange(0, BQ * BH)
    query = local + row // BH
    head = head_tile * BH + row % BH
    real = (query < queries) & (head < H)
    query_position = kv_len - queries + query
    low_d = tl.arange(0, BL)
    high_d = tl.arange(0, BR)
    n = tl.arange(0, BN)
    D: tl.constexpr = L + R
    source = q_ptr + ((start + query).to(tl.int64) * H + head)[:, None] * D
    q = tl.load(source + low_d[None, :], mask=real[:, None] & (low_d < L)[None, :], other=0.0)
    q_high = tl.load(source + L + high_d[None, :], mask=real[:, None] & (high_d < R)[None, :], other=0.0)
    end = tl.minimum(kv_len - queries + local + BQ, kv_len)
    if CHOSEN > 0:
        end = tl.minimum(end, CHOSEN)
        chosen = chosen_ptr + (start + local).to(tl.int64) * CHOSEN
    first = 0
    last = end
    active = 1
    if SPLIT:
        chunk = tl.cdiv(tl.cdiv(end, BN), tl.num_programs(1)) * BN
        active = tl.cdiv(end, chunk)
        first = tl.program_id(1) * chunk
        last = tl.minimum(first + chunk, end)
        if first >= end:
            return
    table = table_ptr + seq.to(tl.int64) * table_stride
    path = (0, 0)
    if TREE:
        path = path_of(root_ptr, place_ptr, seq, places_stride)
    acc = tl.zeros((BQ * BH, BL), dtype=tl.float32)
    top = tl.full((BQ * BH,), FLOOR, dtype=tl.float32)
    total = tl.zeros((BQ * BH,), dtype=tl.float32)
    for at in tl.range(first, last, BN, num_stages=STAGES):
        index = at + n
        known = index < last
        stored = index
        if TREE:
            stored = index + further(index, known, path)
        if CHOSEN > 0:
            stored = tl.load(chosen + index, mask=known, other=-1)
            known = stored >= 0
        block = tl.load(table + stored // SIZE, mask=known, other=0).to(tl.int64)
        place = key_ptr + block * key_block + (stored % SIZE) * key_row
        # Unseen vectors are zeros, not leftovers: 0 * NaN would leak.
        k = tl.load(place[:, None] + spot_in(low_d, KIND, D)[None, :],
                    mask=known[:, None] & (low_d < L)[None, :], other=0.0)  # fmt: skip
        k_high = tl.load(place[:, None] + spot_in(L + high_d, KIND, D)[None, :],
                         mask=known[:, None] & (high_d < R)[None, :], other=0.0)  # fmt: skip
        factor = scale_ptr + block * scale_block + (stored % SIZE) * scale_row
        k = widened(k, factor[:, None], low_d[None, :], known[:, None], q.dtype, KIND, D)
        k_high = widened(k_high, factor[:, None], (L + high_d)[None, :], known[:, None], q.dtype, KIND, D)
        scores = product(q, tl.trans(k), tl.zeros((BQ * BH, BN), dtype=tl.float32), WIDE)
        scores = product(q_high, tl.trans(k_high), scores, WIDE) * (scale * LOG2E)
        if KIND.PER > 1 and KIND.WHOLE:
            size = tl.load(factor, mask=known, other=0.0).to(tl.float32)
            scores = scores * size[None, :]
        seen = known[None, :] & (index[None, :] <= query_position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        if KIND.PER > 1 and KIND.WHOLE:
            p = p * size[None, :]
        acc = product(p.to(q.dtype), k, acc * shrink[:, None], WIDE)
        top = new_top
    joins = True
    if SPLIT:
        joins, acc, top, total = join_here(acc, top, total, row, real, low_d, partial, active, BQ * BH, BL, L)
    if joins:
        if SINKS:
            acc, total = weigh_sinks(acc, top, total, head, real, sink_ptr)
        y = acc / tl.where(real, total, 1.0)[:, None]
        target = out_ptr + ((start + query).to(tl.int64) * H + head)[:, None] * L + low_d[None, :]
        tl.store(target, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & (low_d < L)[None, :])


def attend_vectors(
    q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext, scratch: Scratch, keys: Tensor | None = None, *,
    pdl: bool, whole: bool = False, config: tuple[int, int, int, int, int] | None = None,
) -> None:  # fmt: skip
    """q [T, H, Dk] -> out [T, H * L]. keys [T, K]: the positions that each token sees. whole: nothing is split and
    every step is treated alike, whatever the batch.

    config (rows, BN, splits, warps, stages)."""
    kv, plan, heads = ctx.kv[spec.layer], ctx.groups[spec.group], spec.heads
    seqs, latent = plan.tables.shape[0], spec.kv.value_dim
    longest = plan.tables.shape[1] * ctx.block_size
    one, kind, scales = ctx.max_query == 1 and not whole, kinds_of(kv)["K_KIND"], scale_strides(kv)
    units = seqs
    if keys is not None:
        one, units, longest = True, q.shape[0] + seqs, keys.shape[1]
    rows, block_n, splits, warps, stages = config or latent_config(
        units, longest, spec, q.element_size(), one=one, whole=kind.WHOLE
    )
    block_h = max(16, min(rows, pow2(heads))) if one else min(rows // 2, pow2(heads))
    block_q = 1 if one else max(2, 16 // block_h, rows // block_h)
    tiles = units if one else q.shape[0] // block_q + seqs
    head_tiles = triton.cdiv(heads, block_h)
    if not one:
        needed = seqs * triton.cdiv(ctx.max_query, block_q)  # of the others some have no queries
        splits = 1 if whole else _splits(min(tiles, needed) * head_tiles, longest)
    room = scratch.floats // (tiles * head_tiles * block_q * block_h * (latent + 2))
    splits = max(1, min(splits, room)) if tiles * head_tiles <= scratch.num_counters else 1
    partial = parts_of(scratch, splits * tiles * head_tiles * block_q * block_h * latent, q.device)
    roots, places, apart = path_parts(plan.paths)
    _latent_kernel[(head_tiles * tiles, splits)](
        q, kv.key, scales_of(kv)[0], plan.tables, ctx.query_start, ctx.kv_len, roots, places, keys, spec.sinks, out,
        partial, seqs, plan.tables.stride(0), apart,
        kv.key.stride(0), kv.key.stride(2), scales[0], scales[2], spec.scale,
        H=heads, L=latent, R=spec.kv.key_dim - latent, SIZE=ctx.block_size,
        BQ=block_q, BH=block_h, BN=block_n, BL=max(16, pow2(latent)), BR=max(16, pow2(spec.kv.key_dim - latent)),
        SPLIT=splits > 1, TREE=roots is not None, CHOSEN=0 if keys is None else keys.shape[1],
        SINKS=spec.sinks is not None, KIND=kind,
        WIDE=INTERPRETED or q.dtype == torch.float32, STAGES=stages, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip


def latent_config(
    seqs: int, longest: int, spec: AttentionSpec, size: int, *, one: bool, whole: bool = True
) -> tuple[int, int, int, int, int]:
    """(rows, BN, splits, warps, stages); one: every sequence has one new token; size: bytes of a number of q; whole:
    vectors are not scaled within a tile, which passes through shared memory in float32 else.

    Many new tokens: as many rows share a tile of vectors as fit beside it. One: a program waits for memory most of its
    time, so tiles are long, and rows as few as leave a multiprocessor for each program (measured on an H200)."""
    if INTERPRETED:
        return 16, 16, 2, 4, 1
    width = pow2(spec.kv.value_dim) + pow2(spec.kv.key_dim - spec.kv.value_dim)
    room, places = shared_memory(), multiprocessors()
    rows, block_n = (16, 64) if one else (64, 32)
    tile = size if whole else size + 4

    def fits() -> bool:
        return size * rows * (width + block_n) + tile * block_n * width <= room

    while one and rows < min(64, spec.heads) and seqs * triton.cdiv(spec.heads, rows) > places:
        rows *= 2
    while block_n > 16 and not fits():
        rows, block_n = (rows // 2, block_n) if rows > 16 else (rows, block_n // 2)
    splits = _splits(seqs * triton.cdiv(spec.heads, rows), longest)
    return rows, block_n, splits, 8 if rows == 64 or block_n == 64 else 4, 2


def _splits(units: int, longest: int) -> int:
    """How many programs share the vectors of each of so many tiles of rows."""
    return 2 if INTERPRETED else programs_for_a_tile(multiprocessors() // units, longest // 64)
