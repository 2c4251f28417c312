"""Attention of long chunks. Owns: putting a sequence's keys in a row, and flash attention that copies them by tile.

Paged keys cost address arithmetic at every use, and a long chunk uses each key thousands of times. So they are gathered
once per layer, [kv heads, tokens, D], and read from there by the copy engine (tensor descriptors), which needs neither
registers nor threads. Keys may have a part that all heads share, which lies in rows of its own. Must not know: tables
beyond the gathering.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan
from tokenmill.kernels.triton.attention.paging import FLOOR, bend, head_and_tile
from tokenmill.kernels.triton.attention.partial import weigh_sinks
from tokenmill.kernels.triton.attention.stored import kinds_of, scale_strides, scales_of, spot_in, widened
from tokenmill.kernels.triton.common import INTERPRETED, begin, pow2, product, wait

ALIGN = 16 if INTERPRETED else 128
"""Sequences begin at multiples of this in the row, so that a tile of keys belongs to one of them."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Keys [kv heads, tokens, D] and values [kv heads, tokens, DV] in rows; beside [tokens, R]: the other part of the
    keys, the same for all heads."""

    keys: Tensor
    values: Tensor
    beside: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """D, R and DV."""
        return self.keys.shape[2], 0 if self.beside is None else self.beside.shape[1], self.values.shape[2]


@triton.jit
def owner(begin_at, at_ptr, S):
    """The sequence whose keys lie at this place of the row."""
    low = 0
    high = S
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(at_ptr + middle) <= begin_at:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def numbers(spots, scales, d, known, KIND: tl.constexpr, D: tl.constexpr):
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
    seq = owner(begin_at, at_ptr, S)
    index = begin_at - tl.load(at_ptr + seq) + tl.arange(0, ALIGN)
    known = index < tl.load(len_ptr + seq)
    block = tl.load(table_ptr + seq.to(tl.int64) * table_stride + index // SIZE, mask=known, other=0).to(tl.int64)
    offset = index % SIZE
    d = tl.arange(0, D)[None, :]
    there = known[:, None]
    row = (head * total + begin_at + tl.arange(0, ALIGN))[:, None] * D + d
    spots = key_ptr + head * key_head + (block * key_block + offset * key_row)[:, None]
    scales = key_scale_ptr + head * key_scale_head + (block * key_scale_block + offset * key_scale_row)[:, None]
    k = numbers(spots, scales, d, there, K_KIND, D)
    tl.store(key_out + row, k.to(key_out.dtype.element_ty))
    spots = value_ptr + head * value_head + (block * value_block + offset * value_row)[:, None]
    scales = value_scale_ptr + head * value_scale_head + (block * value_scale_block + offset * value_scale_row)[:, None]
    val = numbers(spots, scales, d, there, V_KIND, D)
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
    acc, top, total, q, q_beside, key_desc, beside_desc, value_desc, row, place, at, kv_len, query_position, slope, n,
    scale, softcap, R: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    k = key_desc.load([row + at, 0])
    scores = product(q, tl.trans(k), tl.zeros((q.shape[0], n.shape[0]), dtype=tl.float32), WIDE)
    if R > 0:
        scores = product(q_beside, tl.trans(beside_desc.load([place + at, 0])), scores, WIDE)
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


@triton.jit(do_not_specialize=["total_keys", "heads"])
def _gathered_kernel(
    q_ptr, key_desc, beside_desc, value_desc, tile_ptr, at_ptr, start_ptr, len_ptr, sink_ptr, out_ptr,
    total_keys, heads, scale, softcap,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, DV: tl.constexpr,
    BQ: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """H: query heads of a token; heads: key heads of this launch."""
    begin(PDL)
    kv_head, tile = head_and_tile(heads)
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
    source = q_ptr + (token * (H * (D + R)) + head * (D + R))[:, None]
    q = tl.load(source + d[None, :], mask=real[:, None], other=0.0)
    q_beside = q
    if R > 0:
        q_beside = tl.load(source + D + tl.arange(0, R)[None, :], mask=real[:, None], other=0.0)
    slope = tl.zeros((BQ * BG,), dtype=tl.float32)
    oldest = kv_len - queries + local
    plain = (oldest + 1) // BN * BN
    end = tl.minimum(oldest + BQ, kv_len)
    place = tl.load(at_ptr + seq)
    row = kv_head * total_keys + place
    acc = tl.zeros((BQ * BG, DV), dtype=tl.float32)
    top = tl.full((BQ * BG,), FLOOR, dtype=tl.float32)
    total = tl.zeros((BQ * BG,), dtype=tl.float32)
    for at in tl.range(0, plain, BN, num_stages=STAGES):
        acc, top, total = _step(
            acc, top, total, q, q_beside, key_desc, beside_desc, value_desc, row, place, at, kv_len, query_position,
            slope, n, scale, softcap, R, SOFTCAP, False, WIDE,
        )  # fmt: skip
    for at in tl.range(plain, end, BN, num_stages=STAGES):
        acc, top, total = _step(
            acc, top, total, q, q_beside, key_desc, beside_desc, value_desc, row, place, at, kv_len, query_position,
            slope, n, scale, softcap, R, SOFTCAP, True, WIDE,
        )  # fmt: skip
    if SINKS:
        acc, total = weigh_sinks(acc, top, total, head, real, sink_ptr)
    y = acc / tl.where(real, total, 1.0)[:, None]
    target = out_ptr + (token * (H * DV) + head * DV)[:, None] + tl.arange(0, DV)[None, :]
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=real[:, None])


def places_of(plan: GroupPlan) -> int:
    """How long rows are that have room for all gathered keys."""
    return -(-plan.reach // ALIGN) * ALIGN + ALIGN * plan.tables.shape[0]


def gather(spec: AttentionSpec, ctx: ForwardContext, at: Tensor, dtype: torch.dtype, *, pdl: bool) -> Gathered:
    """Keys and values of the sequences with several new tokens."""
    kv, plan = ctx.kv[spec.layer], ctx.groups[spec.group]
    heads, width = spec.kv.heads, spec.kv.key_dim
    total = places_of(plan)
    keys = torch.empty((heads, total, width), dtype=dtype, device=at.device)
    values = torch.empty_like(keys)
    _gather_kernel[(total // ALIGN, heads)](
        kv.key, kv.value, *scales_of(kv), keys, values, plan.tables, at, ctx.kv_len,
        plan.tables.shape[0], plan.tables.stride(0), total,
        *kv.key.stride()[:3], *kv.value.stride()[:3], *scale_strides(kv),
        D=width, SIZE=ctx.block_size, ALIGN=ALIGN, **kinds_of(kv), PDL=pdl,
        num_warps=8 if width > 128 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return Gathered(keys, values)


CONFIG = (32, 16, 4, 1) if INTERPRETED else (128, 128, 8, 3)
"""(rows, BN, warps, stages): measured on an H200."""


def arrange(ctx: ForwardContext, tokens: int, group: int, rows: int = CONFIG[0]) -> tuple[Tensor, Tensor]:
    """What layers of one kind share in a step: where sequences' keys begin, and whose queries each tile holds; group:
    query heads that share a key."""
    return places(ctx), owners(ctx, tokens, max(1, rows // pow2(group)))


def attend_gathered(
    q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext, arranged: tuple[Tensor, Tensor],
    gathered: Gathered, *, pdl: bool, config: tuple[int, int, int, int] | None = None,
) -> None:  # fmt: skip
    """q [T, H, D + R] -> out [T, H, DV], for the sequences with several new tokens, by Triton's own pipeline."""
    at, tiles = arranged
    dim, rest, wide = gathered.sizes
    heads, total = gathered.keys.shape[:2]
    group = q.shape[1] // heads
    rows, block_n, warps, stages = config or (CONFIG if rest == 0 or INTERPRETED else (128, 64, 8, 3))

    def tiled(rows: Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(rows.view(-1, rows.shape[-1]), [block_n, rows.shape[-1]])

    values = tiled(gathered.values)
    _gathered_kernel[(heads * tiles.shape[0],)](
        q, tiled(gathered.keys), values if gathered.beside is None else tiled(gathered.beside), values, tiles, at,
        ctx.query_start, ctx.kv_len, spec.sinks, out, total, heads, spec.scale, spec.softcap,
        H=spec.heads, GROUP=group, D=dim, R=rest, DV=wide, BQ=max(1, rows // pow2(group)), BG=pow2(group),
        BN=block_n, SOFTCAP=spec.softcap > 0, SINKS=spec.sinks is not None, WIDE=INTERPRETED, STAGES=stages, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
