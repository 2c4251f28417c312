"""The sizes of the demo's decoders, and what follows from them. Owns: shapes and counts. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; `experts` 0 means a dense feed-forward part."""

    vocab: int = 6144
    dim: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 768
    qk_norm: bool = True
    experts: int = 0
    top_k: int = 2
    theta: float = 100000.0
    positions: int = 8192


MAIN = Shape()
DRAFT = Shape(dim=160, layers=2, heads=2, kv_heads=1, ffn=448, qk_norm=False)
# Six layers: with four, one JSON answer in six copied a wrong key or value.
MOE = Shape(dim=128, layers=6, heads=2, kv_heads=1, ffn=128, experts=8, positions=2048)
TEXT = Shape(dim=128, layers=6, heads=2, kv_heads=1, ffn=384, qk_norm=False, positions=2048)
TINY = Shape(dim=64, layers=2, heads=2, kv_heads=1, head_dim=32, ffn=128)


def parameters(s: Shape) -> int:
    """How many numbers a decoder of this shape learns; embedding and head are one matrix."""
    attention = 2 * s.dim * s.head_dim * (s.heads + s.kv_heads)
    inner = 3 * s.dim * s.ffn * max(s.experts, 1) + s.experts * s.dim
    norms = 2 * s.dim + (2 * s.head_dim if s.qk_norm else 0)
    return s.vocab * s.dim + s.layers * (attention + inner + norms) + s.dim
