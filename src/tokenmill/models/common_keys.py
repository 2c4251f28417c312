"""Config keys that many families share, with their usual defaults. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

POSITION_NAMES = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "model_max_length")
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,)}
NO_MLP_BIAS: dict[str, tuple[Any, ...]] = {"mlp_bias": (False,), "lm_head_bias": (False,)}
GATED: dict[str, Any] = {
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    **dict.fromkeys(ROPE),
}
MOE = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


def without(keys: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The same without these."""
    return {name: value for name, value in keys.items() if name not in names}


GPT_NEEDED = ("vocab_size", "n_embd", "n_head", "n_layer", "n_positions", "max_position_embeddings", "hidden_size",
              "num_hidden_layers", "num_attention_heads")  # fmt: skip
"""Sizes of the first families, under either name."""
