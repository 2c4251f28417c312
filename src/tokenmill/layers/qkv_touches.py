"""What few families do to queries, keys and values between their product and attention, and attention itself does not
(what it does: compute/descriptors.py, Touches). Owns: those operations.

Each takes qkv [T, q | k | v], which nobody else reads, changes a part of it and returns it; the others are not copied.
Plain torch, element by element: a row's numbers do not depend on its company. Knows nothing of families.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, NormSpec

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


def temperatures(count: int, beta: float, span: float, offset: float) -> Tensor:
    """1 + beta * log(1 + floor((position + offset) / span)) [count] in float32."""
    positions = torch.arange(count, dtype=torch.float64)
    return (1.0 + beta * torch.log1p(torch.floor((positions + offset) / span))).float()


def row_norms(q: NormSpec | None, k: NormSpec | None) -> Touch:
    """Norm all queries together, and all keys together (if something comes between norm and rotation)."""
    assert q is not None and k is not None
    first, second = q.weight.shape[0], k.weight.shape[0]

    def normed(qkv: Tensor, ctx: ForwardContext) -> Tensor:
        parts = qkv.split([first, second, qkv.shape[1] - first - second], dim=1)
        return torch.cat((ctx.kernels.norm(parts[0], q), ctx.kernels.norm(parts[1], k), parts[2]), dim=1)

    return normed
