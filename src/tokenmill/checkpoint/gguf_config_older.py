"""From GGUF metadata to what config.json would hold, for families from before root-mean-square norms were usual.

Owns: the keys of these families. Numbers that are not in the format are those of every published model of the family,
and are written here. Must not know: how models are built, tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.checkpoint.gguf_config_layers import Config, read_experts, some
from tokenmill.checkpoint.gguf_meta import MAX_LAYERS, Factors, Meta, Tensors


def _sizes(meta: Meta, kind: str, eps: str) -> Config:
    """The sizes that all these families have. Heads divide the hidden size equally."""
    hidden, heads = meta.whole("embedding_length"), meta.whole("attention.head_count")
    for name in ("attention.key_length", "attention.value_length"):
        if hidden % heads or meta.whole(name, hidden // heads) != hidden // heads:
            raise meta.fail(f"{meta.arch}.{name} is not supported, except for an equal share of the hidden size")
    return {
        "model_type": kind, "hidden_size": hidden, "num_hidden_layers": meta.whole("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads, "intermediate_size": meta.whole("feed_forward_length"),
        "max_position_embeddings": meta.whole("context_length"), eps: meta.number("attention.layer_norm_epsilon"),
    }  # fmt: skip


def _key_heads(meta: Meta, heads: int, *only: int) -> int:
    """The number of key heads. only: the numbers that the family may have."""
    count = meta.whole("attention.head_count_kv", heads)
    if only and count not in only:
        raise meta.fail(f"{meta.arch}.attention.head_count_kv must be {' or '.join(map(str, only))}, not {count}")
    return count


def _rope(meta: Meta, found: Config) -> Config:
    """The base, and how much of each head rotates."""
    if meta.scaling()[0] != "none":
        raise meta.fail(f"rope scaling is not supported in {meta.arch}")
    head = found["hidden_size"] // found["num_attention_heads"]
    return {"rope_theta": meta.number("rope.freq_base", 10000.0), "partial_rotary_factor": meta.share(head)}


def _whole_rope(meta: Meta, found: Config) -> Config:
    rope = _rope(meta, found)
    if rope.pop("partial_rotary_factor") != 1.0:
        raise meta.fail(f"{meta.arch}.rope.dimension_count must be the width of a head")
    return rope


def _phi2(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    found = _sizes(meta, "phi", "layer_norm_eps")
    keys = _key_heads(meta, found["num_attention_heads"])
    return {**found, **_rope(meta, found), "num_key_value_heads": keys, "hidden_act": "gelu_new"}


def _stablelm(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """Layers without a norm before the feed-forward part compute both parts from the same input, whatever the key
    `use_parallel_residual` says."""
    found = _sizes(meta, "stablelm", "layer_norm_eps")
    return {
        **found, **_rope(meta, found), "num_key_value_heads": _key_heads(meta, found["num_attention_heads"]),
        "hidden_act": "silu", "use_qkv_bias": some(tensors, "attn_q.bias"),
        "qk_layernorm": some(tensors, "attn_q_norm.weight"),
        "use_parallel_residual": not some(tensors, "ffn_norm.weight"),
    }  # fmt: skip


_NEOX_20B = (44, 6144)
"""(layers, width) of the size that was trained with the tanh form of gelu."""


def _gptneox(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    found = _sizes(meta, "gpt_neox", "layer_norm_eps")
    _key_heads(meta, found["num_attention_heads"], found["num_attention_heads"])
    rope = _rope(meta, found)
    large = (found["num_hidden_layers"], found["hidden_size"]) == _NEOX_20B
    return {
        **found, "rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"],
        "use_parallel_residual": meta.flag("use_parallel_residual", True),
        "attention_bias": some(tensors, "attn_qkv.bias"), "hidden_act": "gelu_fast" if large else "gelu",
    }  # fmt: skip


def _bloom(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    found = _sizes(meta, "bloom", "layer_norm_epsilon")
    _key_heads(meta, found["num_attention_heads"], found["num_attention_heads"])
    _four_times(meta, found)
    return found


def _four_times(meta: Meta, found: Config) -> None:
    """Refuse a feed-forward width other than four times the hidden size: these families have no other."""
    if found.pop("intermediate_size") != 4 * found["hidden_size"]:
        raise meta.fail(f"{meta.arch}.feed_forward_length must be four times the hidden size")


def _falcon(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """Files with several key heads have the newer layout, with one norm per layer or two."""
    found = _sizes(meta, "falcon", "layer_norm_epsilon")
    keys, two = _key_heads(meta, found["num_attention_heads"]), some(tensors, "attn_norm_2.weight")
    rope, new = _whole_rope(meta, found), keys > 1 or some(tensors, "attn_norm_2.weight")
    layout = {"num_kv_heads": keys, "num_ln_in_parallel_attn": 2 if two else 1} if new else {"multi_query": True}
    found["ffn_hidden_size"] = found.pop("intermediate_size")
    return {**found, **rope, **layout, "new_decoder_architecture": new, "parallel_attn": True, "bias": False,
            "alibi": False, "activation": "gelu"}  # fmt: skip


_ALIBI = 8.0
"""The unit of the ALiBi slopes in every published model."""


def _mpt(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    found = _sizes(meta, "mpt", "layer_norm_epsilon")
    _key_heads(meta, found["num_attention_heads"], found["num_attention_heads"])
    _four_times(meta, found)
    if meta.number("attention.max_alibi_bias") != _ALIBI:
        raise meta.fail(f"mpt.attention.max_alibi_bias must be {_ALIBI}: other positions than biases are not supported")
    found["max_seq_len"] = found.pop("max_position_embeddings")
    attends = {"alibi": True, "alibi_bias_max": 8, "clip_qkv": _clip(meta)}
    return {**found, "expansion_ratio": 4, "no_bias": True, "attn_config": attends}


def _clip(meta: Meta) -> float | None:
    """The limit to which queries, keys and values are clipped; None: they are not clipped."""
    return meta.number("attention.clamp_kqv", 0.0) or None


def _olmo(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    found = {**_sizes(meta, "olmo", "layer_norm_eps")}
    if abs(found.pop("layer_norm_eps") - 1e-5) > 1e-8:
        raise meta.fail("olmo.attention.layer_norm_epsilon must be 1e-05")
    return {
        **found, **_whole_rope(meta, found), "num_key_value_heads": _key_heads(meta, found["num_attention_heads"]),
        "hidden_act": "silu", "clip_qkv": _clip(meta),
    }  # fmt: skip


def _starcoder(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    found = _sizes(meta, "gpt_bigcode", "layer_norm_epsilon")
    _key_heads(meta, 1, 1)
    found["n_inner"] = found.pop("intermediate_size")
    return {**found, "multi_query": True, "activation_function": "gelu_pytorch_tanh"}


def _gpt2(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    found = _sizes(meta, "gpt2", "layer_norm_epsilon")
    _key_heads(meta, found["num_attention_heads"], found["num_attention_heads"])
    found["n_inner"] = found.pop("intermediate_size")
    return {**found, "activation_function": "gelu_new"}


def _dbrx(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    found = _sizes(meta, "dbrx", "layer_norm_eps")
    if abs(found.pop("layer_norm_eps") - 1e-5) > 1e-8:
        raise meta.fail("dbrx.attention.layer_norm_epsilon must be 1e-05")
    keys, mixed = _key_heads(meta, found["num_attention_heads"]), read_experts(meta, "moe_num_experts")
    found["max_seq_len"] = found.pop("max_position_embeddings")
    inner = {"ffn_hidden_size": found.pop("intermediate_size"), "moe_num_experts": mixed["moe_num_experts"],
             "moe_top_k": mixed["num_experts_per_tok"], "moe_normalize_expert_weights": 1.0}  # fmt: skip
    theta = _whole_rope(meta, found)["rope_theta"]
    attends = {"clip_qkv": _clip(meta), "kv_n_heads": keys, "rope_theta": theta}
    return {**found, "attn_config": attends, "ffn_config": inner}


OLDER: dict[str, Callable[[Meta, Tensors, Factors], Config]] = {
    "bloom": _bloom,
    "dbrx": _dbrx,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "mpt": _mpt,
    "olmo": _olmo,
    "phi2": _phi2,
    "stablelm": _stablelm,
    "starcoder": _starcoder,
}
"""How to read the config of each architecture in this file."""
