"""Long prompts of latent attention. Owns: keys and values of heads, made of the stored vectors for one layer and step.

A query that is carried into the latent space has 576 numbers to multiply with each vector, and 512 of them to sum up,
where heads of their own have 192 and 128. One token a sequence reads so few bytes that this is better; a long prompt
has each vector read by so many queries that making keys and values of all vectors costs less. They live for one layer,
and for as many heads as fit in memory. Must not know: projections, what is stored where.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext
from tokenmill.kernels.triton.attention.gathered import ALIGN, Gathered, numbers, owner, places_of
from tokenmill.kernels.triton.attention.long import LEAST, attend_long, served
from tokenmill.kernels.triton.attention.stored import kinds_of, scale_strides, scales_of
from tokenmill.kernels.triton.common import INTERPRETED, begin, pow2, wait

_MOST = 1 << 18
"""Vectors that are gathered at one time."""
_WORK = 0 if INTERPRETED else 1 << 25
"""Pairs of a head's query and a key from which a few launches more pay."""
_ROOM = 1 << 28
"""Bytes of keys and values at one time: with more, heads take turns."""


def can_unfold(
    q: Tensor, parts: tuple[Tensor, Tensor], spec: AttentionSpec, ctx: ForwardContext, *, hopper: bool
) -> bool:
    """A long chunk, and sizes that fill tiles. q [T, H, D + R], parts [H, L, D] and [H, DV, L]; hopper: the device is
    one."""
    plan = ctx.groups[spec.group]
    return (
        ctx.max_query >= LEAST
        and ctx.max_query * plan.reach * spec.heads >= _WORK
        and 0 < plan.reach <= _MOST - ALIGN * plan.tables.shape[0]
        and plan.paths is None
        and _fills(*_sizes(parts[0].shape[2], spec.kv.key_dim - spec.kv.value_dim), parts[1].shape[1], hopper=hopper)
        and (INTERPRETED or q.dtype in (torch.bfloat16, torch.float16))
    )


def _sizes(plain: int, rest: int) -> tuple[int, int]:
    """How long the heads' own rows of keys are, and the shared ones: where only both together fill a tile, heads have
    the shared part, too."""
    return (plain, rest) if plain == pow2(plain) else (plain + rest, 0)


def _fills(dim: int, beside: int, values: int, *, hopper: bool) -> bool:
    """Are there tiles of these sizes?"""
    tiles = all(size == pow2(size) and 16 <= size <= 128 for size in (dim, beside or 16, values))
    return tiles or (hopper and served(dim, beside, values))


@triton.jit(do_not_specialize=["S", "table_stride"])
def _gather_vectors_kernel(
    key_ptr, scale_ptr, low_ptr, high_ptr, table_ptr, at_ptr, len_ptr,
    S, table_stride, key_block, key_row, scale_block, scale_row,
    L: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    begin_at = tl.program_id(0) * ROWS
    wait(PDL)
    if begin_at >= tl.load(at_ptr + S):
        return
    seq = owner(begin_at, at_ptr, S)
    row = tl.arange(0, ROWS)
    index = begin_at - tl.load(at_ptr + seq) + row
    known = index < tl.load(len_ptr + seq)
    block = tl.load(table_ptr + seq.to(tl.int64) * table_stride + index // SIZE, mask=known, other=0).to(tl.int64)
    spots = key_ptr + (block * key_block + index % SIZE * key_row)[:, None]
    scales = scale_ptr + (block * scale_block + index % SIZE * scale_row)[:, None]
    place = (begin_at + row).to(tl.int64)[:, None]
    low, high = tl.arange(0, BL)[None, :], tl.arange(0, BR)[None, :]
    x = numbers(spots, scales, low, known[:, None] & (low < L), KIND, L + R)
    tl.store(low_ptr + place * L + low, x.to(low_ptr.dtype.element_ty), mask=low < L)
    x = numbers(spots, scales, L + high, known[:, None] & (high < R), KIND, L + R)
    tl.store(high_ptr + place * R + high, x.to(high_ptr.dtype.element_ty), mask=high < R)


def gather_vectors(
    spec: AttentionSpec, ctx: ForwardContext, at: Tensor, dtype: torch.dtype, *, pdl: bool
) -> tuple[Tensor, Tensor]:
    """-> [tokens, L] and [tokens, R] of the sequences with several new tokens, which begin at these places."""
    kv, plan = ctx.kv[spec.layer], ctx.groups[spec.group]
    latent, rest, total = spec.kv.value_dim, spec.kv.key_dim - spec.kv.value_dim, places_of(plan)
    low = torch.empty((total, latent), dtype=dtype, device=at.device)
    high = torch.empty((total, rest), dtype=dtype, device=at.device)
    scales = scale_strides(kv)
    _gather_vectors_kernel[(total // 16,)](
        kv.key, scales_of(kv)[0], low, high, plan.tables, at, ctx.kv_len,
        plan.tables.shape[0], plan.tables.stride(0), kv.key.stride(0), kv.key.stride(2), scales[0], scales[2],
        L=latent, R=rest, SIZE=ctx.block_size, ROWS=16, BL=pow2(latent), BR=pow2(rest),
        KIND=kinds_of(kv)["K_KIND"], PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return low, high


def attend_unfolded(
    q: Tensor, out: Tensor, parts: tuple[Tensor, Tensor], spec: AttentionSpec, ctx: ForwardContext,
    arranged: tuple[Tensor, Tensor], *, pdl: bool, hopper: bool,
) -> None:  # fmt: skip
    """Prepared q [T, H, D + R] -> out [T, H, DV], for the sequences with several new tokens, whose vectors are stored.
    parts [H, L, D] and [H, DV, L]: what makes keys and values of a vector."""
    low, high = gather_vectors(spec, ctx, arranged[0], q.dtype, pdl=pdl)
    each = q.element_size() * len(low) * (parts[0].shape[2] + parts[1].shape[1])
    together = max(1, min(spec.heads, _ROOM // each))
    shared = _sizes(parts[0].shape[2], high.shape[1])[1]
    for first in range(0, spec.heads, together):
        these = slice(first, first + together)
        ups, downs = parts[0][these], parts[1][these].transpose(1, 2)
        one, plain = low.expand(len(ups), -1, -1), ups.shape[2]
        keys = low.new_empty((len(ups), len(low), plain if shared else plain + high.shape[1]))
        torch.bmm(one, ups, out=keys[..., :plain])
        if not shared:
            keys[..., plain:] = high
        gathered = Gathered(keys, torch.bmm(one, downs), high if shared else None)
        own = spec if spec.sinks is None else replace(spec, sinks=spec.sinks[these])
        attend_long(q[:, these], out[:, these], own, ctx, arranged, gathered, pdl=pdl, hopper=hopper)


def last_tokens(ctx: ForwardContext) -> tuple[Tensor, ForwardContext]:
    """The last token of each sequence, and the context in which it attends as its sequence's only new one."""
    last = ctx.query_start[1:].long() - 1
    borders = torch.arange(len(last) + 1, dtype=torch.int32, device=last.device)
    return last, replace(ctx, query_start=borders, max_query=1)
