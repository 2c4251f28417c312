"""What few families do to queries, keys and values between their product and attention. Owns: those operations.

Each takes qkv [T, q | k | v], which nobody else reads, changes a part of it and returns it; the others are not copied.
Plain torch, element by element: a row's numbers do not depend on its company. Knows nothing of families.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, NormSpec, RopeSpec

Touch = Callable[[Tensor, ForwardContext], Tensor]
"""(qkv, context) -> qkv, the same tensor or another one."""


def clip(limit: float) -> Touch:
    """Clip every entry at +-limit."""
    return lambda qkv, ctx: qkv.clamp(-limit, limit)


def scale_values(spec: AttentionSpec, factor: float) -> Touch:
    """Multiply values, which lie behind queries and keys, by a number."""
    at = (spec.heads + spec.kv.heads) * spec.kv.key_dim

    def scaled(qkv: Tensor, ctx: ForwardContext) -> Tensor:
        qkv[:, at:].mul_(factor)
        return qkv

    return scaled


def temper(table: Tensor, width: int) -> Touch:
    """Multiply queries (the first `width` entries) by table [positions]."""

    def scaled(qkv: Tensor, ctx: ForwardContext) -> Tensor:
        q = qkv[:, :width]
        q.copy_(q.float() * table[ctx.positions][:, None])
        return qkv

    return scaled


def temperatures(count: int, beta: float, span: float, offset: float) -> Tensor:
    """1 + beta * log(1 + floor((position + offset) / span)) [count] in float32."""
    positions = torch.arange(count, dtype=torch.float64)
    return (1.0 + beta * torch.log1p(torch.floor((positions + offset) / span))).float()


def turn(rope: RopeSpec, spec: AttentionSpec) -> Touch:
    """Rotate queries and keys (if norms come after the rotation)."""
    heads, width = spec.heads + spec.kv.heads, spec.kv.key_dim

    def turned(qkv: Tensor, ctx: ForwardContext) -> Tensor:
        part = qkv[:, : heads * width].view(-1, heads, width)
        part.copy_(rotate(part, rope, ctx.positions))
        return qkv

    return turned


def rotate(x: Tensor, rope: RopeSpec, positions: Tensor) -> Tensor:
    """x [T, heads, width]: the first rope.dim entries of every head rotate."""
    cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None]
    part = x[..., : rope.dim].float()
    if rope.interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = part.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., rope.dim :]), dim=-1)


def own_norms(norm: NormSpec, weights: Tensor) -> Touch:
    """Norm query and key heads, each with weights of its own [heads + kv heads, width]."""
    heads, width = weights.shape

    def normed(qkv: Tensor, ctx: ForwardContext) -> Tensor:
        part = qkv[:, : heads * width]
        part.view(-1, heads, width).copy_(
            ctx.kernels.norm(part.reshape(-1, width), norm).view(-1, heads, width) * weights
        )
        return qkv

    return normed


def norm_values(spec: AttentionSpec, norm: NormSpec, *, same: bool) -> Touch:
    """The norm of values, which has no weights. `same`: values are the keys before the keys are normed."""
    start, width = spec.heads * (dim := spec.kv.key_dim), spec.kv.heads * dim

    def touched(qkv: Tensor, ctx: ForwardContext) -> Tensor:
        values = qkv[:, start : start + width] if same else qkv[:, start + width :]
        normed = ctx.kernels.norm(values.reshape(-1, dim), norm).view(values.shape)
        if same:
            return torch.cat((qkv, normed), dim=1)
        values.copy_(normed)
        return qkv

    return touched


def row_norms(q: NormSpec | None, k: NormSpec | None) -> Touch:
    """Norm all queries together, and all keys together (if something comes between norm and rotation)."""
    assert q is not None and k is not None
    first, second = q.weight.shape[0], k.weight.shape[0]

    def normed(qkv: Tensor, ctx: ForwardContext) -> Tensor:
        parts = qkv.split([first, second, qkv.shape[1] - first - second], dim=1)
        return torch.cat((ctx.kernels.norm(parts[0], q), ctx.kernels.norm(parts[1], k), parts[2]), dim=1)

    return normed
