"""From GGUF tensor names to the names that models ask for. Owns: the table, and how the converter's changes are undone:
Llama's interleaved query and key rows, Gemma's norms stored plus one, experts stacked in one tensor.
Must not know: metadata other than the config made from it, tensor data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenmill.checkpoint.gguf_file import TensorInfo
from tokenmill.checkpoint.gguf_layers import LAYERS, places
from tokenmill.checkpoint.gguf_layers_older import older_names
from tokenmill.checkpoint.gguf_source import Given, Joined, Places, TensorSource, stacked
from tokenmill.core.errors import ModelError

TOP_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
STACKED_PARTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_HYBRID = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_STATES = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(ssm_a|ssm_dt\.bias|ssm_conv1d\.weight|ffn_gate_inp_shexp\.weight)")
WOVEN = ("llama", "arcee", "granite", "mistral3", "smollm3")
"""Architectures whose converter interleaves the rows of queries and keys."""
PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
"""Architectures whose converter adds one to the weights of norms."""
_LAYER_NORMS = ("cohere2", "command-r", "jais2", "nemotron", "starcoder2")
"""Architectures whose norms subtract the mean."""
SPECIAL_PARTS: dict[str, dict[str, str]] = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "apertus": {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "exaone4": _AFTER,
    "glm4": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "hunyuan-dense": {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    "olmo2": _AFTER,
    "qwen35": _HYBRID,
    "qwen35moe": _HYBRID,
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
}
IN_CONFIG = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that are read into the config."""
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,4})\.([a-z_0-9]+)(?:\.(\d{1,4}))?\.(weight|bias)")


def epsilon_key(arch: str) -> str:
    """Where files of this architecture say what keeps norms from dividing by zero."""
    return f"attention.{'layer_norm_epsilon' if arch in _LAYER_NORMS else 'layer_norm_rms_epsilon'}"


def name_table(
    arch: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, TensorSource | Joined | Given]:
    """Our name -> where the tensor lies. A tensor that means nothing here keeps its own name, and the model then
    refuses it."""
    found: dict[str, TensorSource | Joined] = {}
    names = LAYERS.get(arch) or older_names(arch, config)
    for name, info in tensors.items():
        if name in IN_CONFIG:
            continue
        given = places(names, name, tensors, config) if names else _places(arch, name, info, config)
        for ours, source in given:
            if ours in found:
                raise ModelError(f"Tensors {found[ours].info.name!r} and {name!r} both mean {ours!r}.")
            found[ours] = source
    return {**found, **_activations(config)}


def _activations(config: Mapping[str, Any]) -> dict[str, Given]:
    """The parameters of each layer's activation, which are read into the config."""
    return {f"model.layers.{layer}.mlp.act_fn.{name}": Given((value,), (1,) if name.startswith("alpha") else ())
            for name, values in config.get("_xielu", {}).items() for layer, value in enumerate(values)}  # fmt: skip


def _of_states(name: str, info: TensorInfo) -> Places:
    """Tensors of gated delta layers that the converter changed. Empty: this tensor is none of them."""
    match = _STATES.fullmatch(name)
    if match is None:
        return []
    at, part = f"model.layers.{match[1]}", match[2]
    if part == "ssm_a":
        return [(f"{at}.linear_attn.A_log", TensorSource(info, negated_exp=True))]
    if part == "ssm_dt.bias":
        return [(f"{at}.linear_attn.dt_bias", TensorSource(info))]
    if part == "ssm_conv1d.weight" and len(info.shape) == 2:
        return [(f"{at}.linear_attn.conv1d.weight", TensorSource(info, lifted=(info.shape[0], 1, info.shape[1])))]
    if part == "ffn_gate_inp_shexp.weight":
        return [(f"{at}.mlp.shared_expert_gate.weight", TensorSource(info, lifted=(1, info.shape[-1])))]
    return []


def _places(arch: str, name: str, info: TensorInfo, config: Mapping[str, Any]) -> Places:
    less = 1.0 if arch in PLUS_ONE and name.endswith("norm.weight") else 0.0
    if arch in ("qwen35", "qwen35moe"):
        if (layer := name.split(".")[1]).isdigit() and int(layer) >= config["num_hidden_layers"]:
            return []  # Layers that draft later tokens.
        if found := _of_states(name, info):
            return found
        less = 1.0 if name.endswith("norm.weight") and "ssm_norm" not in name else 0.0
    base, _, kind = name.rpartition(".")
    if base in TOP_PARTS and kind in ("weight", "bias"):
        return [(f"{TOP_PARTS[base]}.{kind}", TensorSource(info, less=less))]
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return [(name, TensorSource(info))]
    layer, part, expert, kind = match.groups()
    at, mixtral = f"model.layers.{layer}", config.get("model_type") == "mixtral"
    inside = f"{at}.block_sparse_moe" if mixtral else f"{at}.mlp"
    if part in STACKED_PARTS and expert is None:
        last = _MIXTRAL[STACKED_PARTS[part]] if mixtral else STACKED_PARTS[part]
        return stacked(f"{inside}.experts", last, info, kind)
    if expert is not None:
        if not mixtral or f"{part}_exps" not in STACKED_PARTS:
            return [(name, TensorSource(info))]
        return [
            (f"{inside}.experts.{int(expert)}.{_MIXTRAL[STACKED_PARTS[f'{part}_exps']]}.{kind}", TensorSource(info))
        ]
    if part == "attn_sinks" and kind == "weight":
        return [(f"{at}.self_attn.sinks", TensorSource(info))]
    ours = {**LAYER_PARTS, **SPECIAL_PARTS.get(arch, {})}.get(part)
    if ours is None:
        return [(name, TensorSource(info))]
    if mixtral and part == "ffn_gate_inp":
        return [(f"{inside}.gate.{kind}", TensorSource(info))]
    heads = 0
    if arch in WOVEN and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    return [(f"{at}.{ours}.{kind}", TensorSource(info, heads=heads, less=less))]
