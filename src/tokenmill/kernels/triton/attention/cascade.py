"""A prefix that all sequences of a decode step share (cascade). Owns: finding it, and reading it once for all of them.

Its keys are read once per 128 (sequence, head) rows instead of once per sequence. What it leaves are parts, like those
of decode.py, which joins them with each sequence's own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan
from tokenmill.kernels.triton.attention.paging import FLOOR, bend
from tokenmill.kernels.triton.attention.stored import kinds_of, scale_strides, scales_of, spot_in, widened
from tokenmill.kernels.triton.common import INTERPRETED, Scratch, begin, pow2, product, shared_memory, wait

LEAST = 8
"""Table entries below which sharing does not pay."""


@triton.jit(do_not_specialize=["table_stride"])
def _common_kernel(table_ptr, len_ptr, common_ptr, table_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                   LEAST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    begin(PDL)
    seq = tl.program_id(0)
    wait(PDL)
    length = tl.load(len_ptr + seq)
    if (length <= 1) & (seq > 0):
        return  # the spare row, which fills up a recorded step: what the others share is read for nothing, too
    # The newest key stays each sequence's own.
    limit = (length - 1) // SIZE
    row = table_ptr + seq.to(tl.int64) * table_stride
    same = 0
    at = 0
    going = True
    while going:
        e = at + tl.arange(0, BLOCK)
        mine = tl.load(row + e, mask=e < limit, other=-1)
        model = tl.load(table_ptr + e, mask=e < limit, other=-2)
        same = at + tl.min(tl.where(mine == model, BLOCK, tl.arange(0, BLOCK)))
        at += BLOCK
        going = same == at
    same = tl.where(same < LEAST, 0, same)
    tl.atomic_min(common_ptr, same)


def common_entries(plan: GroupPlan, ctx: ForwardContext, *, pdl: bool) -> Tensor:
    """-> [1] int32: leading table entries that are the same in all sequences but those of one key, which are read by
    nobody (0 if they are few)."""
    common = torch.full((1,), 1 << 30, dtype=torch.int32, device=plan.tables.device)
    _common_kernel[(plan.tables.shape[0],)](
        plan.tables, ctx.kv_len, common, plan.tables.stride(0), SIZE=ctx.block_size, BLOCK=128, LEAST=LEAST, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return common


@triton.jit(do_not_specialize=["S"])
def _shared_kernel(
    q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, len_ptr, common_ptr, part_ptr, top_ptr,
    S, key_block, key_head, key_row, value_block, value_head, value_row,
    key_scale_block, key_scale_head, key_scale_row, value_scale_block, value_scale_head, value_scale_row,
    scale, softcap,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    BS: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BEFORE: tl.constexpr, PARTS: tl.constexpr, SOFTCAP: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    wait(PDL)
    length = tl.load(common_ptr) * SIZE
    chunk = tl.cdiv(tl.cdiv(length, BN), BEFORE) * BN
    low = split * chunk
    high = tl.minimum(low + chunk, length)
    row = tl.arange(0, BS * BG)
    seq = tile * BS + row // BG
    in_group = row % BG
    real = (seq < S) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    d = tl.arange(0, BD)
    v = tl.arange(0, BV)
    n = tl.arange(0, BN)
    q = tl.load(
        q_ptr + seq[:, None].to(tl.int64) * (H * D) + head[:, None] * D + d[None, :],
        mask=real[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    acc = tl.zeros((BS * BG, BV), dtype=tl.float32)
    top = tl.full((BS * BG,), FLOOR, dtype=tl.float32)
    total = tl.zeros((BS * BG,), dtype=tl.float32)
    keys = key_ptr + kv_head.to(tl.int64) * key_head
    values = value_ptr + kv_head.to(tl.int64) * value_head
    key_scales = key_scale_ptr + kv_head.to(tl.int64) * key_scale_head
    value_scales = value_scale_ptr + kv_head.to(tl.int64) * value_scale_head
    d_place, v_place = spot_in(d, K_KIND, D), spot_in(v, V_KIND, DV)
    for at in tl.range(low, high, BN, num_stages=STAGES):
        index = at + n
        known = index < high
        block = tl.load(table_ptr + index // SIZE, mask=known, other=0).to(tl.int64)
        offset = index % SIZE
        k = tl.load(
            keys + block[None, :] * key_block + offset[None, :] * key_row + d_place[:, None],
            mask=known[None, :] & (d < D)[:, None], other=0.0,
        )  # fmt: skip
        spot = key_scales + block * key_scale_block + offset * key_scale_row
        k = widened(k, spot[None, :], d[:, None], known[None, :], q.dtype, K_KIND, D)
        scores = product(q, k, tl.zeros((BS * BG, BN), dtype=tl.float32), WIDE)
        if K_KIND.PER > 1 and K_KIND.WHOLE:
            scores = scores * tl.load(spot, mask=known, other=0.0).to(tl.float32)[None, :]
        scores = bend(scores, 0, index[None, :], top, scale, softcap, SOFTCAP, False)
        scores = tl.where(known[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        spot = value_scales + block * value_scale_block + offset * value_scale_row
        if V_KIND.PER > 1 and V_KIND.WHOLE:
            p = p * tl.load(spot, mask=known, other=0.0).to(tl.float32)[None, :]
        val = tl.load(
            values + block[:, None] * value_block + offset[:, None] * value_row + v_place[None, :],
            mask=known[:, None] & (v < DV)[None, :], other=0.0,
        )  # fmt: skip
        val = widened(val, spot[:, None], v[None, :], known[:, None], q.dtype, V_KIND, DV)
        acc = product(p.to(q.dtype), val, acc * shrink[:, None], WIDE)
        top = new_top
    unit = seq * tl.num_programs(1) + kv_head
    place = (unit.to(tl.int64) * PARTS + split) * GROUP + in_group
    if low < high:
        tl.store(part_ptr + place[:, None] * DV + v[None, :], acc, mask=real[:, None] & (v < DV)[None, :])
    tl.store(top_ptr + place * 2, top, mask=real)
    tl.store(top_ptr + place * 2 + 1, total, mask=real)


def can_share(spec: AttentionSpec, plan: GroupPlan, size: int) -> bool:
    """Every query sees the whole prefix, with no regard to distance, and programs fit; size: of a query's number."""
    fits = INTERPRETED or _taken(ROWS, 16, 1, spec, size) <= shared_memory()
    return plan.first is None and not spec.window and spec.alibi is None and fits


def attend_shared(
    q: Tensor, spec: AttentionSpec, ctx: ForwardContext, common: Tensor, scratch: Scratch, *,
    before: int, parts: int, pdl: bool,
) -> None:  # fmt: skip
    """Parts 0 .. before - 1 of `parts`: q [S, H, Dk] against the first `common` [1] entries of the first table."""
    kv, plan = ctx.kv[spec.layer], ctx.groups[spec.group]
    seqs, heads = plan.tables.shape[0], spec.kv.heads
    group = spec.heads // heads
    packed = pow2(group)
    together = max(16 // packed, min(ROWS // packed, pow2(seqs)), 1)
    partial = scratch.partial(q.device)
    block_n, stages = shared_config(together * packed, spec, q.element_size())
    _shared_kernel[(triton.cdiv(seqs, together), heads, before)](
        q, kv.key, kv.value, *scales_of(kv), plan.tables, ctx.kv_len, common,
        partial, partial[seqs * spec.heads * parts * spec.kv.value_dim :],
        seqs, *kv.key.stride()[:3], *kv.value.stride()[:3], *scale_strides(kv), spec.scale, spec.softcap,
        H=spec.heads, GROUP=group, D=spec.kv.key_dim, DV=spec.kv.value_dim, SIZE=ctx.block_size,
        BS=together, BG=packed, BN=block_n,
        BD=max(16, pow2(spec.kv.key_dim)), BV=max(16, pow2(spec.kv.value_dim)),
        BEFORE=before, PARTS=parts, SOFTCAP=spec.softcap > 0, **kinds_of(kv),
        WIDE=INTERPRETED or q.dtype == torch.float32, STAGES=stages, PDL=pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


ROWS = 16 if INTERPRETED else 128


def shared_config(rows: int, spec: AttentionSpec, size: int) -> tuple[int, int]:
    """(BN, stages) for programs of so many rows: the largest tiles of keys and values that fit beside the queries.

    Tables are looked up one stage before keys are loaded, so that five stages hold two tiles and three hold one."""
    if INTERPRETED:
        return 32, 1
    room = shared_memory()
    for block_n, stages in ((64, 5), (64, 3), (32, 5), (32, 3)):
        if _taken(rows, block_n, stages // 2, spec, size) <= room:
            return block_n, stages
    return 16, 1


def _taken(rows: int, block_n: int, tiles: int, spec: AttentionSpec, size: int) -> int:
    """Bytes of shared memory, by what was compiled: queries twice, scores, and tiles of keys and values."""
    width, values = pow2(spec.kv.key_dim), pow2(spec.kv.value_dim)
    return size * (tiles * block_n * (width + values) + rows * (2 * width + block_n))


def shared_parts(seqs: int, spec: AttentionSpec) -> int:
    """How many programs share the reading of the prefix, per tile of rows and head."""
    tiles = triton.cdiv(seqs * pow2(spec.heads // spec.kv.heads), ROWS) * spec.kv.heads
    parts = 16
    while parts > 1 and parts * tiles > 132:
        parts //= 2
    return parts
