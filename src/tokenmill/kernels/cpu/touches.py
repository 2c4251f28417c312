"""What csrc does not do to new queries, keys and values, and few families want. Owns: those operations, in plain torch.

Element by element, so a row's numbers do not depend on its company. The product, which nobody else reads, is changed in
place: the other parts are not copied. Must not know: csrc, families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, NormSpec, Touches
from tokenmill.kernels.pointwise import rotate, tempered

Norm = Callable[[Tensor, NormSpec], Tensor]


def plain(spec: AttentionSpec) -> AttentionSpec:
    """What csrc is told: norms of all heads alike, before the rotation, and nothing else."""
    touches = spec.touches
    norms = (None, None) if touches.clip else (touches.q_norm, touches.k_norm)
    q, k = (None if norm is None or norm.weight.ndim == 2 else norm for norm in norms)
    return replace(spec, touches=Touches(q, k), rope=None if touches.late else spec.rope)


def bare(norm: NormSpec | None) -> NormSpec | None:
    """A norm of heads that have weights of their own, without these."""
    if norm is None or norm.weight.ndim == 1:
        return None
    return replace(norm, weight=torch.ones_like(norm.weight[0]))


class HeadTouches:
    """What is left to torch of one layer."""

    __slots__ = ("bare", "spec")

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.bare = bare(spec.touches.q_norm), bare(spec.touches.k_norm)

    def before(self, qkv: Tensor, positions: Tensor, norm: Norm) -> Tensor:
        """qkv as csrc prepares it."""
        spec, touches, width = self.spec, self.spec.touches, self.spec.kv.key_dim
        ends = spec.heads * width, (spec.heads + spec.kv.heads) * width
        if touches.v_norm is not None or touches.values == "keys":
            qkv = self._values(qkv, ends, norm)
        for start, end, one, own in zip((0, ends[0]), ends, self.bare, (touches.q_norm, touches.k_norm), strict=True):
            if one is not None and own is not None:
                part = qkv[:, start:end]
                made = norm(part.reshape(-1, width), one).view(len(part), -1, width)
                part.view(len(part), -1, width).copy_(made * own.weight)
            elif touches.clip and own is not None:
                part = qkv[:, start:end]
                part.copy_(norm(part.reshape(-1, own.weight.shape[0]), own).view(part.shape))
        if touches.clip:
            qkv = qkv.clamp(-touches.clip, touches.clip)
        if touches.factor != 1.0:
            qkv[:, -spec.kv.heads * spec.kv.value_dim :].mul_(touches.factor)
        if touches.late and spec.rope is not None:
            part = qkv[:, : ends[1]].view(len(qkv), -1, width)
            part.copy_(rotate(part, spec.rope, positions))
        return qkv

    def _values(self, qkv: Tensor, ends: tuple[int, int], norm: Norm) -> Tensor:
        touches, width = self.spec.touches, self.spec.kv.value_dim
        same = touches.values == "keys"
        values = qkv[:, ends[0] : ends[1]] if same else qkv[:, ends[1] :]
        if touches.v_norm is not None:
            made = norm(values.reshape(-1, width), touches.v_norm).view(values.shape)
            if not same:
                values.copy_(made)
                return qkv
            values = made
        return torch.cat((qkv, values), dim=1)

    def queries(self, x: Tensor, positions: Tensor, norm: Norm) -> Tensor:
        """Queries alone, x [T, H * D] -> [T, H, D], normed and rotated."""
        spec, touches = self.spec, self.spec.touches
        q = x.view(len(x), spec.heads, -1)
        if touches.late and spec.rope is not None:
            q = rotate(q, spec.rope, positions)
        if touches.q_norm is not None:
            one = self.bare[0]
            q = norm(q, touches.q_norm) if one is None else norm(q, one) * touches.q_norm.weight
        if not touches.late and spec.rope is not None:
            q = rotate(q, spec.rope, positions)
        return tempered(q, touches.temper, positions)
