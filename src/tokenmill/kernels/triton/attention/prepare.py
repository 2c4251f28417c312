"""Between the q/k/v product and attention. Owns: the launch that norms and rotates heads and stores keys and values.

A program takes one token and HEADS heads of one kind (query, key or value). Must not know: tables; slots say where.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, NormSpec, Touches
from tokenmill.kernels.triton.attention.stored import columns, kinds_of, put, scale_strides, scales_of
from tokenmill.kernels.triton.common import begin, least_of, most_of, pow2, wait
from tokenmill.kernels.triton.pointwise import norm_stored, stored_norm


@triton.jit
def mates(r, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of each of DIM numbers that rotate: its partner, the angle of both, and the sign of the partner's part."""
    HALF: tl.constexpr = DIM // 2
    if INTERLEAVED:
        mate, angle, sign = r ^ 1, r // 2, tl.where(r % 2 == 0, -1.0, 1.0)
    else:
        mate, angle = tl.where(r < HALF, r + HALF, r - HALF), tl.where(r < HALF, r, r - HALF)
        sign = tl.where(r < HALF, -1.0, 1.0)
    return mate, angle, sign


class Way(NamedTuple):
    """How heads of one kind are prepared. NORM: "none", "rms" or "layer", before the rotation or (LATE) behind it; OWN:
    each head has weights of its own; CLIP: bounds of numbers behind an early norm, if they are not 0; TEMPER: a number
    for each position multiplies them last; FACTOR: so does this one."""

    NORM: Any = "none"
    OFFSET: float = 0.0
    OWN: bool = False
    LATE: bool = False
    ROPE: bool = False
    START: int = 0
    DIM: int = 0
    INTERLEAVED: bool = False
    TEMPER: bool = False
    CLIP: float = 0.0
    FACTOR: float = 1.0


def ways(spec: AttentionSpec) -> tuple[Way, Way, Way]:
    """Of queries, keys and values; norms are such that `can_prepare`."""
    touches, rope = spec.touches, spec.rope
    turns = (
        {} if rope is None else {"ROPE": True, "START": rope.start, "DIM": rope.dim, "INTERLEAVED": rope.interleaved}
    )

    def way(norm: NormSpec | None, **more: Any) -> Way:
        more["CLIP"] = touches.clip
        return Way(**more) if norm is None else Way(norm.kind, norm.offset, norm.weight.ndim == 2, touches.late, **more)

    q, k = way(touches.q_norm, **turns, TEMPER=touches.temper is not None), way(touches.k_norm, **turns)
    return q, k, way(touches.v_norm, FACTOR=touches.factor)


def epsilons(touches: Touches) -> tuple[float, float, float]:
    """Of the norms of queries, keys and values."""
    q, k, v = (0.0 if norm is None else norm.eps for norm in (touches.q_norm, touches.k_norm, touches.v_norm))
    return q, k, v


def weights(touches: Touches) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of the norms of queries, keys and values."""
    q, k, v = (None if norm is None else norm.weight for norm in (touches.q_norm, touches.k_norm, touches.v_norm))
    return q, k, v


@triton.jit
def _gains(norm_ptr, head, at, mask, D: tl.constexpr, WAY: tl.constexpr):
    """The weights of numbers `at` of heads, [1, BLOCK] or [HEADS, BLOCK]; mask [HEADS, BLOCK]."""
    if WAY.OWN:
        g = tl.load(norm_ptr + head * D + at[None, :], mask=mask, other=0.0)
    else:
        g = tl.load(norm_ptr + at, mask=(at >= 0) & (at < D), other=0.0)[None, :]
    return g.to(tl.float32) + WAY.OFFSET


@triton.jit
def head_norm(x, inside, norm_ptr, head, d, eps, D: tl.constexpr, WAY: tl.constexpr):
    """x [HEADS, BLOCK] -> normed; and by how much each head was moved and multiplied [HEADS, 1], but for weights."""
    mean = tl.zeros_like(x)
    if WAY.NORM == "layer":
        mean = (tl.sum(x, axis=1) / D)[:, None]
        x = tl.where(inside, x - mean, 0.0)
    scale = (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps))[:, None]
    return x * scale * _gains(norm_ptr, head, d, inside, D, WAY), mean, scale


@triton.jit
def clipped(x, CLIP: tl.constexpr):
    """x between -CLIP and CLIP, or as it is if that is 0."""
    if CLIP > 0.0:
        x = most_of(least_of(x, CLIP), -CLIP)
    return x


@triton.jit
def touched_values(x, inside, norm_ptr, head, d, eps, like, D: tl.constexpr, WAY: tl.constexpr):
    """Values x [HEADS, BLOCK] in float32, normed, clipped and multiplied, as numbers of the type `like`, in float32."""
    if WAY.NORM != "none":
        x, _, _ = head_norm(x, inside, norm_ptr, head, d, eps, D, WAY)
    return (clipped(x, WAY.CLIP) * WAY.FACTOR).to(like).to(tl.float32)


@triton.jit
def rotated(
    rows, head, norm_ptr, cos_ptr, sin_ptr, temper_ptr, position, real, d, eps, D: tl.constexpr, WAY: tl.constexpr
):
    """rows [HEADS, 1] pointers to heads -> the heads [HEADS, BLOCK] in float32, normed and rotated; head: their numbers
    [HEADS, 1]."""
    inside = real & (d < D)[None, :]
    x = tl.load(rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
    EARLY: tl.constexpr = WAY.NORM != "none" and not WAY.LATE
    if EARLY:
        x, mean, scale = head_norm(x, inside, norm_ptr, head, d, eps, D, WAY)
    x = clipped(x, WAY.CLIP)
    if WAY.ROPE:
        DIM: tl.constexpr = WAY.DIM
        START: tl.constexpr = WAY.START
        HALF: tl.constexpr = DIM // 2
        r = d - START
        turns = (r >= 0) & (r < DIM)
        mate, angle, sign = mates(r, DIM, WAY.INTERLEAVED)
        mate = tl.where(turns, START + mate, 0)
        other = tl.load(rows + mate[None, :], mask=real & turns[None, :], other=0.0).to(tl.float32)
        if EARLY:
            if WAY.NORM == "layer":
                other -= mean
            other = other * scale * _gains(norm_ptr, head, mate, real & turns[None, :], D, WAY)
        other = clipped(other, WAY.CLIP)
        cos = tl.load(cos_ptr + position * HALF + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + position * HALF + angle, mask=turns, other=0.0)
        x = x * cos[None, :] + other * (sign * sin)[None, :]
    if WAY.NORM != "none" and WAY.LATE:
        x, mean, scale = head_norm(x, inside, norm_ptr, head, d, eps, D, WAY)
    if WAY.TEMPER:
        x = x * tl.load(temper_ptr + position)
    return x


@triton.jit
def _prepare_kernel(
    qkv_ptr, q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, slot_ptr, position_ptr,
    q_norm_ptr, k_norm_ptr, v_norm_ptr, cos_ptr, sin_ptr, temper_ptr,
    qkv_stride, key_block, key_head, key_row, value_block, value_head, value_row,
    key_scale_block, key_scale_head, key_scale_row, value_scale_block, value_scale_head, value_scale_row,
    q_eps, k_eps, v_eps,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    Q_WAY: tl.constexpr, K_WAY: tl.constexpr, V_WAY: tl.constexpr, V_START: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """V_START: where values begin in a token's row."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_PARTS: tl.constexpr = (KV + HEADS - 1) // HEADS
    # Positions and slots are older than an ordinary launch (see decode.py).
    position = tl.load(position_ptr + token)
    slot = tl.load(slot_ptr + token)
    wait(PDL)
    source = qkv_ptr + token * qkv_stride
    if part < Q_PARTS:
        d = tl.arange(0, BLOCK)
        head = part * HEADS + tl.arange(0, HEADS)
        real = (head < H)[:, None]
        rows = source + head[:, None] * D
        x = rotated(rows, head[:, None], q_norm_ptr, cos_ptr, sin_ptr, temper_ptr, position, real, d, q_eps, D, Q_WAY)
        place = q_ptr + token * H * D + head[:, None] * D + d[None, :]
        tl.store(place, x.to(q_ptr.dtype.element_ty), mask=real & (d < D)[None, :])
    else:
        block = slot // SIZE
        offset = slot % SIZE
        if part < Q_PARTS + K_PARTS:
            d = columns(BLOCK, D, K_KIND.GROUPS)
            head = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)
            real = head < KV
            rows = source + H * D + head[:, None] * D
            x = rotated(rows, head[:, None], k_norm_ptr, cos_ptr, sin_ptr, temper_ptr, position, real[:, None], d,
                        k_eps, D, K_WAY)  # fmt: skip
            put(x.to(qkv_ptr.dtype.element_ty).to(tl.float32), real,
                key_ptr + block * key_block + head * key_head + offset * key_row,
                key_scale_ptr + block * key_scale_block + head * key_scale_head + offset * key_scale_row,
                K_KIND, HEADS, BLOCK, D)  # fmt: skip
        else:
            v_head = (part - Q_PARTS - K_PARTS) * HEADS + tl.arange(0, HEADS)
            v = columns(BLOCK_V, DV, V_KIND.GROUPS)
            v_real = v_head < KV
            inside = v_real[:, None] & (v < DV)[None, :]
            val = tl.load(source + V_START + v_head[:, None] * DV + v[None, :], mask=inside, other=0.0).to(tl.float32)
            val = touched_values(
                val, inside, v_norm_ptr, v_head[:, None], v, v_eps, qkv_ptr.dtype.element_ty, DV, V_WAY
            )
            put(val, v_real,
                value_ptr + block * value_block + v_head * value_head + offset * value_row,
                value_scale_ptr + block * value_scale_block + v_head * value_scale_head + offset * value_scale_row,
                V_KIND, HEADS, BLOCK_V, DV)  # fmt: skip


def can_prepare(spec: AttentionSpec) -> bool:
    """Separate keys and values, and norms per head without a bias."""
    touches = spec.touches
    norms = touches.q_norm, touches.k_norm, touches.v_norm
    return spec.kv.kind != "latent" and all(_per_head(norm, spec) for norm in norms)


def _per_head(norm: NormSpec | None, spec: AttentionSpec) -> bool:
    return norm is None or (norm.bias is None and norm.weight.shape[-1] == spec.kv.key_dim)


def can_norm_rows(spec: AttentionSpec) -> bool:
    """Can `norm_rows` do what `prepare_qkv` cannot? Norms of queries and keys come first, and values behind them."""
    touches = spec.touches
    first = not touches.late and touches.values == "own" and touches.v_norm is None
    return first and all(norm is None or norm.weight.ndim == 1 for norm in (touches.q_norm, touches.k_norm))


@triton.jit
def _norm_part(
    source, target, at, norm_ptr, bias_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """The SIZE numbers from `at` on, normed (NORM: the kind of norm; "none": copied)."""
    d = tl.arange(0, BLOCK)
    real = d < SIZE
    x = tl.load(source + at + d, mask=real, other=0.0).to(tl.float32)
    if NORM != "none":
        x = norm_stored(x, norm_ptr, bias_ptr, d, real, SIZE, eps, NORM, BIAS, OFFSET)
    tl.store(target + at + d, x.to(target.dtype.element_ty), mask=real)


@triton.jit
def _norm_rows_kernel(
    x_ptr, out_ptr, q_norm_ptr, q_norm_bias_ptr, k_norm_ptr, k_norm_bias_ptr, x_stride, q_norm_eps, k_norm_eps,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr, Q_NORM_BIAS: tl.constexpr, Q_NORM_OFFSET: tl.constexpr,
    K_NORM: tl.constexpr, K_NORM_BIAS: tl.constexpr, K_NORM_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs of a token take Q_SIZE numbers of the queries each, then K_SIZE of the keys; the last one copies the
    values."""
    begin(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    source, target = x_ptr + token * x_stride, out_ptr + token * (Q + K + V)
    QUERIES: tl.constexpr = Q // Q_SIZE
    if part < QUERIES:
        _norm_part(source, target, part * Q_SIZE, q_norm_ptr, q_norm_bias_ptr, q_norm_eps, Q_SIZE, BLOCK,
                   Q_NORM, Q_NORM_BIAS, Q_NORM_OFFSET)  # fmt: skip
    elif part < QUERIES + K // K_SIZE:
        _norm_part(source, target, Q + (part - QUERIES) * K_SIZE, k_norm_ptr, k_norm_bias_ptr, k_norm_eps, K_SIZE,
                   BLOCK, K_NORM, K_NORM_BIAS, K_NORM_OFFSET)  # fmt: skip
    else:
        d = tl.arange(0, BLOCK)
        tl.store(target + Q + K + d, tl.load(source + Q + K + d, mask=d < V), mask=d < V)


def norm_rows(qkv: Tensor, spec: AttentionSpec, *, pdl: bool) -> tuple[Tensor, AttentionSpec]:
    """Norms that `prepare_qkv` has not (of all heads of a row, with a bias, of another kind), in one launch."""
    heads, width = spec.kv.heads, spec.kv.key_dim
    queries, keys, values = spec.heads * width, heads * width, heads * spec.kv.value_dim
    touches = spec.touches
    q, k = (None if _per_head(norm, spec) else norm for norm in (touches.q_norm, touches.k_norm))
    q_size, k_size = queries if q is None else q.weight.shape[0], keys if k is None else k.weight.shape[0]
    out = torch.empty((len(qkv), queries + keys + values), dtype=qkv.dtype, device=qkv.device)
    block = pow2(max(q_size, k_size, values))
    _norm_rows_kernel[(len(qkv), queries // q_size + keys // k_size + 1)](
        qkv, out, x_stride=qkv.stride(0), Q=queries, K=keys, V=values, Q_SIZE=q_size, K_SIZE=k_size, BLOCK=block,
        **stored_norm(q, "q_norm"), **stored_norm(k, "k_norm"), PDL=pdl,
        num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    left = touches.q_norm if q is None else None, touches.k_norm if k is None else None
    return out, replace(spec, touches=replace(touches, q_norm=left[0], k_norm=left[1]))


def prepare_qkv(qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext, *, pdl: bool) -> Tensor:
    """qkv [T, (H + Hkv) * Dk + Hkv * Dv] -> q [T, H, Dk]; keys and values go to their slots. Latent: no values."""
    tokens, kv, rope, touches = qkv.shape[0], ctx.kv[spec.layer], spec.rope, spec.touches
    width, heads = spec.kv.key_dim, spec.kv.heads
    q = torch.empty((tokens, spec.heads, width), dtype=qkv.dtype, device=qkv.device)
    together = max(1, min(8, pow2(heads), 1024 // pow2(width)))
    stored = 0 if touches.values == "stored" else 1 if spec.kv.kind == "latent" else 2
    parts = triton.cdiv(spec.heads, together) + stored * triton.cdiv(heads, together)
    q_way, k_way, v_way = ways(spec)
    _prepare_kernel[(tokens, parts)](
        qkv, q, kv.key, kv.value, *scales_of(kv), ctx.groups[spec.group].slots, ctx.positions,
        *weights(touches), None if rope is None else rope.cos, None if rope is None else rope.sin, touches.temper,
        qkv.stride(0), *kv.key.stride()[:3], *kv.value.stride()[:3], *scale_strides(kv), *epsilons(touches),
        H=spec.heads, KV=heads, D=width, DV=spec.kv.value_dim, SIZE=ctx.block_size,
        HEADS=together, BLOCK=pow2(width), BLOCK_V=pow2(spec.kv.value_dim),
        Q_WAY=q_way, K_WAY=k_way, V_WAY=v_way, V_START=value_start(spec), **kinds_of(kv),
        PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return q


def value_start(spec: AttentionSpec) -> int:
    """Where values begin in a token's row."""
    return (spec.heads + (0 if spec.touches.values == "keys" else spec.kv.heads)) * spec.kv.key_dim
