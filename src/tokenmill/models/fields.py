"""Every key of a config.json, by architecture. Owns: what an absent key means, which values are built, which keys do
nothing, and refusing the others by name. The numbers are those of Transformers' config classes.

Must not know: how a family is built, tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.errors import ModelError

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_EVERYWHERE = ("max_position_embeddings", "n_positions", "seq_length", "tie_word_embeddings", "quantization_config")
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,)}
_GATED = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **dict.fromkeys(_ROPE)}


@dataclass(frozen=True)
class Fields:
    """One architecture: `needed` keys have no default; `only` lists the values that are built; `ignored` do nothing."""

    model_type: str
    needed: tuple[str, ...] = _SIZES
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    layers: str | None = None
    """The one kind that `layer_types` may name where a family has no layers of several kinds."""

    def knows(self, name: str) -> bool:
        """Is this key read, or is it known to do nothing here?"""
        return name in self.needed or name in self.defaults or name in self.ignored or name in _EVERYWHERE


_QWEN = {**_GATED, "num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False,
         "sliding_window": 4096}  # fmt: skip
_GEMMA = {
    **{name: value for name, value in _GATED.items() if name != "hidden_act"},
    **{"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "num_key_value_heads": 4},
    **{"head_dim": 256, "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    **{"layer_types": None, "attn_logit_softcapping": None, "final_logit_softcapping": None},
}
_NO_MLP_BIAS = {"mlp_bias": (False,), "lm_head_bias": (False,)}
_NOT_GEMMA = {**_NO_MLP_BIAS, "use_bidirectional_attention": (False,)}
_MOE = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")

FIELDS: dict[str, Fields] = {
    "LlamaForCausalLM": Fields(
        "llama",
        defaults={**_GATED, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
                  "attention_bias": False, "mlp_bias": False},
        only={"lm_head_bias": (False,)},
        layers="full_attention",
    ),
    "MistralForCausalLM": Fields(
        "mistral",
        defaults={**_GATED, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072,
                  "sliding_window": 4096},
        only=_NO_BIAS,
        layers="sliding_attention",
    ),
    "Qwen2ForCausalLM": Fields(
        "qwen2",
        defaults={**_QWEN, "head_dim": None, "max_window_layers": 28, "layer_types": None},
        only={**_NO_MLP_BIAS, "use_mrope": (False,)},
        ignored=("attention_bias",),
    ),
    "Qwen3ForCausalLM": Fields(
        "qwen3",
        defaults={**_QWEN, "head_dim": 128, "max_window_layers": 28, "layer_types": None, "attention_bias": False},
        only=_NO_MLP_BIAS,
    ),
    "Qwen3MoeForCausalLM": Fields(
        "qwen3_moe",
        needed=(*_SIZES, "moe_intermediate_size", "num_experts", "num_local_experts"),
        defaults={**_QWEN, "num_key_value_heads": 4, "head_dim": None, "attention_bias": False,
                  "decoder_sparse_step": 1, "num_experts_per_tok": 8, "norm_topk_prob": False, "mlp_only_layers": None},
        only=_NO_MLP_BIAS,
        # Transformers windows every layer of this family or none, whatever max_window_layers says.
        ignored=(*_MOE, "max_window_layers"),
        layers="full_attention",
    ),
    "MixtralForCausalLM": Fields(
        "mixtral",
        needed=(*_SIZES, "num_local_experts", "num_experts"),
        defaults={**_GATED, "num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                  "max_position_embeddings": 131072, "sliding_window": None, "num_experts_per_tok": 2},
        only=_NO_BIAS,
        ignored=_MOE,
        layers="sliding_attention",
    ),
    "Phi3ForCausalLM": Fields(
        "phi3",
        defaults={**_GATED, "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-5,
                  "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "sliding_window": None},
        only={**_NO_BIAS, "full_attn_mod": (1,), "interpolate_factor": (1,)},
        layers="sliding_attention",
    ),
    "GptOssForCausalLM": Fields(
        "gpt_oss",
        needed=(*_SIZES, "num_local_experts", "num_experts"),
        defaults={**_GATED, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
                  "max_position_embeddings": 131072, "sliding_window": 128, "num_experts_per_tok": 4,
                  "experts_per_token": None, "attention_bias": True, "layer_types": None},
        only={**_NO_MLP_BIAS, "hidden_act": ("silu",), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        ignored=(*_MOE, "initial_context_length"),
    ),
    "Gemma2ForCausalLM": Fields(
        "gemma2",
        defaults={**_GEMMA, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
                  "final_logit_softcapping": 30.0},
        only={**_NOT_GEMMA, "sliding_window_pattern": (2,)},
        ignored=("hidden_act", "sliding_window_size", "cache_implementation"),
    ),
    "Gemma3ForCausalLM": Fields(
        "gemma3_text",
        defaults={**_GEMMA, "max_position_embeddings": 131072, "sliding_window_pattern": 6,
                  "rope_local_base_freq": None},
        only={**_NOT_GEMMA, "attn_logit_softcapping": ()},
        ignored=("hidden_act", "_sliding_window_pattern", "cache_implementation"),
    ),
    "DeepseekV2ForCausalLM": Fields(
        "deepseek_v2",
        needed=(*_SIZES, "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
        defaults={**_GATED, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False,
                  "num_key_value_heads": None, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536,
                  "n_group": None, "topk_group": None, "n_shared_experts": 2, "qk_nope_head_dim": 128,
                  "qk_rope_head_dim": 64, "v_head_dim": 128, "routed_scaling_factor": 1.0, "topk_method": "greedy"},
        only={"lm_head_bias": (False,), "norm_topk_prob": (False,), "scoring_func": ("softmax",),
              "moe_layer_freq": (1,), "num_nextn_predict_layers": (0,)},
        ignored=(*_MOE, "head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size", "num_experts"),
        layers="full_attention",
    ),
    "FalconForCausalLM": Fields(
        "falcon",
        needed=("vocab_size", "hidden_size", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head"),
        defaults={**dict.fromkeys(_ROPE), "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-5,
                  "num_kv_heads": None, "n_head_kv": None, "alibi": False, "new_decoder_architecture": False,
                  "multi_query": True, "parallel_attn": True, "bias": False, "max_position_embeddings": 2048,
                  "ffn_hidden_size": None, "activation": "gelu", "tie_word_embeddings": True},
        only={"apply_residual_connection_post_layernorm": (False,)},
        ignored=("head_dim", "rotary"),
        layers="full_attention",
    ),
    "GPT2LMHeadModel": Fields(
        "gpt2",
        needed=("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "max_position_embeddings", "hidden_size",
                "num_hidden_layers", "num_attention_heads"),
        defaults={"n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
                  "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True},
        ignored=("n_ctx", "reorder_and_upcast_attn"),
        layers="full_attention",
    ),
    "GPTNeoXForCausalLM": Fields(
        "gpt_neox",
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "rotary_pct": 0.25,
                  "rotary_emb_base": 10000.0, "use_parallel_residual": True, "attention_bias": True,
                  "tie_word_embeddings": False, "rope_parameters": None, "rope_scaling": None,
                  "original_max_position_embeddings": None},
        only={"head_dim": ()},
        # Transformers reads these two under the names of their own that this family has.
        ignored=("rope_theta", "partial_rotary_factor"),
        layers="full_attention",
    ),
    "OPTForCausalLM": Fields(
        "opt",
        needed=("vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads",
                "max_position_embeddings"),
        defaults={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "word_embed_proj_dim": None,
                  "activation_function": "relu", "enable_bias": True, "tie_word_embeddings": True},
        only={"layer_norm_elementwise_affine": (True,)},
        layers="full_attention",
    ),
    "BloomForCausalLM": Fields(
        "bloom",
        needed=("vocab_size", "hidden_size", "n_embed", "n_layer", "n_head", "num_hidden_layers",
                "num_attention_heads"),
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        only={"apply_residual_connection_post_layernorm": (False,)},
        ignored=("slow_but_exact", "attention_softmax_in_fp32", "offset_alibi", "masked_softmax_fusion", "n_inner",
                 "bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv"),
        layers="full_attention",
    ),
}  # fmt: skip

_ONLY: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
}
"""What is built, in every architecture."""

_HARMLESS = re.compile(
    r".*(dropout|dropout_prob|_pdrop|layerdrop|_token_id|_token_ids|_token_index)$|(init|initializer)_\w+|output_\w+|summary_\w+"
    r"|(unsloth|_)\w*|gradient_checkpointing\w*|(num_|id2|)label\w*|\w+_loss\w*|(torch_|)dtype|(auto_|)map|"
    r"architectures|model_type|transformers_version|use_cache|use_return_dict|return_dict\w*|problem_type|"
    r"pretraining_tp|chunk_size_feed_forward|(attn|experts)_implementation|task_specific_params|finetuning_task|prefix|"
    r"name_or_path|tie_encoder_decoder|cross_attention_hidden_size|is_decoder|use_bfloat16|torchscript|tf_legacy_loss|"
    r"classifier_\w+|tokenizer_class|custom_pipelines|compression_config|quantization_config|use_flash_attn\w*|"
    r"max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_k|"
    r"top_p|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids|"
    r"num_return_sequences|remove_invalid_values|exponential_decay_length_penalty|suppress_tokens|begin_suppress_tokens"
)
"""Keys that never change what a model computes: training, storage, what older files say about generation."""

_CHANGES = re.compile(
    r"clip|cap(ping)?$|multiplier|(^|_)scal(e|es|ing)(_|$)|window|sink|rope|rotary|mrope|alibi|yarn|ntk|"
    r"q[kv]{1,2}_?(layer)?_?norm|(layer|pre|post|sandwich|embed\w*)_?norm$|residual|(^|_)bias(es)?$|parallel_attn|"
    r"cross_attention|mamba|ssm|linear_attn|attention_chunk|bidirectional|prefix_lm|logit_"
)
"""Names that other model families give to what changes every answer; not refused where they are switched off. (Experts
are told by tensors that are left over.)"""


def complete(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The config with absent keys as the family's default says."""
    row = FIELDS.get(architecture)
    return {**(row.defaults if row else {}), **config}


def check_fields(config: Mapping[str, Any], architecture: str) -> list[str]:
    """Refuse what is not built; -> keys that are not known, which may or may not matter."""
    row, unknown = FIELDS[architecture], []
    kind = config.get("model_type")
    if kind != row.model_type and any(kind == other.model_type for other in FIELDS.values()):
        raise ModelError(f"config.json: architecture '{architecture}' and model_type {kind!r} contradict each other.")
    for name, value in config.items():
        if name in row.only or name in _ONLY:
            _check_only(name, value, row.only.get(name, _ONLY.get(name, ())))
        elif name == "layer_types" and row.layers is not None:
            _check_layers(value, row.layers, config)
        elif value is not None and not row.knows(name) and not _HARMLESS.fullmatch(name):
            if _CHANGES.search(name) and not _off(name, value, config):
                raise ModelError(
                    f"config.json: '{name}' = {_short(value)} changes what a model computes, and {architecture} is not "
                    f"built with it here. If it is a leftover, load with --hf-overrides '{{\"{name}\": null}}'."
                )
            unknown.append(name)
    return unknown


def _check_only(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value is not None and not any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in known
    ):
        only = " or ".join("null" if one is None else str(one).lower() for one in (*known, None)[: len(known) or 1])
        raise ModelError(f"config.json: '{name}' = {_short(value)} is not supported (only {only}).")


def _check_layers(kinds: Any, only: str, config: Mapping[str, Any]) -> None:
    """A family whose layers are all of one kind; without a window both names mean the same."""
    allowed = (only,) if config.get("sliding_window") else (only, "full_attention")
    usable = isinstance(kinds, list) and len(kinds) == config.get("num_hidden_layers", config.get("n_layer"))
    if kinds is not None and not (usable and all(kind in allowed for kind in kinds)):
        raise ModelError(f"config.json: 'layer_types' = {_short(kinds)} is not supported (only '{only}' layers).")


def _off(name: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Is this a switch that is off, or a number that does nothing?"""
    longest = config.get("max_position_embeddings")
    if name == "sliding_window" and isinstance(value, int) and isinstance(longest, int):
        return value >= longest or not value
    return value is False or value in ("", [], {}) or (not isinstance(value, bool) and value in (0, 1))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
