"""What Laguna and MiMo V2 Flash say of their layers in their own way: heads that differ from layer to layer, gates, and
the keys of published files. Owns: reading these. Must not know: tensors, how layers are built.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenmill.models.config import ModelConfig
from tokenmill.models.rules import Kind, layer_kind


def gated_by_head(c: ModelConfig) -> bool:
    """`gating`: has a gate a number for each head, or for each column?"""
    said = c.data.get("gating")
    if said not in (True, "per-head", "per-element") or (said == 1 and said is not True):
        raise c.refuse("gating", "is not supported (only true, 'per-head' or 'per-element').")
    return said != "per-element"


def listed_heads(c: ModelConfig, heads: Any, kind: Kind, index: int) -> Any:
    """`num_attention_heads_per_layer` lists the query heads of each layer."""
    counts = c.get("num_attention_heads_per_layer", list, [])
    if not counts:
        return heads
    if len(counts) != c.need("num_hidden_layers", int):
        raise c.refuse("num_attention_heads_per_layer", "has not one entry for each of num_hidden_layers.")
    own = ModelConfig({"num_attention_heads_per_layer": counts[index]})
    return replace(heads, heads=own.need("num_attention_heads_per_layer", int))


def mimo_layers(c: ModelConfig, index: int) -> Kind:
    """The first layer and every sixth one see everything, unless `layer_types` says otherwise."""
    default = "sliding_attention" if index and (index + 1) % 6 else "full_attention"
    name = layer_kind(c, index, default)
    return Kind() if name == "full_attention" else Kind(c.need("sliding_window", int), True, name)


def mimo_heads(c: ModelConfig, heads: Any, kind: Kind, index: int) -> Any:
    """Values have a size of their own; layers with a window have twice the keys."""
    return replace(heads, kv_heads=heads.kv_heads * (2 if kind.window else 1), values=c.need("v_head_dim", int))


_MIMO_OLD = ("moe_layer_freq", "rope_theta", "swa_rope_theta", "partial_rotary_factor", "layernorm_epsilon")


def mimo_names(c: ModelConfig) -> dict[str, Any]:
    """Published files have lists of 0 and 1 for kinds of layers, and one key for each number of rotation; a window is
    told without the token itself."""
    found: dict[str, Any] = {}
    if c.has("sliding_window_size"):
        found["sliding_window"] = c.need("sliding_window_size", int) + 1
    if not c.has("hybrid_layer_pattern"):
        for name in _MIMO_OLD:
            if c.has(name):
                raise c.refuse(name, "is read in files with a 'hybrid_layer_pattern' alone.")
        return found
    heads, keys = c.need("num_attention_heads", int), c.get("num_key_value_heads", int, 4)
    same = {"swa_num_attention_heads": heads, "swa_num_key_value_heads": 2 * keys,
            "swa_head_dim": c.get("head_dim", int, 192), "swa_v_head_dim": c.get("v_head_dim", int, 128)}  # fmt: skip
    for name, value in same.items():
        if c.get(name, int, value) != value:
            raise c.refuse(name, f"is not supported (only {value}).")
    part = c.get("partial_rotary_factor", float, 0.334, low=0.0, high=1.0)
    bases = {"full_attention": c.get("rope_theta", float, 5e6),
             "sliding_attention": c.get("swa_rope_theta", float, 1e4)}  # fmt: skip
    return {
        **found,
        "layer_types": _flags(c, "hybrid_layer_pattern", ("full_attention", "sliding_attention")),
        "mlp_layer_types": _flags(c, "moe_layer_freq", ("dense", "sparse")) or c.data.get("mlp_layer_types"),
        "rms_norm_eps": c.get("layernorm_epsilon", float, c.get("rms_norm_eps", float, 1e-5)),
        "rope_parameters": {kind: {"rope_theta": base, "partial_rotary_factor": part} for kind, base in bases.items()},
        **dict.fromkeys(("rope_theta", "partial_rotary_factor")),
    }


def _flags(c: ModelConfig, name: str, kinds: tuple[str, str]) -> list[str]:
    """Kinds of layers from a list with a 0 or a 1 for each."""
    flags = c.get(name, list, [])
    if any(isinstance(flag, bool) or flag not in (0, 1) for flag in flags):
        raise c.refuse(name, "must hold a 0 or 1 for each of num_hidden_layers.")
    return [kinds[flag] for flag in flags]
