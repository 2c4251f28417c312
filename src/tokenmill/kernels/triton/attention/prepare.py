"""Between the q/k/v product and attention. Owns: the launch that norms and rotates heads and stores keys and values.

A program takes one token and HEADS heads of one kind (query, key or value). Must not know: tables; slots say where.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, NormSpec
from tokenmill.kernels.triton.attention.stored import columns, kinds_of, put, scale_strides, scales_of
from tokenmill.kernels.triton.common import begin, pow2, wait
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


@triton.jit
def rotated(
    rows, norm_ptr, cos_ptr, sin_ptr, position, real, d, eps,
    D: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    ROPE: tl.constexpr, START: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """rows [HEADS, 1] pointers to heads -> the heads [HEADS, BLOCK] in float32, normed and rotated."""
    inside = real & (d < D)[None, :]
    x = tl.load(rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)
        x = x * scale[:, None] * (tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32) + OFFSET)[None, :]
    if ROPE:
        HALF: tl.constexpr = DIM // 2
        r = d - START
        turns = (r >= 0) & (r < DIM)
        mate, angle, sign = mates(r, DIM, INTERLEAVED)
        mate = tl.where(turns, START + mate, 0)
        other = tl.load(rows + mate[None, :], mask=real & turns[None, :], other=0.0).to(tl.float32)
        if NORM:
            g = tl.load(norm_ptr + mate, mask=turns, other=0.0).to(tl.float32) + OFFSET
            other = other * scale[:, None] * g[None, :]
        cos = tl.load(cos_ptr + position * HALF + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + position * HALF + angle, mask=turns, other=0.0)
        x = x * cos[None, :] + other * (sign * sin)[None, :]
    return x


@triton.jit
def _prepare_kernel(
    qkv_ptr, q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, slot_ptr, position_ptr,
    q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    qkv_stride, key_block, key_head, key_row, value_block, value_head, value_row,
    key_scale_block, key_scale_head, key_scale_row, value_scale_block, value_scale_head, value_scale_row,
    q_eps, k_eps,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, Q_OFFSET: tl.constexpr, K_OFFSET: tl.constexpr,
    ROPE: tl.constexpr, START: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
        x = rotated(rows, q_norm_ptr, cos_ptr, sin_ptr, position, real, d, q_eps,
                     D, Q_NORM, Q_OFFSET, ROPE, START, DIM, INTERLEAVED)  # fmt: skip
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
            x = rotated(rows, k_norm_ptr, cos_ptr, sin_ptr, position, real[:, None], d, k_eps,
                         D, K_NORM, K_OFFSET, ROPE, START, DIM, INTERLEAVED)  # fmt: skip
            put(x.to(qkv_ptr.dtype.element_ty).to(tl.float32), real,
                key_ptr + block * key_block + head * key_head + offset * key_row,
                key_scale_ptr + block * key_scale_block + head * key_scale_head + offset * key_scale_row,
                K_KIND, HEADS, BLOCK, D)  # fmt: skip
        else:
            v_head = (part - Q_PARTS - K_PARTS) * HEADS + tl.arange(0, HEADS)
            v = columns(BLOCK_V, DV, V_KIND.GROUPS)
            v_real = v_head < KV
            val = tl.load(source + (H + KV) * D + v_head[:, None] * DV + v[None, :],
                          mask=v_real[:, None] & (v < DV)[None, :], other=0.0)  # fmt: skip
            put(val.to(tl.float32), v_real,
                value_ptr + block * value_block + v_head * value_head + offset * value_row,
                value_scale_ptr + block * value_scale_block + v_head * value_scale_head + offset * value_scale_row,
                V_KIND, HEADS, BLOCK_V, DV)  # fmt: skip


def can_prepare(spec: AttentionSpec) -> bool:
    """Separate keys and values, and rms norms per head."""
    return spec.kv.kind != "latent" and _per_head(spec.q_norm, spec) and _per_head(spec.k_norm, spec)


def _per_head(norm: NormSpec | None, spec: AttentionSpec) -> bool:
    return norm is None or (norm.kind == "rms" and norm.bias is None and norm.weight.shape[0] == spec.kv.key_dim)


@triton.jit
def _norm_rows_kernel(
    x_ptr, out_ptr, q_norm_ptr, q_norm_bias_ptr, k_norm_ptr, k_norm_bias_ptr, x_stride, q_norm_eps, k_norm_eps,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr, Q_NORM_BIAS: tl.constexpr, Q_NORM_OFFSET: tl.constexpr,
    K_NORM: tl.constexpr, K_NORM_BIAS: tl.constexpr, K_NORM_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs of a token take Q_SIZE numbers of the queries each, then K_SIZE of the keys; the last one copies the
    values. Q_NORM, K_NORM: the kind of norm, "none": they are copied."""
    begin(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    wait(PDL)
    source, target = x_ptr + token * x_stride, out_ptr + token * (Q + K + V)
    if part < Q // Q_SIZE:
        at, real = part * Q_SIZE + d, d < Q_SIZE
        x = tl.load(source + at, mask=real, other=0.0).to(tl.float32)
        if Q_NORM != "none":
            x = norm_stored(x, q_norm_ptr, q_norm_bias_ptr, d, real, Q_SIZE, q_norm_eps,
                            Q_NORM, Q_NORM_BIAS, Q_NORM_OFFSET)  # fmt: skip
        tl.store(target + at, x.to(out_ptr.dtype.element_ty), mask=real)
    elif part < Q // Q_SIZE + K // K_SIZE:
        at, real = Q + (part - Q // Q_SIZE) * K_SIZE + d, d < K_SIZE
        x = tl.load(source + at, mask=real, other=0.0).to(tl.float32)
        if K_NORM != "none":
            x = norm_stored(x, k_norm_ptr, k_norm_bias_ptr, d, real, K_SIZE, k_norm_eps,
                            K_NORM, K_NORM_BIAS, K_NORM_OFFSET)  # fmt: skip
        tl.store(target + at, x.to(out_ptr.dtype.element_ty), mask=real)
    else:
        tl.store(target + Q + K + d, tl.load(source + Q + K + d, mask=d < V), mask=d < V)


def norm_rows(qkv: Tensor, spec: AttentionSpec, *, pdl: bool) -> tuple[Tensor, AttentionSpec]:
    """Norms that `prepare_qkv` has not (of all heads of a row, with a bias, of another kind), in one launch."""
    heads, width = spec.kv.heads, spec.kv.key_dim
    queries, keys, values = spec.heads * width, heads * width, heads * spec.kv.value_dim
    q, k = (None if _per_head(norm, spec) else norm for norm in (spec.q_norm, spec.k_norm))
    q_size, k_size = queries if q is None else q.weight.shape[0], keys if k is None else k.weight.shape[0]
    out = torch.empty((len(qkv), queries + keys + values), dtype=qkv.dtype, device=qkv.device)
    block = pow2(max(q_size, k_size, values))
    _norm_rows_kernel[(len(qkv), queries // q_size + keys // k_size + 1)](
        qkv, out, x_stride=qkv.stride(0), Q=queries, K=keys, V=values, Q_SIZE=q_size, K_SIZE=k_size, BLOCK=block,
        **stored_norm(q, "q_norm"), **stored_norm(k, "k_norm"), PDL=pdl,
        num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out, replace(spec, q_norm=spec.q_norm if q is None else None, k_norm=spec.k_norm if k is None else None)


def prepare_qkv(qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext, *, pdl: bool) -> Tensor:
    """qkv [T, (H + Hkv) * Dk + Hkv * Dv] -> q [T, H, Dk]; keys and values go to their slots. Latent: no values."""
    tokens, kv, rope = qkv.shape[0], ctx.kv[spec.layer], spec.rope
    width, heads = spec.kv.key_dim, spec.kv.heads
    q = torch.empty((tokens, spec.heads, width), dtype=qkv.dtype, device=qkv.device)
    together = max(1, min(8, pow2(heads), 1024 // pow2(width)))
    stored = 1 if spec.kv.kind == "latent" else 2
    parts = triton.cdiv(spec.heads, together) + stored * triton.cdiv(heads, together)
    q_norm, k_norm = spec.q_norm, spec.k_norm
    _prepare_kernel[(tokens, parts)](
        qkv, q, kv.key, kv.value, *scales_of(kv), ctx.groups[spec.group].slots, ctx.positions,
        None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
        None if rope is None else rope.cos, None if rope is None else rope.sin,
        qkv.stride(0), *kv.key.stride()[:3], *kv.value.stride()[:3], *scale_strides(kv),
        0.0 if q_norm is None else q_norm.eps, 0.0 if k_norm is None else k_norm.eps,
        H=spec.heads, KV=heads, D=width, DV=spec.kv.value_dim, SIZE=ctx.block_size,
        HEADS=together, BLOCK=pow2(width), BLOCK_V=pow2(spec.kv.value_dim),
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        Q_OFFSET=0.0 if q_norm is None else q_norm.offset, K_OFFSET=0.0 if k_norm is None else k_norm.offset,
        ROPE=rope is not None, START=0 if rope is None else rope.start, DIM=0 if rope is None else rope.dim,
        INTERLEAVED=rope is not None and rope.interleaved, **kinds_of(kv),
        PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return q
