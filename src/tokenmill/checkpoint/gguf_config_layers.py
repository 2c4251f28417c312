"""From GGUF metadata to what config.json would hold, for families whose layers are not Llama's.

Owns: the keys of these families. Numbers that are not in the format are those of every published model of the family,
and are written here. Must not know: how models are built, tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.checkpoint.gguf_meta import MAX_EXPERTS, MAX_LAYERS, Factors, Meta, Tensors

Config = dict[str, Any]
SIGMOID = 2
"""The value of `expert_gating_func` for a sigmoid; 1 is a softmax."""


def read_sizes(meta: Meta, kind: str, *, eps: str = "rms_norm_eps") -> Config:
    drafts = meta.whole("nextn_predict_layers", 0, least=0, most=64)
    layers = meta.whole("block_count", most=MAX_LAYERS)
    if layers <= drafts:
        raise meta.fail(f"{meta.arch}.nextn_predict_layers = {drafts} leaves none of {layers} layers")
    return {
        "model_type": kind, "hidden_size": meta.whole("embedding_length"), "num_hidden_layers": layers - drafts,
        "max_position_embeddings": meta.whole("context_length"), eps: meta.number("attention.layer_norm_rms_epsilon"),
    }  # fmt: skip


def read_heads(meta: Meta, tensors: Tensors, layers: int, *, rope: bool = True) -> Config:
    """Read attention heads of one size. Recurrent layers have zero key heads."""
    heads, hidden = meta.whole("attention.head_count"), meta.whole("embedding_length")
    head = meta.whole("attention.key_length", max(hidden // heads, 1))
    if meta.whole("attention.value_length", head) != head:
        raise meta.fail("keys and values of different lengths are not supported")
    counts = {count for count in _counts(meta, layers) if count}
    if len(counts) != 1:
        raise meta.fail(f"{meta.arch}.attention.head_count_kv must be one number, or 0 for layers without attention")
    found: Config = {"num_attention_heads": heads, "num_key_value_heads": counts.pop(), "head_dim": head}
    if rope:
        if meta.scaling()[0] != "none":
            raise meta.fail(f"rope scaling is not supported in {meta.arch}")
        found["rope_theta"] = meta.number("rope.freq_base", 10000.0)
    return found


def _counts(meta: Meta, layers: int) -> list[int]:
    """The number of key heads in each layer."""
    drafts = meta.whole("nextn_predict_layers", 0, least=0, most=64)
    return meta.each("attention.head_count_kv", layers + drafts)[:layers]


def read_experts(meta: Meta, count: str) -> Config:
    total = meta.whole("expert_count", most=MAX_EXPERTS)
    return {count: total, "num_experts_per_tok": meta.whole("expert_used_count", most=total)}


def read_gates_scale(meta: Meta) -> float:
    """The factor of the gates of chosen experts. Absent or zero, it changes nothing."""
    return meta.number("expert_weights_scale", 0.0) or 1.0


def read_factors(meta: Meta, head: int) -> Config:
    """Granite's factors. Those that are absent or zero change nothing."""
    return {
        "embedding_multiplier": meta.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": meta.number("residual_scale", 0.0) or 1.0,
        "attention_multiplier": meta.number("attention.scale", 0.0) or head**-0.5,
        "logits_scaling": meta.number("logit_scale", 0.0) or 1.0,
    }


def some(tensors: Tensors, part: str) -> bool:
    """Does any layer have this tensor?"""
    return any(name.startswith("blk.") and name.partition(".")[2].partition(".")[2] == part for name in tensors)


def rows_of(meta: Meta, tensors: Tensors, part: str) -> int:
    """The number of rows of the first such matrix."""
    found = next(
        (info for name, info in tensors.items() if name.startswith("blk.") and name.endswith(f".{part}")), None
    )
    if found is None or len(found.shape) != 2:
        raise meta.fail(f"no layer has a matrix {part}")
    return found.shape[0]


def _glm4moe(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    sizes = read_sizes(meta, "glm4_moe")
    heads = read_heads(meta, tensors, sizes["num_hidden_layers"])
    if meta.whole("expert_gating_func", SIGMOID) != SIGMOID:
        raise meta.fail("glm4moe.expert_gating_func is not supported (only sigmoid)")
    return {
        **sizes, **heads, **read_experts(meta, "n_routed_experts"),
        "intermediate_size": meta.whole("feed_forward_length"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "n_shared_experts": meta.whole("expert_shared_count", 0, least=0, most=64), "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": meta.whole("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": read_gates_scale(meta),
        "norm_topk_prob": meta.flag("expert_weights_norm", True), "use_qk_norm": some(tensors, "attn_q_norm.weight"),
        "attention_bias": some(tensors, "attn_q.bias"), "partial_rotary_factor": meta.share(heads["head_dim"]),
        "hidden_act": "silu",
    }  # fmt: skip


_GROUPS = {160: (8, 3), 256: (8, 4)}
"""Number of experts -> (groups, groups that a token may use), for DeepSeek V2 and V3 files that are too old to say.
Other sizes have one group."""


def _deepseek2(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """Latent attention. Older files, whose tensors are not split, lack `key_length_mla`."""
    sizes, heads = read_sizes(meta, "deepseek_v3"), meta.whole("attention.head_count")
    rotated = meta.whole("rope.dimension_count")
    key = meta.whole("attention.key_length_mla", meta.whole("attention.key_length"))
    value = meta.whole("attention.value_length_mla", meta.whole("attention.value_length"))
    mixed = read_experts(meta, "n_routed_experts")
    groups = _GROUPS.get(mixed["n_routed_experts"], (1, 1)) if meta.arch == "deepseek2" else (1, 1)
    found: Config = {
        **sizes, **mixed, "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_act": "silu",
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": key - rotated, "v_head_dim": value,
        "kv_lora_rank": meta.whole("attention.kv_lora_rank"),
        "q_lora_rank": meta.whole("attention.q_lora_rank", 0, least=0) or None,
        "intermediate_size": meta.whole("feed_forward_length"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "n_shared_experts": meta.whole("expert_shared_count", 0, least=0, most=64),
        "first_k_dense_replace": meta.whole("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": read_gates_scale(meta), "n_group": groups[0],
        "topk_group": groups[1], "rope_theta": meta.number("rope.freq_base", 10000.0), "rope_interleave": True,
    }  # fmt: skip
    if meta.value("expert_group_count") is not None:
        found["n_group"] = meta.whole("expert_group_count")
        found["topk_group"] = meta.whole("expert_group_used_count", 1)
    if key <= rotated:
        raise meta.fail(f"of keys with {key} numbers, {rotated} cannot rotate")
    found["rope_scaling"] = _latent_yarn(meta, found["max_position_embeddings"])
    sigmoid, biased = meta.whole("expert_gating_func", 1) == SIGMOID, some(tensors, "exp_probs_b.bias")
    normed = meta.flag("expert_weights_norm", False)
    if sigmoid and biased and meta.arch != "mistral4":
        indexed = {} if meta.arch == "deepseek2" else _index(meta, found["num_hidden_layers"])
        return {**found, **indexed, "norm_topk_prob": normed}
    if not sigmoid and not biased and (meta.arch == "mistral4" or (normed and meta.arch == "deepseek2")):
        return _mistral4(meta, {**found, "norm_topk_prob": normed})
    if sigmoid or normed:
        raise meta.fail(
            "this choice of experts is not supported (sigmoid without a bias, or a normed softmax with one)"
        )
    second = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    found["topk_method"] = "greedy" if found["n_group"] == 1 else "group_limited_greedy"
    return {**{name: value for name, value in found.items() if name != "rope_interleave"}, **second}


def _index(meta: Meta, layers: int) -> Config:
    """The index that chooses keys (DeepSeek V3.2, GLM-5). A list may say which layers have one of their own."""
    found: Config = {"index_n_heads": meta.whole("attention.indexer.head_count"),
                     "index_head_dim": meta.whole("attention.indexer.key_length"),
                     "index_topk": meta.whole("attention.indexer.top_k"), "model_type": "deepseek_v32"}  # fmt: skip
    own = meta.metadata.get(f"{meta.arch}.attention.indexer.types")
    if meta.arch == "deepseek32":
        if own is not None and not (isinstance(own, list) and all(own)):
            raise meta.fail("deepseek32.attention.indexer.types must be true for each layer")
        return found
    if own is not None and (not isinstance(own, list) or len(own) < layers):
        raise meta.fail(f"{meta.arch}.attention.indexer.types must have an entry for each of {layers} layers")
    kinds = None if own is None else ["full" if one else "shared" for one in own[:layers]]
    return {**found, "model_type": "glm_moe_dsa", "indexer_types": kinds}


def _mistral4(meta: Meta, found: Config) -> Config:
    """Mistral's mixtures (Small 4, Large 3), which scale queries by position where the file says so."""
    rope = found.pop("rope_scaling")
    if rope is None:
        raise meta.fail(f"{meta.arch} with a normed softmax over experts must have yarn")
    span = rope["original_max_position_embeddings"]
    if meta.whole("attention.temperature_length", span) != span:
        raise meta.fail(f"{meta.arch}.attention.temperature_length must be rope.scaling.original_context_length")
    rope = {**rope, "rope_theta": found.pop("rope_theta"),
            "llama_4_scaling_beta": meta.number("attention.temperature_scale", 0.0)}  # fmt: skip
    return {**found, "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "rope_parameters": rope}


def _latent_yarn(meta: Meta, longest: int) -> Config | None:
    kind, factor = meta.scaling("yarn_log_multiplier", "yarn_beta_fast", "yarn_beta_slow")
    if kind == "none":
        return None
    if kind != "yarn" or meta.value("rope.scaling.yarn_log_multiplier") is None:
        raise meta.fail("rope scaling is not supported, except for yarn with a rope.scaling.yarn_log_multiplier")
    # The format stores a tenth of the value.
    everywhere = round(meta.number("rope.scaling.yarn_log_multiplier") * 10.0, 6)
    return {
        "rope_type": "yarn", "factor": factor, "mscale": everywhere,
        "mscale_all_dim": everywhere,
        "original_max_position_embeddings": meta.whole("rope.scaling.original_context_length", longest, least=2),
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
    }  # fmt: skip


def _qwen2moe(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """In no published model of this family do the gates of the chosen experts add up to one."""
    sizes = read_sizes(meta, "qwen2_moe")
    return {
        **sizes, **read_heads(meta, tensors, sizes["num_hidden_layers"]), **read_experts(meta, "num_experts"),
        "hidden_act": "silu", "norm_topk_prob": False, "intermediate_size": meta.whole("feed_forward_length"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"), "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": meta.whole("expert_shared_feed_forward_length"),
    }  # fmt: skip


def _qwen3next(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    sizes = read_sizes(meta, "qwen3_next")
    heads = read_heads(meta, tensors, sizes["num_hidden_layers"])
    values = meta.whole("ssm.time_step_rank")
    return {
        **sizes, **heads, **read_experts(meta, "num_experts"), "hidden_act": "silu", "norm_topk_prob": True,
        "partial_rotary_factor": meta.share(heads["head_dim"]),
        "intermediate_size": meta.whole("feed_forward_length", 1), "attention_bias": some(tensors, "attn_q.bias"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.whole("expert_shared_feed_forward_length"),
        "linear_conv_kernel_dim": meta.whole("ssm.conv_kernel"), "linear_num_key_heads": meta.whole("ssm.group_count"),
        "linear_num_value_heads": values, "linear_key_head_dim": meta.whole("ssm.state_size"),
        "linear_value_head_dim": meta.whole("ssm.inner_size") // values,
        "full_attention_interval": meta.whole("full_attention_interval", 4),
    }  # fmt: skip


def _gemma4(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """The usual keys describe the heads of layers with full attention; layers with windows have keys of their own."""
    if meta.scaling()[0] != "none":
        raise meta.fail("rope scaling is not supported in gemma4")
    sizes = read_sizes(meta, "gemma4_text")
    layers, whole = sizes["num_hidden_layers"], meta.whole("attention.key_length")
    kinds = meta.kinds(layers)
    counts, inner = meta.each("attention.head_count_kv", layers), meta.each("feed_forward_length", layers)
    full = {count for count, kind in zip(counts, kinds, strict=True) if kind == "full_attention"}
    local = {count for count, kind in zip(counts, kinds, strict=True) if kind == "sliding_attention"}
    shared = meta.whole("attention.shared_kv_layers", 0, least=0, most=layers - 1)
    divisors = factors("rope_freqs.weight")
    wide = [2 * inner[0] if index >= layers - shared else inner[0] for index in range(layers)]
    fine = len(full) == 1 and len(local) <= 1 and inner in ([inner[0]] * layers, wide)
    if not fine or divisors is None or any(value not in (1.0,) and value < 1e29 for value in divisors):
        raise meta.fail("its heads, widths or rotations differ from layer to layer in a way that is not supported")
    first = kinds.index("full_attention")
    same = f"blk.{first}.attn_v.weight" not in tensors
    local_base = meta.number("rope.freq_base_swa", 10000.0)
    found: Config = {
        **sizes, "num_attention_heads": meta.whole("attention.head_count"), "global_head_dim": whole,
        "head_dim": meta.whole("attention.key_length_swa", whole), "layer_types": kinds, "attention_k_eq_v": same,
        "num_key_value_heads": next(iter(local), next(iter(full))),
        "num_global_key_value_heads": next(iter(full)) if same else None, "num_kv_shared_layers": shared,
        "intermediate_size": inner[0], "use_double_wide_mlp": inner == wide and bool(shared) and inner[-1] != inner[0],
        "sliding_window": meta.whole("attention.sliding_window"), "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": meta.number("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": meta.whole("embedding_length_per_layer_input", 0, least=0),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": meta.number("rope.freq_base", 1e6),
                               "partial_rotary_factor": sum(value == 1.0 for value in divisors) * 2 / whole},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base}},
    }  # fmt: skip
    if not same and full != local and local:
        raise meta.fail("full layers with values of their own and other key heads are not supported")
    if (table := tensors.get("per_layer_token_embd.weight")) is not None:
        found["vocab_size_per_layer_input"] = table.shape[0]
    if meta.whole("rope.dimension_count_swa", found["head_dim"]) != found["head_dim"]:
        raise meta.fail("layers with windows that rotate a part of each head are not supported")
    if meta.whole("expert_count", 0, least=0, most=MAX_EXPERTS):
        mixed = read_experts(meta, "num_experts")
        mixed["top_k_experts"] = mixed.pop("num_experts_per_tok")
        found.update(mixed, enable_moe_block=True, moe_intermediate_size=meta.whole("expert_feed_forward_length"))
    return found


def _space(meta: Meta, tensors: Tensors, prefix: str) -> Config:
    """Mamba-2's sizes, in families that also have attention."""
    heads, width = meta.whole("ssm.time_step_rank"), meta.whole("ssm.inner_size")
    return {
        f"{prefix}n_heads": heads, f"{prefix}d_head": width // heads,
        f"{prefix}n_groups": meta.whole("ssm.group_count"),
        f"{prefix}d_state": meta.whole("ssm.state_size"), f"{prefix}d_conv": meta.whole("ssm.conv_kernel"),
        f"{prefix}conv_bias": some(tensors, "ssm_conv1d.bias"), f"{prefix}proj_bias": some(tensors, "ssm_in.bias"),
    }  # fmt: skip


def _granitehybrid(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    sizes = read_sizes(meta, "granitemoehybrid")
    layers, hidden = sizes["num_hidden_layers"], sizes["hidden_size"]
    if not meta.number("attention.scale", 0.0):
        raise meta.fail("granitehybrid without attention.scale (Bamba) is not supported")
    experts = meta.whole("expert_count", 0, least=0, most=MAX_EXPERTS)
    kinds = ["attention" if count else "mamba" for count in _counts(meta, layers)]
    rotates, heads = meta.flag("rope.scaling.finetuned", True), read_heads(meta, tensors, layers)
    return {
        **sizes, **heads, **read_factors(meta, heads["head_dim"]), **_space(meta, tensors, "mamba_"),
        "layer_types": kinds,
        "mamba_expand": meta.whole("ssm.inner_size") / hidden, "hidden_act": "silu", "num_local_experts": experts,
        "num_experts_per_tok": meta.whole("expert_used_count", 1, least=0) or 1,
        "intermediate_size": max([*meta.each("feed_forward_length", layers), 1]),
        "shared_intermediate_size": rows_of(meta, tensors, "ffn_gate_shexp.weight" if experts else "ffn_gate.weight"),
        "attention_bias": some(tensors, "attn_q.bias"), "position_embedding_type": "rope" if rotates else "nope",
    }  # fmt: skip


def _lfm2(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    kind = "lfm2" if meta.arch == "lfm2" else "lfm2_moe"
    sizes = read_sizes(meta, kind, eps="norm_eps")
    layers = sizes["num_hidden_layers"]
    if meta.value("attention.sliding_window") is not None:
        raise meta.fail(f"{meta.arch} with windows is not supported")
    found = {
        **sizes, **read_heads(meta, tensors, layers), "conv_L_cache": meta.whole("shortconv.l_cache"),
        "conv_bias": some(tensors, "shortconv.conv.bias"), "intermediate_size": meta.whole("feed_forward_length"),
        "layer_types": ["full_attention" if count else "conv" for count in _counts(meta, layers)],
    }  # fmt: skip
    if kind == "lfm2":
        return {**found, "block_auto_adjust_ff_dim": False}
    return {
        **found, **read_experts(meta, "num_experts"), "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "num_dense_layers": meta.whole("leading_dense_block_count", 0, least=0), "use_expert_bias": True,
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
        "routed_scaling_factor": read_gates_scale(meta),
    }  # fmt: skip


def _falcon_h1(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """The converter multiplies the multipliers into the weights, so a head that shares the embedding's matrix would
    have wrong numbers."""
    if "output.weight" not in tensors:
        raise meta.fail("falcon-h1 without output.weight is not supported")
    sizes = read_sizes(meta, "falcon_h1")
    return {
        **sizes, **read_heads(meta, tensors, sizes["num_hidden_layers"]), **_space(meta, tensors, "mamba_"),
        "intermediate_size": meta.whole("feed_forward_length"), "mamba_d_ssm": meta.whole("ssm.inner_size"),
        "mamba_rms_norm": some(tensors, "ssm_norm.weight"), "mamba_norm_before_gate": False, "hidden_act": "silu",
        "projectors_bias": some(tensors, "ssm_out.bias"), "mlp_bias": some(tensors, "ffn_up.bias"),
        "_multiplied": True,
    }  # fmt: skip


def _nemotron_h(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    """Attention layers have key heads, feed-forward layers and mixtures have a width, and all others have a state."""
    sizes = read_sizes(meta, "nemotron_h", eps="layer_norm_epsilon")
    layers, mixed = sizes["num_hidden_layers"], meta.arch == "nemotron_h_moe"
    drafts = meta.whole("nextn_predict_layers", 0, least=0, most=64)
    widths = meta.each("feed_forward_length", layers + drafts)[:layers]
    letters = ["*" if keys else ("E" if mixed else "-") if width else "M"
               for keys, width in zip(_counts(meta, layers), widths, strict=True)]  # fmt: skip
    heads, width = meta.whole("ssm.time_step_rank"), meta.whole("ssm.inner_size")
    found: Config = {
        **sizes, **read_heads(meta, tensors, layers, rope=False), "hybrid_override_pattern": "".join(letters),
        "intermediate_size": max([*widths, 1]), "mlp_hidden_act": "relu2", "mlp_bias": some(tensors, "ffn_up.bias"),
        "mamba_num_heads": heads, "mamba_head_dim": width // heads, "n_groups": meta.whole("ssm.group_count"),
        "ssm_state_size": meta.whole("ssm.state_size"), "conv_kernel": meta.whole("ssm.conv_kernel"),
        "use_conv_bias": some(tensors, "ssm_conv1d.bias"), "use_bias": some(tensors, "ssm_in.bias"),
    }  # fmt: skip
    if not mixed:
        return found
    if meta.value("moe_latent_size") is not None or meta.whole("expert_group_count", 1) != 1:
        raise meta.fail("nemotron_h_moe with moe_latent_size, or with groups of experts, is not supported")
    return {
        **found, **read_experts(meta, "n_routed_experts"), "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": meta.whole("expert_shared_feed_forward_length"),
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
        "routed_scaling_factor": read_gates_scale(meta),
    }  # fmt: skip


def _mamba(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    found = {
        **read_sizes(meta, "mamba", eps="layer_norm_epsilon"), "intermediate_size": meta.whole("ssm.inner_size"),
        "state_size": meta.whole("ssm.state_size"), "conv_kernel": meta.whole("ssm.conv_kernel"),
        "time_step_rank": meta.whole("ssm.time_step_rank"), "use_bias": some(tensors, "ssm_in.bias"),
        "use_conv_bias": some(tensors, "ssm_conv1d.bias"),
    }  # fmt: skip
    if meta.flag("ssm.dt_b_c_rms", False):
        return {**found, "architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
    return found


def _mamba2(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    heads, width = meta.whole("ssm.time_step_rank"), meta.whole("ssm.inner_size")
    sizes = read_sizes(meta, "mamba2", eps="layer_norm_epsilon")
    return {
        **sizes, "num_heads": heads, "head_dim": width // heads, "n_groups": meta.whole("ssm.group_count"),
        "state_size": meta.whole("ssm.state_size"), "conv_kernel": meta.whole("ssm.conv_kernel"),
        "expand": width / sizes["hidden_size"], "use_bias": some(tensors, "ssm_in.bias"),
        "use_conv_bias": some(tensors, "ssm_conv1d.bias"),
    }  # fmt: skip


def _jamba(meta: Meta, tensors: Tensors, factors: Factors) -> Config:
    sizes = read_sizes(meta, "jamba")
    layers, hidden, width = sizes["num_hidden_layers"], sizes["hidden_size"], meta.whole("ssm.inner_size")
    if width % hidden:
        raise meta.fail(f"{width} channels are not a multiple of a layer's {hidden}")
    attends = [index for index, count in enumerate(_counts(meta, layers)) if count]
    mixtures = [index for index in range(layers) if f"blk.{index}.ffn_gate_inp.weight" in tensors]
    found: Config = {
        **sizes, **read_heads(meta, tensors, layers, rope=False),
        "intermediate_size": meta.whole("feed_forward_length"),
        "mamba_expand": width // hidden, "mamba_d_state": meta.whole("ssm.state_size"), "hidden_act": "silu",
        "mamba_d_conv": meta.whole("ssm.conv_kernel"), "mamba_dt_rank": meta.whole("ssm.time_step_rank"),
        "mamba_conv_bias": some(tensors, "ssm_conv1d.bias"), "mamba_proj_bias": some(tensors, "ssm_in.bias"),
        "num_experts": 1, "num_experts_per_tok": 1,
    }  # fmt: skip
    found["attn_layer_period"], found["attn_layer_offset"] = _period(meta, attends, layers, "attention")
    if mixtures:
        found.update(read_experts(meta, "num_experts"))
        found["expert_layer_period"], found["expert_layer_offset"] = _period(meta, mixtures, layers, "mixtures")
    return found


def _period(meta: Meta, found: list[int], layers: int, what: str) -> tuple[int, int]:
    """The period of a list of layer types, and the first layer of the rarer type."""
    if found:
        period = found[1] - found[0] if len(found) > 1 else layers
        if found == [index for index in range(layers) if index % period == found[0]]:
            return period, found[0]
    raise meta.fail(f"layers with {what} are not evenly spaced, which is not supported")


CONFIGS: dict[str, Callable[[Meta, Tensors, Factors], Config]] = {
    "deepseek2": _deepseek2,
    "deepseek32": _deepseek2,
    "glm-dsa": _deepseek2,
    "mistral4": _deepseek2,
    "falcon-h1": _falcon_h1,
    "gemma4": _gemma4,
    "glm4moe": _glm4moe,
    "granitehybrid": _granitehybrid,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen2moe": _qwen2moe,
    "qwen3next": _qwen3next,
}
"""How to read the config of each architecture in this file."""
