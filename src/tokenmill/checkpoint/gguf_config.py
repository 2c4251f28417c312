"""From GGUF metadata to what config.json would hold. Owns: which metadata key means which config key, by architecture.

Some numbers are not in the format because its usual reader has them built in (Gemma's layer pattern, its query scale).
These numbers are here. Must not know: how models are built, tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tokenmill.checkpoint.gguf_config_layers import CONFIGS, read_factors
from tokenmill.checkpoint.gguf_config_mixtures import MIXTURES
from tokenmill.checkpoint.gguf_config_older import OLDER
from tokenmill.checkpoint.gguf_meta import ARCHITECTURES, MAX_EXPERTS, MAX_LAYERS, Factors, Meta, Tensors, shown
from tokenmill.checkpoint.gguf_names import epsilon_key
from tokenmill.checkpoint.gguf_unread import check_unread
from tokenmill.core.yarn import yarn_gain

_PARTIAL = ("glm4", "nemotron", "qwen35", "qwen35moe")
"""Architectures whose config.json without a share means that a part of each head rotates."""


def read_config(metadata: Mapping[str, Any], tensors: Tensors, factors: Factors, path: str) -> dict[str, Any]:
    """Make the config.json of a GGUF file. A ModelError names the file and the key."""
    meta = Meta(metadata, path)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise meta.fail("it has no token_embd.weight matrix; it is not a whole model (a LoRA or a vocabulary alone?)")
    words = meta.metadata.get("tokenizer.ggml.tokens")
    if isinstance(words, list) and len(words) > embedding.shape[0]:
        raise meta.fail(f"its vocabulary has {len(words)} tokens and token_embd.weight only {embedding.shape[0]} rows")
    if not isinstance(words, list) and meta.whole("vocab_size", embedding.shape[0]) != embedding.shape[0]:
        # Beside a vocabulary llama.cpp reads this key only to name the model's size.
        said = meta.value("vocab_size")
        raise meta.fail(f"vocab_size is {said}, and token_embd.weight has {embedding.shape[0]} rows")
    whole = {"vocab_size": embedding.shape[0], "torch_dtype": _dtype(tensors),
             "tie_word_embeddings": "output.weight" not in tensors}  # fmt: skip
    own = CONFIGS.get(str(meta.arch)) or MIXTURES.get(str(meta.arch)) or OLDER.get(str(meta.arch))
    if own is not None:
        config = {"architectures": [ARCHITECTURES[str(meta.arch)]], **whole, **own(meta, tensors, factors)}
    else:
        config = {**_common(meta, tensors), **whole}
        scaling = _rope_scaling(meta, config, factors)
        if scaling is not None:
            config["rope_scaling"] = scaling
        config.update(_OWN.get(str(meta.arch), _nothing)(meta, config))
    check_unread(meta, config)
    return config


def _common(meta: Meta, tensors: Tensors) -> dict[str, Any]:
    hidden, heads = meta.whole("embedding_length"), meta.whole("attention.head_count")
    head = meta.whole("attention.key_length", max(hidden // heads, 1))
    if meta.whole("attention.value_length", head) != head:
        raise meta.fail("keys and values of different lengths are not supported")
    share = meta.share(head)
    config = {
        "architectures": [ARCHITECTURES[str(meta.arch)]],
        "model_type": str(meta.arch),
        "hidden_size": hidden,
        "num_hidden_layers": meta.whole("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.whole("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": meta.whole("context_length"),
        "rms_norm_eps": meta.number(epsilon_key(str(meta.arch))),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    # A mixture of experts may state only the width of its experts.
    if meta.value("feed_forward_length") is not None or not meta.value("expert_count"):
        config["intermediate_size"] = meta.whole("feed_forward_length")
    if meta.arch == "command-r":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    if share < 1.0 or meta.arch in _PARTIAL:
        config["partial_rotary_factor"] = share
    if meta.arch not in ("gemma2", "gemma3", "granite") and meta.value("attention.scale"):
        if abs(meta.number("attention.scale") * math.sqrt(head) - 1.0) > 1e-3:
            raise meta.fail(f"{meta.arch}.attention.scale is not supported")
    return config


def _dtype(tensors: Tensors) -> str:
    """The dtype of activations: the type of most plain tensors in the file, or bfloat16 if the file is quantised."""
    sizes: dict[str, int] = {}
    for info in tensors.values():
        sizes[info.type.name] = sizes.get(info.type.name, 0) + info.stop - info.start
    most = max(sizes, key=lambda name: sizes[name])
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _rope_scaling(meta: Meta, config: dict[str, Any], factors: Factors) -> dict[str, Any] | None:
    further = ("yarn_log_multiplier",) if meta.arch == "mistral3" else ()
    read = ("attn_factor", "yarn_beta_fast", "yarn_beta_slow", *further)
    kind, factor = meta.scaling(*read)
    gain = meta.number("rope.scaling.attn_factor", 1.0)
    scaling: dict[str, Any]
    original = meta.whole("rope.scaling.original_context_length", config["max_position_embeddings"], least=2)
    if (per_pair := factors("rope_freqs.weight")) is not None:
        # Llama 3.1's files store the result of its formula: one divisor per pair of numbers, used at every length.
        per_pair = meta.stretched(per_pair, "rope_freqs.weight", *read)
        plain = {"rope_type": "longrope", "attention_factor": gain, "original_max_position_embeddings": original}
        return {**plain, "long_factor": per_pair, "short_factor": per_pair}
    long, short = factors("rope_factors_long.weight"), factors("rope_factors_short.weight")
    if long is not None and short is not None:
        long, short = (meta.stretched(one, "rope_factors_long.weight", *read) for one in (long, short))
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        if meta.value("rope.scaling.attn_factor") is not None:
            scaling["attention_factor"] = gain
        return {**scaling, "original_max_position_embeddings": original}
    if kind != "yarn" and gain != 1.0:
        raise meta.fail(f"{meta.arch}.rope.scaling.attn_factor is not supported without yarn or stored factors")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise meta.fail(f"rope scaling {shown(kind)} is not supported (none, linear, yarn, or stored factors)")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        if gain != 1.0:
            scaling["attention_factor"] = gain * yarn_gain(factor)
        for name in ("beta_fast", "beta_slow"):
            if meta.value(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = meta.number(f"rope.scaling.yarn_{name}")
    return scaling


def _nothing(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    return {}


def _says_rope(config: dict[str, Any]) -> dict[str, Any]:
    """For families whose config.json without rope settings means scaled ones: here it means that nothing is scaled."""
    if "rope_scaling" in config:
        return {}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}}


def _experts(meta: Meta) -> dict[str, Any]:
    count = meta.whole("expert_count", most=MAX_EXPERTS)
    return {"num_local_experts": count, "num_experts_per_tok": meta.whole("expert_used_count", most=count)}


def _window(meta: Meta) -> int:
    return meta.whole("attention.sliding_window", 0, least=0)


def _llama(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    """Llama, Mistral and Mixtral share this architecture name."""
    own: dict[str, Any] = {"sliding_window": _window(meta) or None}
    if meta.whole("expert_count", 0, least=0, most=MAX_EXPERTS):
        return {**own, **_experts(meta), "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if own["sliding_window"]:
        return {**own, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return own


def _qwen3moe(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    own = _experts(meta)
    own["num_experts"] = own.pop("num_local_experts")
    # The format has no key for this. Every published model of the family normalises.
    return {**own, "moe_intermediate_size": meta.whole("expert_feed_forward_length"), "norm_topk_prob": True}


def _phi3(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    original = meta.whole("rope.scaling.original_context_length", config["max_position_embeddings"], least=2)
    return {"sliding_window": _window(meta) or None, "original_max_position_embeddings": original}


_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layer counts of the 27B sizes. Their queries are scaled by hidden size / heads instead of the head's own size."""


def _gemma(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    heads, head = config["num_attention_heads"], config["head_dim"]
    scalar: float = head
    if config["num_hidden_layers"] == _LARGEST_GEMMA[str(meta.arch)]:
        scalar = config["hidden_size"] / heads
    if meta.value("attention.scale"):
        scalar = meta.number("attention.scale") ** -2
    own = {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": _window(meta)}
    own["sliding_window"] = own["sliding_window"] or (4096 if meta.arch == "gemma2" else 512)
    if meta.arch == "gemma3":
        cap = meta.number("final_logit_softcapping", 0.0) or None
        return {
            **own, "attn_logit_softcapping": None, "final_logit_softcapping": cap, "model_type": "gemma3_text",
            "rope_local_base_freq": meta.number("rope.freq_base_swa", 10000.0),
            "layer_types": meta.kinds(config["num_hidden_layers"], 6), "rope_theta": meta.number("rope.freq_base", 1e6),
        }  # fmt: skip
    return {
        **own,
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        "layer_types": meta.kinds(config["num_hidden_layers"], 2),
    }


def _gpt_oss(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    own = {**_experts(meta), "sliding_window": _window(meta), "rope_theta": meta.number("rope.freq_base", 150000.0),
           "layer_types": meta.kinds(config["num_hidden_layers"], 2)}  # fmt: skip
    own["intermediate_size"] = meta.whole("expert_feed_forward_length", config.get("intermediate_size"))
    own.update(_says_rope({**config, **own}))
    if "rope_scaling" in config:
        # These models were trained without rounding the borders of the ramp, and the format has no key for that.
        own["rope_scaling"] = {**config["rope_scaling"], "truncate": False}
    return {**own, "model_type": "gpt_oss", "attention_bias": True}


_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def _apertus(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    """The parameters of each layer's activation are stored under keys without the architecture's name."""
    config.pop("mlp_bias")
    layers, found = config["num_hidden_layers"], {}
    for name in _XIELU:
        values = meta.metadata.get(f"xielu.{name}")
        listed = values if isinstance(values, list) else [values] * layers
        if len(listed) != layers or not all(isinstance(one, float) and math.isfinite(one) for one in listed):
            raise meta.fail(f"xielu.{name} must be a number, or one for each of {layers} layers")
        found[name] = listed
    return {"hidden_act": "xielu", "_xielu": found, **_says_rope(config)}


def _arcee(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "relu2"}


def _cohere2(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer has full attention and does not rotate."""
    own = {"layer_norm_eps": config.pop("rms_norm_eps"), "logit_scale": meta.number("logit_scale")}
    return {**own, "sliding_window": _window(meta), "layer_types": meta.kinds(config["num_hidden_layers"], 4)}


def _ernie(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    biased = config.pop("attention_bias")
    config.pop("mlp_bias")
    return {"use_bias": biased}


def _exaone4(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    """The large size has windows in three layers of four; the file need not list them."""
    window, layers = _window(meta), config["num_hidden_layers"]
    kinds = meta.kinds(layers, 4) if window else ["full_attention"] * layers
    config.pop("attention_bias")
    config.pop("mlp_bias")
    return {"sliding_window": window or None, "sliding_window_pattern": 4 if window else None, "layer_types": kinds}


def _glm4(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    """In a model that also sees, the converter reorders the rows of queries and keys."""
    if meta.metadata.get("glm4.rope.dimension_sections") is not None:
        raise meta.fail("glm4.rope.dimension_sections (the text part of GLM-4.1V) is not supported")
    return {}


def _granite(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    if not meta.flag("rope.scaling.finetuned", True):
        raise meta.fail("granite without rotation (rope.scaling.finetuned = false) is not supported")
    return read_factors(meta, config["head_dim"])


def _hunyuan(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    """The base in the file already includes the stretching of the rotation."""
    config.pop("mlp_bias")
    return {"model_type": "hunyuan_v1_dense"}


def _olmo2(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    """With windows this is Olmo 3, which stretches the rotation only in layers with full attention."""
    config.pop("mlp_bias")
    window, layers = _window(meta), config["num_hidden_layers"]
    if not window:
        return {}
    base = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    scaling = config.pop("rope_scaling", {})
    return {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": window,
        "layer_types": meta.kinds(layers, 4),
        "rope_parameters": {"full_attention": {**base, **scaling}, "sliding_attention": base},
    }  # fmt: skip


def _first_gemma(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _command_r(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "cohere", "layer_norm_eps": config.pop("rms_norm_eps"),
            "logit_scale": meta.number("logit_scale")}  # fmt: skip


def _nemotron(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    return {"norm_eps": config.pop("rms_norm_eps"), "hidden_act": "relu2"}


def _qwen35(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    """The converter orders value heads for a tiled broadcast, and appends the layers that draft tokens."""
    values = meta.whole("ssm.time_step_rank")
    own = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": config["num_hidden_layers"] - meta.whole("nextn_predict_layers", 0, least=0, most=64),
        "linear_conv_kernel_dim": meta.whole("ssm.conv_kernel"),
        "linear_num_key_heads": meta.whole("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": meta.whole("ssm.state_size"),
        "linear_value_head_dim": meta.whole("ssm.inner_size") // values,
        "full_attention_interval": meta.whole("full_attention_interval", 4),
        "_tiled_value_heads": True,
    }
    if meta.arch == "qwen35":
        return own
    experts = _experts(meta)
    experts["num_experts"] = experts.pop("num_local_experts")
    widths = {"moe_intermediate_size": "expert_feed_forward_length",
              "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}  # fmt: skip
    return {**own, **experts, **{k: meta.whole(v) for k, v in widths.items()}, "model_type": "qwen3_5_moe_text"}


def _jais2(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    return {"layer_norm_eps": config.pop("rms_norm_eps"), "hidden_act": "relu2"}


def _exaone(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    """The first EXAONE models are Llamas, but the converter does not interleave their rows."""
    return {"model_type": "llama"}


def _mistral3(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    """Ministral 3, which scales queries by position. Without that scale it is the text part of a Mistral."""
    config.pop("attention_bias"), config.pop("mlp_bias")
    if meta.whole("expert_count", 0, least=0):
        raise meta.fail("mistral3 with experts is not supported")
    own: dict[str, Any] = {"sliding_window": _window(meta) or None}
    scale, rope = meta.number("attention.temperature_scale", 0.0), config.get("rope_scaling", {})
    everywhere = meta.number("rope.scaling.yarn_log_multiplier", 0.0)
    if not scale:
        if rope.get("rope_type") == "yarn" and everywhere:
            own["rope_scaling"] = {**rope, "mscale": 1.0, "mscale_all_dim": everywhere}
        return {**own, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    if rope.get("rope_type") != "yarn" or meta.value("rope.scaling.yarn_log_multiplier") is None:
        raise meta.fail(
            "mistral3 with attention.temperature_scale must have yarn and a rope.scaling.yarn_log_multiplier"
        )
    span = rope["original_max_position_embeddings"]
    if meta.whole("attention.temperature_length", span) != span:
        raise meta.fail("mistral3.attention.temperature_length must be rope.scaling.original_context_length")
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, **rope, "mscale": 1.0, "mscale_all_dim": everywhere,
            "rope_theta": config.pop("rope_theta"), "llama_4_scaling_beta": scale}  # fmt: skip
    config.pop("rope_scaling")
    return {**own, "model_type": "ministral3", "rope_parameters": rope}


def _seed_oss(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_out_bias": False}


def _smollm3(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer does not rotate, and the format has no key for that."""
    return {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _starcoder2(meta: Meta, config: dict[str, Any]) -> dict[str, Any]:
    biased = config.pop("attention_bias")
    config.pop("mlp_bias")
    own = {"norm_epsilon": config.pop("rms_norm_eps"), "use_bias": biased, "sliding_window": _window(meta) or None}
    return {**own, "hidden_act": "gelu_pytorch_tanh"}


_OWN: dict[str, Callable[[Meta, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen3moe": _qwen3moe,
    "qwen3vlmoe": _qwen3moe,
    "exaone": _exaone,
    "glm4": _glm4,
    "jais2": _jais2,
    "mistral3": _mistral3,
    "phi3": _phi3,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gpt-oss": _gpt_oss,
    "apertus": _apertus,
    "arcee": _arcee,
    "cohere2": _cohere2,
    "ernie4_5": _ernie,
    "command-r": _command_r,
    "exaone4": _exaone4,
    "gemma": _first_gemma,
    "nemotron": _nemotron,
    "granite": _granite,
    "hunyuan-dense": _hunyuan,
    "olmo2": _olmo2,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
