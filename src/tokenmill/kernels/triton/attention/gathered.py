"""Attention of long chunks. Owns: putting a sequence's keys in a row, and flash attention that copies them by tile.

Paged keys cost address arithmetic at every use, and a long chunk uses each key thousands of times. So they are gathered
once per layer, [kv heads, tokens, D], and read from there by the copy engine (tensor descriptors), which needs neither
registers nor threads. Must not know: tables beyond the gathering.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan
from tokenmill.kernels.triton.attention.paging import FLOOR, LOG2E, bend, head_and_tile, product
from tokenmill.kernels.triton.attention.stored import kinds_of, scale_strides, scales_of, spot_in, widened
from tokenmill.kernels.triton.common import INTERPRETED, begin, pow2, wait

ALIGN = 16 if INTERPRETED else 128
"""Sequences begin at multiples of this in the row, so that a tile of keys belongs to one of them."""
LEAST = 32 if INTERPRETED else 256
"""New tokens of one sequence from which gathering pays."""
MOST = 1 << 16
"""Keys that are gathered at one time: 268 MB for 8 heads of 128 in 16 bits."""


def can_gather(q: Tensor, spec: AttentionSpec, plan: GroupPlan, longest: int) -> bool:
    """Long chunks over whole tables of moderate size, heads that fill a tile."""
    width = spec.kv.key_dim
    return (
        longest >= LEAST
        and 0 < plan.reach <= MOST - ALIGN * plan.tables.shape[0]
        and plan.first is None
        and not spec.window
        and spec.alibi is None
        and width == spec.kv.value_dim == pow2(width)
        and 16 <= width <= 128
        and (INTERPRETED or q.dtype in (torch.bfloat16, torch.float16))
    )


@triton.jit
def _numbers(spots, scales, d, known, KIND: tl.constexpr, D: tl.constexpr):
    """Stored heads that begin at these spots [ALIGN, 1], as they lie or in float32."""
    found = tl.load(spots + spot_in(d, KIND, D), mask=known, other=0.0)
    if KIND.PER > 1:
        found = widened(found, scales, d, known, tl.float32, KIND, D)
        if KIND.WHOLE:
            found *= tl.load(scales, mask=known, other=0.0).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["S", "table_stride", "total"])
def _gather_kernel(
    key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, key_out, value_out, table_ptr, at_ptr, len_ptr,
    S, table_stride, total, key_block, key_head, key_row, value_block, value_head, value_row,
    key_scale_block, key_scale_head, key_scale_row, value_scale_block, value_scale_head, value_scale_row,
    D: tl.constexpr, SIZE: tl.constexpr, ALIGN: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    begin_at = tl.program_id(0) * ALIGN
    head = tl.program_id(1).to(tl.int64)
    wait(PDL)
    if begin_at >= tl.load(at_ptr + S):
        return
    low = 0
    high = S
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(at_ptr + middle) <= begin_at:
            low = middle
        else:
            high = middle
    seq = low
    index = begin_at - tl.load(at_ptr + seq) + tl.arange(0, ALIGN)
    known = index < tl.load(len_ptr + seq)
    block = tl.load(table_ptr + seq.to(tl.int64) * table_stride + index // SIZE, mask=known, other=0).to(tl.int64)
    offset = index % SIZE
    d = tl.arange(0, D)[None, :]
    there = known[:, None]
    row = (head * total + begin_at + tl.arange(0, ALIGN))[:, None] * D + d
    spots = key_ptr + head * key_head + (block * key_block + offset * key_row)[:, None]
    scales = key_scale_ptr + head * key_scale_head + (block * key_scale_block + offset * key_scale_row)[:, None]
    k = _numbers(spots, scales, d, there, K_KIND, D)
    tl.store(key_out + row, k.to(key_out.dtype.element_ty))
    spots = value_ptr + head * value_head + (block * value_block + offset * value_row)[:, None]
    scales = value_scale_ptr + head * value_scale_head + (block * value_scale_block + offset * value_scale_row)[:, None]
    val = _numbers(spots, scales, d, there, V_KIND, D)
    tl.store(value_out + row, val.to(value_out.dtype.element_ty))


def places(ctx: ForwardContext) -> Tensor:
    """-> [S + 1] int32: where each sequence's keys begin in the row; sequences with one new token have none there."""
    many = ctx.query_start.diff() > 1
    sizes = torch.where(many, (ctx.kv_len + ALIGN - 1) // ALIGN * ALIGN, 0)
    at = torch.zeros(sizes.shape[0] + 1, dtype=torch.int32, device=sizes.device)
    torch.cumsum(sizes, 0, dtype=torch.int32, out=at[1:])
    return at


def owners(ctx: ForwardContext, tokens: int, block_q: int) -> Tensor:
    """-> [tiles] int32: whose queries each tile holds, -1: nobody's. Sequence i's begin at query_start[i] // BQ + i."""
    start, seqs = ctx.query_start, ctx.kv_len.shape[0]
    counts = start.diff()
    index = torch.arange(seqs, dtype=torch.int32, device=start.device)
    first = start[:-1] // block_q + index
    tile = torch.arange(tokens // block_q + seqs, dtype=torch.int32, device=start.device)
    seq = torch.searchsorted(first, tile, right=True, out_int32=True) - 1
    inside = ((tile - first[seq]) * block_q < counts[seq]) & (counts[seq] > 1)
    return torch.where(inside, seq, -1).to(torch.int32)


@triton.jit
def _step(
    acc, top, total, q, key_desc, value_desc, row, at, kv_len, query_position, slope, n, scale, softcap,
    D: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    k = key_desc.load([row + at, 0])
    scores = product(q, tl.trans(k), tl.zeros((q.shape[0], n.shape[0]), dtype=tl.float32), WIDE)
    scores = bend(scores, 0, 0, slope, scale, softcap, SOFTCAP, False)
    if MASKED:
        # Beyond the end lie zeros, so nothing has to be done to values.
        seen = query_position[:, None] >= at + n[None, :]
        scores = tl.where(seen & (at + n < kv_len)[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    acc = product(p.to(q.dtype), value_desc.load([row + at, 0]), acc * shrink[:, None], WIDE)
    return acc, new_top, total


@triton.jit(do_not_specialize=["total_keys"])
def _gathered_kernel(
    q_ptr, key_desc, value_desc, tile_ptr, at_ptr, start_ptr, len_ptr, sink_ptr, out_ptr, total_keys, scale, softcap,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    kv_head, tile = head_and_tile(H // GROUP)
    wait(PDL)
    seq = tl.load(tile_ptr + tile)
    if seq < 0:
        return
    start = tl.load(start_ptr + seq)
    queries = tl.load(start_ptr + seq + 1) - start
    local = (tile - start // BQ - seq) * BQ
    kv_len = tl.load(len_ptr + seq)
    pair = tl.arange(0, BQ * BG)
    query = local + pair // BG
    in_group = pair % BG
    real = (query < queries) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    query_position = kv_len - queries + query
    d = tl.arange(0, D)
    n = tl.arange(0, BN)
    token = (start + query).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * (H * D) + head[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
    slope = tl.zeros((BQ * BG,), dtype=tl.float32)
    oldest = kv_len - queries + local
    plain = (oldest + 1) // BN * BN
    end = tl.minimum(oldest + BQ, kv_len)
    row = kv_head * total_keys + tl.load(at_ptr + seq)
    acc = tl.zeros((BQ * BG, D), dtype=tl.float32)
    top = tl.full((BQ * BG,), FLOOR, dtype=tl.float32)
    total = tl.zeros((BQ * BG,), dtype=tl.float32)
    for at in tl.range(0, plain, BN, num_stages=STAGES):
        acc, top, total = _step(acc, top, total, q, key_desc, value_desc, row, at, kv_len, query_position, slope, n,
                                scale, softcap, D, SOFTCAP, False, WIDE)  # fmt: skip
    for at in tl.range(plain, end, BN, num_stages=STAGES):
        acc, top, total = _step(acc, top, total, q, key_desc, value_desc, row, at, kv_len, query_position, slope, n,
                                scale, softcap, D, SOFTCAP, True, WIDE)  # fmt: skip
    if SINKS:
        sink = tl.load(sink_ptr + head, mask=real, other=FLOOR).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        acc = acc * tl.exp2(top - new_top)[:, None]
    y = acc / tl.where(real, total, 1.0)[:, None]
    tl.store(out_ptr + token[:, None] * (H * D) + head[:, None] * D + d[None, :], y.to(out_ptr.dtype.element_ty),
             mask=real[:, None])  # fmt: skip


def gather(
    spec: AttentionSpec, ctx: ForwardContext, at: Tensor, dtype: torch.dtype, *, pdl: bool
) -> tuple[Tensor, Tensor]:
    """-> keys and values [kv heads, tokens, D] of the sequences with several new tokens."""
    kv, plan = ctx.kv[spec.layer], ctx.groups[spec.group]
    heads, width = spec.kv.heads, spec.kv.key_dim
    total = -(-plan.reach // ALIGN) * ALIGN + ALIGN * plan.tables.shape[0]
    keys = torch.empty((heads, total, width), dtype=dtype, device=at.device)
    values = torch.empty_like(keys)
    _gather_kernel[(total // ALIGN, heads)](
        kv.key, kv.value, *scales_of(kv), keys, values, plan.tables, at, ctx.kv_len,
        plan.tables.shape[0], plan.tables.stride(0), total,
        *kv.key.stride()[:3], *kv.value.stride()[:3], *scale_strides(kv),
        D=width, SIZE=ctx.block_size, ALIGN=ALIGN, **kinds_of(kv), PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return keys, values


CONFIG = (32, 16, 4, 1) if INTERPRETED else (128, 128, 8, 3)
"""(rows, BN, warps, stages): measured on an H200."""


def arrange(spec: AttentionSpec, ctx: ForwardContext, tokens: int, rows: int = CONFIG[0]) -> tuple[Tensor, Tensor]:
    """What layers of one kind share in a step: where sequences' keys begin, and whose queries each tile holds."""
    return places(ctx), owners(ctx, tokens, _block_q(spec, rows))


def _block_q(spec: AttentionSpec, rows: int) -> int:
    return max(1, rows // pow2(spec.heads // spec.kv.heads))


def attend_long(
    q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext, arranged: tuple[Tensor, Tensor], *,
    pdl: bool, hopper: bool,
) -> None:  # fmt: skip
    """q [T, H, D] -> out [T, H * D], for the sequences with several new tokens; hopper: the device is one."""
    gathered = gather(spec, ctx, arranged[0], q.dtype, pdl=pdl)
    if hopper and not spec.softcap and spec.kv.key_dim in (64, 128):
        from tokenmill.kernels.triton.attention.hopper import attend_hopper  # the interpreter cannot load it

        attend_hopper(q, out, spec, ctx, arranged, gathered)
    else:
        attend_gathered(q, out, spec, ctx, arranged, gathered, pdl=pdl)


def attend_gathered(
    q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext, arranged: tuple[Tensor, Tensor],
    gathered: tuple[Tensor, Tensor], *, pdl: bool, config: tuple[int, int, int, int] = CONFIG,
) -> None:  # fmt: skip
    """The same from gathered keys and values [kv heads, tokens, D]."""
    at, tiles = arranged
    keys, values = gathered
    heads, total, width = keys.shape
    group = spec.heads // heads
    rows, block_n, warps, stages = config
    shape = [block_n, width]
    _gathered_kernel[(heads * tiles.shape[0],)](
        q, TensorDescriptor.from_tensor(keys.view(-1, width), shape),
        TensorDescriptor.from_tensor(values.view(-1, width), shape), tiles, at,
        ctx.query_start, ctx.kv_len, spec.sinks, out, total, spec.scale, spec.softcap,
        H=spec.heads, GROUP=group, D=width, BQ=_block_q(spec, rows), BG=pow2(group), BN=block_n,
        SOFTCAP=spec.softcap > 0, SINKS=spec.sinks is not None, WIDE=INTERPRETED, STAGES=stages, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
