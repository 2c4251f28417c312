"""What stands before latent attention of few tokens, in one launch. Owns: carrying queries into the latent space,
rotating their other part, and storing the vectors.

A program has BN of a head's latent numbers for BT tokens; the first one of a head also rotates, and one more program
stores. So the three are done at once, and nothing is joined in memory between them. Must not know: attention itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, NormSpec
from tokenmill.kernels.triton.attention.heads import MOST, can_multiply_heads, rows_of_tile, tokens_of_tile
from tokenmill.kernels.triton.attention.latent import serves
from tokenmill.kernels.triton.attention.prepare import mates
from tokenmill.kernels.triton.common import INTERPRETED, begin, pow2, product, wait

_WIDEST = 256
"""The longest part of a head that is multiplied in one piece."""


@triton.jit
def _turned(rows, real, r, position, cos_ptr, sin_ptr, R: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """R numbers at each of rows [BT, 1], rotated by their tokens' positions, in float32."""
    HALF: tl.constexpr = R // 2
    mate, angle, sign = mates(r, R, INTERLEAVED)
    mask = real[:, None] & (r < R)[None, :]
    x = tl.load(rows + r[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROPE:
        spot = position[:, None] * HALF + angle[None, :]
        cos = tl.load(cos_ptr + spot, mask=mask, other=1.0)
        sin = tl.load(sin_ptr + spot, mask=mask, other=0.0) * sign[None, :]
        x = x * cos + tl.load(rows + mate[None, :], mask=mask, other=0.0).to(tl.float32) * sin
    return x


@triton.jit(do_not_specialize=["T", "q_token", "low_token", "high_token"])
def _absorb_kernel(
    q_ptr, up_ptr, low_ptr, high_ptr, norm_ptr, out_ptr, key_ptr, slot_ptr, position_ptr, cos_ptr, sin_ptr, temper_ptr,
    T, q_token, low_token, high_token, key_block, key_row, eps,
    H: tl.constexpr, D: tl.constexpr, L: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, TEMPER: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    TILES: tl.constexpr = (L + BN - 1) // BN
    head = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    there = t < T
    r = tl.arange(0, BR)
    if head == H:  # the programs that store
        low = tl.arange(0, BL)[None, :]
        if NORM:
            gain = tl.load(norm_ptr + low, mask=low < L, other=0.0).to(tl.float32) + OFFSET
        wait(PDL)
        token = tl.program_id(1) * BT + tile
        for at in range(token, tl.minimum(T, (tl.program_id(1) + 1) * BT), TILES):
            one = at + tl.arange(0, 1)
            slot = tl.load(slot_ptr + one)
            page = key_ptr + (slot // SIZE * key_block + slot % SIZE * key_row)[:, None]
            x = tl.load(low_ptr + one[:, None].to(tl.int64) * low_token + low, mask=low < L, other=0.0)
            if NORM:
                wide = x.to(tl.float32)
                wide = wide / tl.sqrt(tl.sum(wide * wide, axis=1)[:, None] / L + eps) * gain
                x = wide.to(low_ptr.dtype.element_ty)
            tl.store(page + low, x.to(key_ptr.dtype.element_ty), mask=low < L)
            y = _turned(high_ptr + one[:, None].to(tl.int64) * high_token, one < T, r, tl.load(position_ptr + one),
                        cos_ptr, sin_ptr, R, ROPE, INTERLEAVED)  # fmt: skip
            y = y.to(low_ptr.dtype.element_ty).to(key_ptr.dtype.element_ty)
            tl.store(page + L + r[None, :], y, mask=(r < R)[None, :])
        return
    n = tile * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    rows = up_ptr + (head.to(tl.int64) * L + n)[:, None] * D + d[None, :]
    w = tl.load(rows, mask=(n < L)[:, None] & (d < D)[None, :], other=0.0)
    wait(PDL)
    source = q_ptr + t.to(tl.int64) * q_token + head * (D + R)
    target = out_ptr + (t.to(tl.int64) * H + head) * (L + R)
    q = tl.load(source[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
    y = product(w, q, tl.zeros((BN, BT), dtype=tl.float32), WIDE)
    if TEMPER:
        by = tl.load(temper_ptr + tl.load(position_ptr + t, mask=there, other=0), mask=there, other=1.0)
        y = y * by[None, :]
    tl.store(target[None, :] + n[:, None], y.to(out_ptr.dtype.element_ty), mask=there[None, :] & (n < L)[:, None])
    if tile == 0:
        position = tl.load(position_ptr + t, mask=there, other=0)
        x = _turned(source[:, None] + D, there, r, position, cos_ptr, sin_ptr, R, ROPE, INTERLEAVED)
        if TEMPER:
            x = x * by[:, None]
        tl.store(target[:, None] + L + r[None, :], x.to(out_ptr.dtype.element_ty),
                 mask=there[:, None] & (r < R)[None, :])  # fmt: skip


def can_absorb(
    q: Tensor, vector: Sequence[Tensor], parts: Sequence[Tensor], spec: AttentionSpec, ctx: ForwardContext
) -> bool:
    """Few tokens q [T, H, D + R], whose vectors are stored as they are."""
    up, down = parts
    alike = all(x.dtype == q.dtype and x.stride(1) == 1 for x in vector)
    few = 0 < q.shape[0] <= MOST and up.shape[2] <= _WIDEST and q[0].is_contiguous()
    stored = ctx.kv[spec.layer].key_scale is None and serves(spec, ctx)
    return few and alike and stored and up.is_contiguous() and q.dtype == up.dtype and can_multiply_heads(q, down)


def absorb(
    q: Tensor, vector: Sequence[Tensor], up: Tensor, norm: NormSpec | None, spec: AttentionSpec, ctx: ForwardContext,
    *, pdl: bool,
) -> Tensor:  # fmt: skip
    """q [T, H, D + R], vectors' parts [T, L] and [T, R], up [H, L, D] -> queries [T, H, L + R], rotated where keys are;
    vectors go to their slots. norm: of the first part."""
    low, high = vector
    tokens, heads = q.shape[:2]
    kv, rope, latent, rest = ctx.kv[spec.layer], spec.rope, up.shape[1], high.shape[1]
    out = torch.empty((tokens, heads, latent + rest), dtype=q.dtype, device=q.device)
    block_t, block_n = tokens_of_tile(tokens), rows_of_tile(heads, latent)
    _absorb_kernel[((heads + 1) * triton.cdiv(latent, block_n), triton.cdiv(tokens, block_t))](
        q, up, low, high, None if norm is None else norm.weight, out, kv.key, ctx.groups[spec.group].slots,
        ctx.positions, None if rope is None else rope.cos, None if rope is None else rope.sin, spec.touches.temper,
        tokens, q.stride(0), low.stride(0), high.stride(0), kv.key.stride(0), kv.key.stride(2),
        0.0 if norm is None else norm.eps,
        H=heads, D=up.shape[2], L=latent, R=rest, SIZE=ctx.block_size, BT=block_t, BN=block_n,
        BD=max(16, pow2(up.shape[2])), BL=pow2(latent), BR=pow2(rest), ROPE=rope is not None,
        INTERLEAVED=rope is not None and rope.interleaved, NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset, TEMPER=spec.touches.temper is not None,
        WIDE=INTERPRETED or q.dtype == torch.float32, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
