"""From GGUF metadata to what config.json would hold, for further mixtures of experts, Gemma 3n, BitNet and MiniCPM 3.

Owns: the keys of these families. Numbers that are not in the format are those of every published model of the family,
and are written here. Must not know: how models are built, tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tokenmill.checkpoint.gguf_config_layers import (
    SIGMOID,
    Config,
    read_experts,
    read_factors,
    read_gates_scale,
    read_heads,
    read_sizes,
    rows_of,
    some,
)
from tokenmill.checkpoint.gguf_meta import Factors, Meta, Tensors, shown


def _mixture(meta: Meta, tensors: Tensors, kind: str, count: str = "num_experts", *, rope: bool = True) -> Config:
    """Sizes, heads and experts."""
    sizes = read_sizes(meta, kind)
    heads = read_heads(meta, tensors, sizes["num_hidden_layers"], rope=rope)
    return {**sizes, **heads, **read_experts(meta, count), "hidden_act": "silu"}


def _only_normed_sigmoid(meta: Meta) -> None:
    """Refuse gates other than this family's: sigmoids, and those of the chosen experts add up to one."""
    if meta.whole("expert_gating_func", SIGMOID) != SIGMOID:
        raise meta.fail(f"{meta.arch}.expert_gating_func is not supported (only sigmoid)")
    if not meta.flag("expert_weights_norm", True):
        raise meta.fail(f"{meta.arch}.expert_weights_norm must be true")


def _olmoe(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """In no published model of this family do the gates of the chosen experts add up to one."""
    if meta.flag("expert_weights_norm", False):
        raise meta.fail("olmoe.expert_weights_norm must be false")
    found = _mixture(meta, tensors, "olmoe")
    if found.pop("head_dim") * found["num_attention_heads"] != found["hidden_size"]:
        raise meta.fail("olmoe.attention.key_length is not supported, except for an equal share of the hidden size")
    return {**found, "norm_topk_prob": False, "intermediate_size": meta.whole("feed_forward_length")}


def _granitemoe(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    if not meta.flag("rope.scaling.finetuned", True):
        raise meta.fail("granitemoe without rotation (rope.scaling.finetuned = false) is not supported")
    found = _mixture(meta, tensors, "granitemoe", "num_local_experts")
    found = {
        **found, **read_factors(meta, found["head_dim"]), "attention_bias": some(tensors, "attn_q.bias"),
        "intermediate_size": meta.whole("expert_feed_forward_length", meta.whole("feed_forward_length")),
    }  # fmt: skip
    if not some(tensors, "ffn_gate_shexp.weight"):
        return found
    shared = rows_of(meta, tensors, "ffn_gate_shexp.weight")
    return {**found, "architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared",
            "shared_intermediate_size": shared}  # fmt: skip


def _dots1(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    if meta.whole("expert_gating_func", SIGMOID) != SIGMOID:
        raise meta.fail("dots1.expert_gating_func is not supported (only sigmoid)")
    return {
        **_mixture(meta, tensors, "dots1", "n_routed_experts"), "intermediate_size": meta.whole("feed_forward_length"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"), "sliding_window": None,
        "n_shared_experts": meta.whole("expert_shared_count", 0, least=0, most=64), "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": meta.whole("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": read_gates_scale(meta),
        "norm_topk_prob": meta.flag("expert_weights_norm", True), "attention_bias": some(tensors, "attn_q.bias"),
    }  # fmt: skip


def _ernie(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    found = _mixture(meta, tensors, "ernie4_5_moe", "moe_num_experts")
    found["moe_k"] = found.pop("num_experts_per_tok")
    return {
        **found, "intermediate_size": meta.whole("feed_forward_length"), "use_bias": some(tensors, "attn_q.bias"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "moe_num_shared_experts": meta.whole("expert_shared_count", 0, least=0, most=64),
        "moe_layer_interval": meta.whole("interleave_moe_layer_step", 1),
        "moe_layer_start_index": meta.whole("leading_dense_block_count", 0, least=0),
    }  # fmt: skip


def _hunyuan(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """The base in the file already includes the stretching of the rotation."""
    found = _mixture(meta, tensors, "hunyuan_v1_moe")
    found["moe_topk"], inner = found.pop("num_experts_per_tok"), meta.whole("expert_feed_forward_length")
    if meta.whole("expert_shared_feed_forward_length", inner) != inner or meta.whole("expert_shared_count", 1) != 1:
        raise meta.fail("hunyuan-moe with shared experts of another width, or several of them, is not supported")
    return {**found, "intermediate_size": inner, "attention_bias": some(tensors, "attn_q.bias")}


def _minimax(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    _only_normed_sigmoid(meta)
    found = _mixture(meta, tensors, "minimax_m2", "num_local_experts")
    return {**found, "intermediate_size": meta.whole("expert_feed_forward_length"),
            "rotary_dim": meta.whole("rope.dimension_count", found["head_dim"])}  # fmt: skip


_VALUES = 0.707
"""The factor of values of the published model, where a file is too old to say it."""


def _mimo2(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """Windows are told without the token itself, as in config.json's `sliding_window_size`."""
    _only_normed_sigmoid(meta)
    if meta.whole("nextn_predict_layers", 0, least=0):
        raise meta.fail("mimo2 with its layers for drafts (nextn_predict_layers) is not supported")
    if meta.scaling()[0] != "none":
        raise meta.fail("rope scaling is not supported in mimo2")
    found = read_sizes(meta, "mimo_v2_flash")
    layers, head = found["num_hidden_layers"], meta.whole("attention.key_length")
    kinds, counts = meta.kinds(layers), meta.each("attention.head_count_kv", layers)
    keys = [count for kind, count in zip(kinds, counts, strict=True) if kind == "full_attention"] or [counts[0] // 2]
    if counts != [keys[0] * (2 if kind == "sliding_attention" else 1) for kind in kinds]:
        raise meta.fail("mimo2.attention.head_count_kv must be one number, and twice that in layers with a window")
    bases = {"full_attention": meta.number("rope.freq_base", 5e6),
             "sliding_attention": meta.number("rope.freq_base_swa", 10000.0)}  # fmt: skip
    return {
        **found, **read_experts(meta, "n_routed_experts"), "hidden_act": "silu", "head_dim": head,
        "num_attention_heads": meta.whole("attention.head_count"), "num_key_value_heads": keys[0],
        "v_head_dim": meta.whole("attention.value_length", head), "layer_types": kinds, "n_group": 1, "topk_group": 1,
        "sliding_window_size": meta.whole("attention.sliding_window"), "attention_bias": some(tensors, "attn_q.bias"),
        "intermediate_size": meta.whole("feed_forward_length"), "routed_scaling_factor": read_gates_scale(meta),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "attention_value_scale": meta.number("attention.value_scale", _VALUES),
        "mlp_layer_types": [
            "sparse" if f"blk.{index}.ffn_gate_inp.weight" in tensors else "dense" for index in range(layers)
        ],
        "rope_parameters": {
            kind: {"rope_theta": base, "partial_rotary_factor": meta.share(head)} for kind, base in bases.items()
        },
    }  # fmt: skip


def _afmoe(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """Three layers of four have windows. Every published model scales its embeddings."""
    _only_normed_sigmoid(meta)
    return {
        **_mixture(meta, tensors, "afmoe"), "intermediate_size": meta.whole("feed_forward_length"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"), "mup_enabled": True,
        "num_shared_experts": meta.whole("expert_shared_count", 0, least=0, most=64),
        "num_dense_layers": meta.whole("leading_dense_block_count", 0, least=0),
        "route_scale": read_gates_scale(meta),
        "layer_types": meta.kinds(meta.whole("block_count"), 4),
        "sliding_window": meta.whole("attention.sliding_window"), "attention_bias": some(tensors, "attn_q.bias"),
    }  # fmt: skip


_MAVERICK = 128
"""The number of experts of the size that does not norm queries and keys."""
_CHUNK = 8192
"""The chunks of both sizes."""


def _llama4(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """Chunks, layers without rotation and temperatures are those of both published sizes."""
    kind, factor = meta.scaling()
    if kind not in ("none", "linear"):
        raise meta.fail("rope scaling is not supported in llama4 but for stored divisors")
    if (chunk := meta.whole("attention.sliding_window", _CHUNK, least=0)) != _CHUNK:  # 0: all layers see everything
        raise meta.fail(f"llama4.attention.sliding_window = {chunk} is not supported (only {_CHUNK})")
    found = _mixture(meta, tensors, "llama4_text", "num_local_experts", rope=False)
    found["rope_theta"] = meta.number("rope.freq_base", 500000.0)
    divisors = factors("rope_freqs.weight")
    if divisors is not None:
        found["rope_scaling"] = stored_divisors(found, [one * factor for one in divisors])
    elif kind == "linear":
        raise meta.fail("rope scaling is not supported in llama4 but for stored divisors")
    return {
        **found, "intermediate_size": meta.whole("expert_feed_forward_length"),
        "intermediate_size_mlp": meta.whole("feed_forward_length"), "attention_chunk_size": _CHUNK,
        "interleave_moe_layer_step": meta.whole("interleave_moe_layer_step"), "no_rope_layer_interval": 4,
        "use_qk_norm": found["num_local_experts"] != _MAVERICK, "attention_bias": some(tensors, "attn_q.bias"),
    }  # fmt: skip


def _gemma3n(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """The share of closed gates is stored as a quantile of the normal distribution."""
    sizes = read_sizes(meta, "gemma3n_text")
    layers = sizes["num_hidden_layers"]
    points = meta.metadata.get("gemma3n.activation_sparsity_scale")
    fine = isinstance(points, list) and len(points) == layers
    if not isinstance(points, list) or not fine or not all(isinstance(one, float) and one < 8 for one in points):
        raise meta.fail(f"gemma3n.activation_sparsity_scale must hold a number below 8 for each of {layers} layers")
    if meta.scaling()[0] != "none":
        raise meta.fail("rope scaling is not supported in gemma3n")
    table, base = tensors.get("per_layer_token_embd.weight"), meta.number("rope.freq_base", 1e6)
    return {
        **sizes, **read_heads(meta, tensors, layers, rope=False), "rope_theta": base,
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10000.0),
        "layer_types": meta.kinds(layers),
        "activation_sparsity_pattern": [0.5 * (1 + math.erf(one / math.sqrt(2))) for one in points],
        "intermediate_size": meta.each("feed_forward_length", layers), "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.whole("attention.sliding_window", 512),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        "hidden_size_per_layer_input": meta.whole("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": 1 if table is None else table.shape[0],
        "num_kv_shared_layers": meta.whole("attention.shared_kv_layers", 0, least=0, most=layers - 1),
        "altup_num_inputs": meta.whole("altup.num_inputs", 4, most=64),
        "altup_active_idx": meta.whole("altup.active_idx", 0, least=0, most=63),
        "laurel_rank": rows_of(meta, tensors, "laurel_l.weight"),
    }  # fmt: skip


def _bitnet(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """The converter has rounded the weights. It also writes a rope scaling by one."""
    if meta.scaling()[0] != "none":
        raise meta.fail("rope scaling is not supported in bitnet")
    act = meta.value("hidden_activation") or "silu"
    if act not in ("silu", "relu2"):
        raise meta.fail(f"bitnet.hidden_activation must be silu or relu2, not {shown(act)}")
    sizes = read_sizes(meta, "bitnet")
    heads = read_heads(meta, tensors, sizes["num_hidden_layers"], rope=False)
    return {**sizes, **heads, "rope_theta": meta.number("rope.freq_base", 10000.0), "hidden_act": act,
            "intermediate_size": meta.whole("feed_forward_length")}  # fmt: skip


def _exaone(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """Layers with full attention do not rotate."""
    if meta.whole("expert_gating_func", SIGMOID) != SIGMOID or meta.whole("expert_group_count", 1) != 1:
        raise meta.fail("exaone-moe with a softmax, or with groups of experts, is not supported")
    found = _mixture(meta, tensors, "exaone_moe")
    layers, inner = found["num_hidden_layers"], meta.whole("expert_feed_forward_length")
    shared = meta.whole("expert_shared_count", 0, least=0, most=64)
    if (divisors := factors("rope_freqs.weight")) is not None:
        found["rope_scaling"] = stored_divisors(found, divisors)
    dense = meta.whole("leading_dense_block_count", 0, least=0)
    return {
        **found, "intermediate_size": meta.whole("feed_forward_length"), "moe_intermediate_size": inner,
        "num_shared_experts": shared, "norm_topk_prob": meta.flag("expert_weights_norm", True),
        "routed_scaling_factor": read_gates_scale(meta),
        "sliding_window": meta.whole("attention.sliding_window"), "n_group": 1, "topk_group": 1,
        "layer_types": meta.kinds(layers),
        "mlp_layer_types": ["dense" if index < dense else "sparse" for index in range(layers)],
    }  # fmt: skip


def _minicpm3(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """The factors are those of the only published size."""
    found = read_sizes(meta, "minicpm3")
    heads, rotated = meta.whole("attention.head_count"), meta.whole("rope.dimension_count")
    key, longest = meta.whole("attention.key_length"), found["max_position_embeddings"]
    if key <= rotated or found["hidden_size"] % heads:
        raise meta.fail(f"keys of {key} and {heads} heads do not fit {rotated} numbers that rotate")
    long, short = factors("rope_factors_long.weight"), factors("rope_factors_short.weight")
    if long is not None and short is not None:
        long, short = (meta.stretched(one, "rope_factors_long.weight") for one in (long, short))
        found["rope_scaling"] = {
            "rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": 1.0,
            "original_max_position_embeddings": meta.whole("rope.scaling.original_context_length", longest, least=2),
        }  # fmt: skip
    elif meta.scaling()[0] != "none":
        raise meta.fail("rope scaling is not supported in minicpm3 but for stored factors")
    return {
        **found, "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_act": "silu",
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": key - rotated, "v_head_dim": found["hidden_size"] // heads,
        "kv_lora_rank": meta.whole("attention.kv_lora_rank"), "q_lora_rank": meta.whole("attention.q_lora_rank"),
        "intermediate_size": meta.whole("feed_forward_length"), "rope_theta": meta.number("rope.freq_base", 10000.0),
        "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
    }  # fmt: skip


_PHIMOE = (131072, 4096)
"""(positions stretched, positions before) of the size with stored factors. The file lacks that size's gain on cos and
sin."""
_PHIMOE_GAIN = 1.243163121016122


def _phimoe(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """Experts are chosen one after the other (sparsemixer), and the format has no key for that."""
    found = _mixture(meta, tensors, "phimoe", "num_local_experts", rope=False)
    if meta.whole("rope.dimension_count", found["head_dim"]) != found["head_dim"]:
        raise meta.fail("phimoe.rope.dimension_count must be the width of a head")
    long, short = factors("rope_factors_long.weight"), factors("rope_factors_short.weight")
    if long is not None and short is not None:
        long, short = (meta.stretched(one, "rope_factors_long.weight", "attn_factor") for one in (long, short))
        original = meta.whole("rope.scaling.original_context_length")
        if (found["max_position_embeddings"], original) != _PHIMOE:
            raise meta.fail("phimoe with stored factors is supported for 4096 positions stretched to 131072 alone")
        found["rope_scaling"] = {
            "rope_type": "longrope", "long_factor": long, "short_factor": short, "short_mscale": _PHIMOE_GAIN,
            "long_mscale": _PHIMOE_GAIN, "original_max_position_embeddings": original,
        }  # fmt: skip
    elif meta.scaling()[0] != "none":
        raise meta.fail("rope scaling is not supported in phimoe but for stored factors")
    return {
        **found, "rope_theta": meta.number("rope.freq_base", 10000.0), "lm_head_bias": "output.bias" in tensors,
        "attention_bias": some(tensors, "attn_q.bias") or some(tensors, "attn_qkv.bias"),
        "intermediate_size": meta.whole("feed_forward_length"),
        "sliding_window": meta.whole("attention.sliding_window", 0, least=0) or None,
    }  # fmt: skip


def stored_divisors(found: Config, divisors: list[float]) -> Config:
    """The divisors of each pair's frequency, used at every length."""
    return {"rope_type": "longrope", "attention_factor": 1.0, "long_factor": divisors, "short_factor": divisors,
            "original_max_position_embeddings": found["max_position_embeddings"]}  # fmt: skip


MIXTURES: dict[str, Callable[[Meta, Tensors, Factors], Config]] = {
    "afmoe": _afmoe,
    "bitnet": _bitnet,
    "dots1": _dots1,
    "ernie4_5-moe": _ernie,
    "exaone-moe": _exaone,
    "gemma3n": _gemma3n,
    "granitemoe": _granitemoe,
    "hunyuan-moe": _hunyuan,
    "llama4": _llama4,
    "mimo2": _mimo2,
    "minicpm3": _minicpm3,
    "minimax-m2": _minimax,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
}
"""How to read the config of each architecture in this file."""
