"""From config.json to GGUF metadata and tensor names: the inverse of `gguf_config` and `gguf_names`.
Owns: which families can be written. Must not know: tokenizers, how numbers become blocks, files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.checkpoint.gguf_names import (
    LAYER_PARTS,
    PLUS_ONE,
    SPECIAL_PARTS,
    STACKED_PARTS,
    TOP_PARTS,
    WOVEN,
    epsilon_key,
)
from tokenmill.core.errors import ModelError
from tokenmill.core.yarn import yarn_gain

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "ArceeForCausalLM": "arcee",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "Glm4ForCausalLM": "glm4",
    "GraniteForCausalLM": "granite",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "NemotronForCausalLM": "nemotron",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""Architectures that can be written. Settings that the format cannot express are refused below."""
_NORMED_COMMAND_R = 64
"""Layers from which llama.cpp looks for norms of queries and keys in a Command R."""
_ORIGINAL, _PART = "original_max_position_embeddings", "partial_rotary_factor"
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """Where a tensor goes: its name in the file, its number if it is one expert of a stack, and the changes that the
    format expects."""

    name: str
    expert: int | None = None
    heads: int = 0
    """Not 0: the rows of each of these heads are interleaved."""
    more: float = 0.0
    """This is added to every number."""


def architecture(config: Mapping[str, Any], path: str) -> str:
    """GGUF's name of the family. A ModelError says that there is none here."""
    listed = config.get("architectures")
    name = str(listed[0]) if isinstance(listed, list) and listed else "?"
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ModelError(f"{path}: {name} cannot be written as GGUF; these can: {', '.join(sorted(ARCHITECTURES))}.")
    return found


def place(name: str, arch: str, config: Mapping[str, Any], path: str) -> GgufPlace | None:
    """Where the tensor of this name goes. None: it is not written (a head that shares the embedding's matrix)."""
    if name == "lm_head.weight" and config.get("tie_word_embeddings"):
        return None
    base, _, kind = name.rpartition(".")
    more = 1.0 if arch in PLUS_ONE and name.endswith("norm.weight") else 0.0
    for theirs, ours in TOP_PARTS.items():
        if base == ours:
            return GgufPlace(f"{theirs}.{kind}", more=more)
    match = _LAYER_NAME.fullmatch(name)
    if match is not None:
        layer, part, kind = match.groups()
        if (expert := _EXPERT.fullmatch(part)) is not None:
            which = _MIXTRAL.get(expert[2], expert[2])
            for theirs, ours in STACKED_PARTS.items():
                if ours == which:
                    return GgufPlace(f"blk.{layer}.{theirs}.{kind}", int(expert[1]))
        part = "mlp.gate" if part == "block_sparse_moe.gate" else part
        special = SPECIAL_PARTS.get(arch, {})
        named = {ours: theirs for parts in (LAYER_PARTS, special) for theirs, ours in parts.items()}
        if (found := named.get(part)) is not None:
            heads = 0
            if arch in WOVEN and found in ("attn_q", "attn_k"):
                heads = config["num_attention_heads"]
                heads = heads if found == "attn_q" else config.get("num_key_value_heads") or heads
            return GgufPlace(f"blk.{layer}.{found}.{kind}", heads=heads, more=more)
    raise ModelError(f"{path}: the tensor {name!r} has no name in GGUF files of the family '{arch}'.")


def metadata_of(config: Mapping[str, Any], arch: str, path: str) -> dict[str, Any]:
    """The metadata that corresponds to this config.json."""
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or config["hidden_size"] // heads)
    rope = rope_of(config)
    own: dict[str, Any] = {
        "context_length": int(config["max_position_embeddings"]),
        "embedding_length": int(config["hidden_size"]),
        "block_count": int(config["num_hidden_layers"]),
        "feed_forward_length": int(config["intermediate_size"]),
        "attention.head_count": heads,
        "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        "attention.key_length": head,
        "attention.value_length": head,
        epsilon_key(arch): epsilon_of(config),
        "rope.dimension_count": int(head * (rope.get(_PART) or config.get(_PART) or 1.0)),
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "vocab_size": int(config["vocab_size"]),
        **_scaling(rope, path),
        **_experts(config),
        **_gemma(config, arch, path),
        **_own(config, arch, path),
    }
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        own["attention.sliding_window"] = int(window)
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in own.items()}}


def epsilon_of(config: Mapping[str, Any]) -> float | None:
    """What keeps norms from dividing by zero; None: the config says nothing."""
    said = [config[name] for name in _EPSILONS if config.get(name) is not None]
    return float(said[0]) if said else None


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings of full attention, wherever the config keeps them. (Of two spellings the older one counts.)"""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    found = dict(found.get("full_attention", found))
    if found.get(_ORIGINAL) is None and config.get(_ORIGINAL) is not None:
        found[_ORIGINAL] = config[_ORIGINAL]
    return found


def rope_divisors(config: Mapping[str, Any]) -> list[float] | None:
    """The divisors of Llama 3.1's frequencies, one per pair. The format stores them as a tensor."""
    rope = rope_of(config)
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or config["hidden_size"] // heads)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original, found = float(rope.get(_ORIGINAL) or config["max_position_embeddings"]), []
    for pair in range(head // 2):
        turns = original * theta ** (-2 * pair / head) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return found


def _scaling(rope: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type"))
    if kind in (None, "default", "llama3"):
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{path}: rope scaling {kind!r} cannot be written as GGUF here.")
    found: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if rope.get(_ORIGINAL) is not None:
        found["rope.scaling.original_context_length"] = int(rope[_ORIGINAL])
    for name in ("beta_fast", "beta_slow"):
        if rope.get(name) is not None:
            found[f"rope.scaling.yarn_{name}"] = float(rope[name])
    usual, gain = yarn_gain(rope["factor"]), rope.get("attention_factor")
    if gain is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        gain = yarn_gain(rope["factor"], rope["mscale"]) / yarn_gain(rope["factor"], rope["mscale_all_dim"])
    if kind == "yarn" and gain is not None and gain != usual:
        found["rope.scaling.attn_factor"] = float(gain) / usual
    return found


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    count = config.get("num_local_experts") or config.get("num_experts")
    if not count:
        return {}
    found = {"expert_count": int(count), "expert_used_count": int(config["num_experts_per_tok"])}
    if config.get("moe_intermediate_size"):
        found["expert_feed_forward_length"] = int(config["moe_intermediate_size"])
    return found


def _gemma(config: Mapping[str, Any], arch: str, path: str) -> dict[str, Any]:
    if arch not in ("gemma2", "gemma3"):
        return {}
    found: dict[str, Any] = {"attention.scale": float(config["query_pre_attn_scalar"]) ** -0.5}
    if arch == "gemma2":
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        return {**found, **{name: float(config[name]) for name in caps if config.get(name)}}
    if config.get("attn_logit_softcapping") or config.get("final_logit_softcapping"):
        raise ModelError(f"{path}: a Gemma 3 with capped logits cannot be written as GGUF.")
    parameters = config.get("rope_parameters") or {}
    local = parameters.get("sliding_attention", {}).get("rope_theta") or config.get("rope_local_base_freq") or 10000.0
    found["rope.freq_base_swa"] = float(local)
    found["attention.sliding_window_pattern"] = int(config.get("sliding_window_pattern") or 6)
    return found


def _own(config: Mapping[str, Any], arch: str, path: str) -> dict[str, Any]:
    """What one family alone says."""
    if arch == "command-r" and config.get("use_qk_norm") and int(config["num_hidden_layers"]) < _NORMED_COMMAND_R:
        raise ModelError(f"{path}: llama.cpp looks for norms of queries and keys ('use_qk_norm') in a Command R of "
                         f"{_NORMED_COMMAND_R} layers and more only; this one has fewer.")  # fmt: skip
    if arch == "granite":
        keys = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
                "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"}  # fmt: skip
        return {theirs: float(config[ours]) for theirs, ours in keys.items() if config.get(ours)}
    if arch in ("command-r", "cohere2") and config.get("logit_scale"):
        return {"logit_scale": float(config["logit_scale"])}
    if arch == "phi3" and config.get("original_max_position_embeddings"):
        return {"rope.scaling.original_context_length": int(config["original_max_position_embeddings"])}
    return {}
