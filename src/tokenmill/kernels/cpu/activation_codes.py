"""The numbers by which csrc knows activations."""

from __future__ import annotations

ACTS: dict[str | None, int] = {
    None: 0,
    "silu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "relu": 4,
    "silu_mul": 5,
    "gelu_mul": 6,
    "gelu_tanh_mul": 7,
    "relu2": 8,
    "oai_swiglu": 9,
    "clipped_silu_mul": 10,
}
GATED = frozenset({"silu_mul", "gelu_mul", "gelu_tanh_mul", "oai_swiglu", "clipped_silu_mul"})
"""Those of [gate | up]."""
