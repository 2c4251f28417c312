"""Every key of a config.json, by architecture. Owns: what an absent key means, which values are built, which keys do
nothing, and refusing the others by name. The numbers are those of Transformers' config classes.

Must not know: how a family is built, tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenmill.core.errors import ModelError
from tokenmill.models.common_keys import GATED, GPT_NEEDED, MOE, NO_BIAS, NO_MLP_BIAS, POSITION_NAMES, ROPE, without
from tokenmill.models.family_row import SIZES, Fields
from tokenmill.models.table import TABLE
from tokenmill.models.table_mixtures import DEEPSEEK_KEYS, SIGMOID

_LATENT = (*SIZES, "moe_intermediate_size", "n_routed_experts")

_LATENT_DENSE = {**GATED, "attention_bias": False, "tie_word_embeddings": True}
_HYBRID = {
    **GATED, "head_dim": 256, "num_key_value_heads": 2, "max_position_embeddings": 32768, "attention_bias": False,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "layer_types": None, "full_attention_interval": 4, "partial_rotary_factor": 0.25,
}  # fmt: skip
_HYBRID_MIX = {
    **_HYBRID, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10,
    "num_experts": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "intermediate_size": 5632,
}  # fmt: skip
# The convolution of recurrent layers has the same activation as feed-forward layers.
_HYBRID_ONLY: dict[str, tuple[Any, ...]] = {
    **NO_MLP_BIAS, "hidden_act": ("silu", "swish"), "attn_output_gate": (True,), "output_gate_type": ("swish", "silu"),
}  # fmt: skip
_INDEXED = {
    **GATED, **DEEPSEEK_KEYS, "attention_bias": False, "first_k_dense_replace": 3, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "mlp_layer_types": None,
    "index_topk": 2048, "index_head_dim": 128, "rope_interleave": True, "layer_types": None,
    "num_nextn_predict_layers": None,
}  # fmt: skip
_INDEXED_ONLY = {**NO_MLP_BIAS, **SIGMOID, "moe_layer_freq": (1,), "rope_interleave": (True,)}
# Transformers rotates by qk_rope_head_dim, whatever head_dim is.
_INDEXED_IDLE = (*MOE, "head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size")
# Only for layers that make drafts: qwen3_next.build_later reads it. States are kept as an option says.
_HYBRID_IDLE = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
_FILES: dict[str, Fields] = {
    "Qwen3NextForCausalLM": Fields(
        "qwen3_next", needed=SIZES, defaults=_HYBRID_MIX, only=_HYBRID_ONLY, ignored=(*MOE, *_HYBRID_IDLE)
    ),
    "Qwen3_5ForCausalLM": Fields(
        "qwen3_5_text", needed=SIZES, defaults={**_HYBRID, "num_key_value_heads": 4}, only=_HYBRID_ONLY,
        ignored=_HYBRID_IDLE,
    ),
    "Qwen3_5MoeForCausalLM": Fields(
        "qwen3_5_moe_text", needed=SIZES,
        defaults={**without(_HYBRID_MIX, "decoder_sparse_step", "mlp_only_layers"),
                  "num_experts_per_tok": 8, "num_experts": 256},
        only={**_HYBRID_ONLY, "norm_topk_prob": (True,), "mlp_only_layers": ([],)}, ignored=(*MOE, *_HYBRID_IDLE),
    ),
    "GptOssForCausalLM": Fields(
        "gpt_oss",
        needed=(*SIZES, "num_local_experts", "num_experts"),
        defaults={**GATED, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
                  "max_position_embeddings": 131072, "sliding_window": 128, "num_experts_per_tok": 4,
                  "experts_per_token": None, "attention_bias": True, "layer_types": None},
        only={**NO_MLP_BIAS, "hidden_act": ("silu",), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        ignored=(*MOE, "initial_context_length"),
    ),
    "KimiLinearForCausalLM": Fields(
        "kimi_linear",
        needed=(*SIZES, "moe_intermediate_size", "num_experts"),
        defaults={**without(GATED, *ROPE), "rms_norm_eps": 1e-5, "model_max_length": 1048576, "attention_bias": False,
                  "num_key_value_heads": 32, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                  "qk_rope_head_dim": 64, "v_head_dim": 128, "linear_attn_config": None, "linear_head_dim": None,
                  "linear_num_heads": None, "linear_conv_kernel_dim": None, "layer_types": None,
                  "mlp_layer_types": None, "first_k_dense_replace": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
                  **dict.fromkeys(("num_local_experts", "num_experts_per_token", "num_experts_per_tok",
                                   "moe_renormalize", "norm_topk_prob", "num_expert_group", "n_group",
                                   "num_shared_experts", "n_shared_experts"))},
        only={**NO_MLP_BIAS, **SIGMOID, "moe_router_activation_func": ("sigmoid",), "use_grouped_topk": (True,),
              "mla_use_nope": (True,), "moe_layer_freq": (1,), "num_nextn_predict_layers": (0,),
              "num_mtp_layers": (0,), "tie_word_embeddings": (False,)},
        # Nothing rotates.
        ignored=(*MOE, *ROPE, "head_dim", "qk_head_dim"),
    ),
    "BailingHybridForCausalLM": Fields(
        "bailing_hybrid",
        needed=(*SIZES, "moe_intermediate_size", "num_experts"),
        defaults={**GATED, "rope_theta": 6e6, "attention_bias": False, "model_max_length": None,
                  "num_key_value_heads": None, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                  "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 128, "linear_head_dim": None,
                  "linear_num_heads": None, "short_conv_kernel_size": 4, "linear_conv_kernel_dim": None,
                  "layer_types": None, "layer_group_size": 6, "mlp_layer_types": None, "first_k_dense_replace": 2,
                  "topk_group": 4, "routed_scaling_factor": 2.5, "kda_safe_gate": True, "kda_lower_bound": -5.0,
                  "moe_shared_expert_intermediate_size": None, "expert_swiglu_limit_list": None,
                  "share_expert_swiglu_limit_list": None, "num_nextn_predict_layers": None, "num_mtp_layers": None,
                  **dict.fromkeys(("num_local_experts", "num_experts_per_token", "num_experts_per_tok",
                                   "moe_renormalize", "norm_topk_prob", "num_expert_group", "n_group",
                                   "num_shared_experts", "n_shared_experts"))},
        only={**NO_MLP_BIAS, **SIGMOID, "hidden_act": ("silu",), "score_function": ("sigmoid",),
              "tie_word_embeddings": (False,), "rope_interleave": (True,), "use_qkv_bias": (False,),
              "use_bias": (False,), "use_qk_norm": (True,),
              "use_mla_nope": (False,), "use_nGPT": (False,), "up_proj_norm": (False,), "value_norm": (False,),
              "scale_router_input": (False,), "no_kda_lora": (True,), "use_kda_lora": (False,),
              "linear_attention": ("kda",), "moe_router_enable_expert_bias": (True,),
              "gated_attention_proj_granularity_type": ("head_wise",), "num_kv_heads_for_linear_attn": (0,)},
        # The rotated part of a head turns as a whole.
        ignored=(*MOE, "qk_head_dim", "partial_rotary_factor", "rotary_dim", "router_dtype", "seq_aux", "linear_silu",
                 "group_norm_size", "mtp_use_kda", "max_window_layers"),
    ),
    "Zamba2ForCausalLM": Fields(
        "zamba2",
        needed=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        defaults={**GATED, "hidden_act": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
                  "intermediate_size": None, "num_key_value_heads": None, "max_position_embeddings": 4096,
                  "attention_head_dim": None, "attention_hidden_size": None, "layers_block_type": None,
                  "layer_types": None, "hybrid_layer_ids": None, "num_mem_blocks": 1, "adapter_rank": 128,
                  "use_shared_attention_adapter": False, "use_mem_rope": False, "add_bias_linear": False,
                  "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 8,
                  "mamba_headdim": None, "time_step_min": 0.001, "use_conv_bias": True},
        only={**NO_BIAS, "use_long_context": (False,), "use_conv_bias": (True,), "use_shared_mlp_adapter": (True,),
              "head_dim": (), "time_step_limit": (), "tie_word_embeddings": (True,)},
        ignored=("chunk_size", "time_step_max", "time_step_floor", "use_mamba_kernels", "use_mem_eff_path",
                 "num_logits_to_keep", "kv_channels", "num_query_groups", "ffn_hidden_size"),
    ),
    "MiniMaxForCausalLM": Fields(
        "minimax",
        needed=(*SIZES, "num_local_experts", "num_experts"),
        defaults={**GATED, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": None,
                  "max_position_embeddings": 131072, "sliding_window": None, "num_experts_per_tok": 2,
                  "layer_types": None, "attn_type_list": None, "rotary_dim": None,
                  **dict.fromkeys(f"{part}_{name}_factor" for name in ("alpha", "beta")
                                  for part in ("linear_attn", "full_attn", "mlp")),
                  **dict.fromkeys(f"layernorm_{part}_{name}" for name in ("alpha", "beta")
                                  for part in ("linear_attention", "full_attention", "mlp"))},
        only={**NO_BIAS, "hidden_act": ("silu",), "postnorm": (True,), "shared_intermediate_size": (0,)},
        ignored=(*MOE, "block_size", "shared_moe_mode"),
    ),
    "DeepseekV2ForCausalLM": Fields(
        "deepseek_v2",
        needed=(*SIZES, "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
        defaults={**GATED, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False,
                  "num_key_value_heads": None, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536,
                  "n_group": None, "topk_group": None, "n_shared_experts": 2, "qk_nope_head_dim": 128,
                  "qk_rope_head_dim": 64, "v_head_dim": 128, "routed_scaling_factor": 1.0, "topk_method": "greedy"},
        only={"lm_head_bias": (False,), "norm_topk_prob": (False,), "scoring_func": ("softmax",),
              "moe_layer_freq": (1,), "num_nextn_predict_layers": (0,)},
        ignored=(*MOE, "head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size"),
        layers="full_attention",
    ),
    "DeepseekV3ForCausalLM": Fields(
        "deepseek_v3",
        needed=_LATENT,
        defaults={**GATED, **DEEPSEEK_KEYS, "max_position_embeddings": 4096, "attention_bias": False,
                  "num_key_value_heads": 128, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
                  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8, "topk_group": 4,
                  "routed_scaling_factor": 2.5, "rope_interleave": True, "num_experts_per_tok": 8,
                  "num_nextn_predict_layers": None, "num_mtp_layers": None},
        only={**NO_MLP_BIAS, **SIGMOID, "moe_layer_freq": (1,)},
        ignored=(*MOE, "head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size"),
        layers="full_attention",
    ),
    "DeepseekV32ForCausalLM": Fields(
        "deepseek_v32",
        needed=_LATENT,
        defaults={**_INDEXED, "max_position_embeddings": 163840, "num_key_value_heads": 128, "q_lora_rank": 1536,
                  "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8, "topk_group": 4, "index_n_heads": 64},
        only=_INDEXED_ONLY,
        ignored=_INDEXED_IDLE,
        layers="indexed_attention",
    ),
    "GlmMoeDsaForCausalLM": Fields(
        "glm_moe_dsa",
        needed=_LATENT,
        defaults={**_INDEXED, "max_position_embeddings": 202752, "num_key_value_heads": 64, "q_lora_rank": 2048,
                  "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5, "index_n_heads": 32,
                  "indexer_types": None, "index_topk_pattern": None, "index_topk_freq": 1,
                  "index_skip_topk_offset": 2},
        only={**_INDEXED_ONLY, "indexer_rope_interleave": (True,)},
        ignored=_INDEXED_IDLE,
        layers="indexed_attention",
    ),
    "Mistral4ForCausalLM": Fields(
        "mistral4",
        needed=_LATENT,
        defaults={**GATED, **DEEPSEEK_KEYS, "max_position_embeddings": 1048576, "attention_bias": False,
                  "num_key_value_heads": 32, "first_k_dense_replace": 0, "kv_lora_rank": 256, "q_lora_rank": 1024,
                  "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True,
                  "num_experts_per_tok": 4},
        only={**NO_MLP_BIAS, "original_max_position_embeddings": (), "scoring_func": ("softmax",)},
        ignored=(*MOE, "head_dim", "qk_head_dim"),
        layers="full_attention",
    ),
    "AXK1ForCausalLM": Fields(
        "axk1",
        needed=_LATENT,
        defaults={**GATED, **DEEPSEEK_KEYS, "max_position_embeddings": 32768, "attention_bias": False,
                  "num_key_value_heads": 64, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 1536,
                  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8, "topk_group": 4,
                  "routed_scaling_factor": 2.5, "rope_interleave": True, "num_experts_per_tok": 8,
                  "mlp_layer_types": None, "num_nextn_predict_layers": None},
        only={**NO_MLP_BIAS, "scoring_func": ("sigmoid",), "moe_layer_freq": (1,)},
        # Its files may name a way to choose experts that has no bias, and have none.
        ignored=(*MOE, "head_dim", "qk_head_dim", "topk_method", "aux_loss_alpha", "seq_aux", "ep_size"),
        layers="full_attention",
    ),
    "AXK2ForCausalLM": Fields(
        "axk2",
        needed=_LATENT,
        defaults={**_INDEXED, "max_position_embeddings": 131072, "num_key_value_heads": 32, "q_lora_rank": 384,
                  "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
                  "n_group": None, "topk_group": None, "index_n_heads": 16, "first_k_dense_replace": 1,
                  "gated_norm_rank": 16},
        only=_INDEXED_ONLY,
        ignored=_INDEXED_IDLE,
        layers="indexed_attention",
    ),
    "HYV4ForCausalLM": Fields(
        "hy_v4", needed=_LATENT, layers="indexed_attention",
        defaults={**without(_INDEXED, "first_k_dense_replace", "rope_interleave", "num_nextn_predict_layers"),
                  "max_position_embeddings": 262144, "num_key_value_heads": None, "q_lora_rank": 1536,
                  "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.827,
                  "index_n_heads": 16, "indexer_types": None, "hc_mult": 4, "hc_magnitude": 2.0, "hc_eps": 1e-6},
        only={**_INDEXED_ONLY, "rope_interleave": (False,), "indexer_rope_interleave": (False,),
              "swiglu_limit": (10.0,), "first_k_dense_replace": (1,)}, ignored=(*_INDEXED_IDLE, "learnable_sink_init"),
    ),
    "LongcatFlashForCausalLM": Fields(
        "longcat_flash",
        needed=("vocab_size", "hidden_size", "num_layers", "num_hidden_layers", "num_attention_heads",
                "ffn_hidden_size", "intermediate_size", "expert_ffn_hidden_size", "moe_intermediate_size", "moe_topk",
                "num_experts_per_tok", "n_routed_experts", "num_local_experts"),
        defaults={**GATED, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": False,
                  "num_key_value_heads": None, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
                  "qk_rope_head_dim": 64, "head_dim": 64, "v_head_dim": 128, "zero_expert_num": 256,
                  "routed_scaling_factor": 6.0, "rope_theta": 10000000.0},
        only={**NO_MLP_BIAS, "zero_expert_type": ("identity",), "mla_scale_q_lora": (True,),
              "mla_scale_kv_lora": (True,), "attention_method": ("MLA",), "router_bias": (False,),
              "norm_topk_prob": (False,), "rope_interleave": (True,)},
        ignored=(*MOE, "qk_head_dim"),
        layers="full_attention",
    ),
    "SarvamMLAForCausalLM": Fields(
        "sarvam_mla",
        needed=(*_LATENT, "num_experts"),
        defaults={**GATED, **DEEPSEEK_KEYS, "max_position_embeddings": 4096, "attention_bias": None,
                  "use_qkv_bias": None, "num_key_value_heads": None, "first_k_dense_replace": 1, "kv_lora_rank": 512,
                  "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
                  "routed_scaling_factor": 2.5, "rope_interleave": True, "num_experts_per_tok": 8,
                  "n_shared_experts": None, "num_shared_experts": None},
        only={**NO_MLP_BIAS, **SIGMOID, "moe_layer_freq": (1,), "num_nextn_predict_layers": (0,),
              "num_mtp_layers": (0,)},
        ignored=(*MOE, "head_dim", "q_head_dim", "qk_head_dim"),
        layers="full_attention",
    ),
    "Glm4MoeLiteForCausalLM": Fields(
        "glm4_moe_lite",
        needed=_LATENT,
        defaults={**GATED, **DEEPSEEK_KEYS, "max_position_embeddings": 202752, "attention_bias": False,
                  "num_key_value_heads": 20, "kv_lora_rank": 512, "q_lora_rank": 768, "rms_norm_eps": 1e-5,
                  "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "rope_interleave": True,
                  "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "mlp_layer_types": None,
                  "num_nextn_predict_layers": None},
        only={**NO_MLP_BIAS, **SIGMOID, "moe_layer_freq": (1,)},
        # Transformers uses mlp_layer_types with a default of its own, which is the same as this.
        ignored=(*MOE, "head_dim", "qk_head_dim", "first_k_dense_replace"),
        layers="full_attention",
    ),
    "YoutuForCausalLM": Fields(
        "youtu",
        defaults={**_LATENT_DENSE, "max_position_embeddings": 131072, "num_key_value_heads": 16, "kv_lora_rank": 512,
                  "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
                  "rope_interleave": True},
        only=NO_MLP_BIAS,
        ignored=("head_dim", "qk_head_dim", "embedding_initializer_range"),
        layers="full_attention",
    ),
    "MiniCPM3ForCausalLM": Fields(
        "minicpm3",
        defaults={**_LATENT_DENSE, "max_position_embeddings": 32768, "num_key_value_heads": 40, "kv_lora_rank": 256,
                  "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": None,
                  "rms_norm_eps": 1e-5, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        only={**NO_MLP_BIAS, "rope_interleave": (False,)},
        ignored=("head_dim", "qk_head_dim"),
        layers="full_attention",
    ),
    "FalconForCausalLM": Fields(
        "falcon",
        needed=("vocab_size", "hidden_size", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head"),
        defaults={**dict.fromkeys(ROPE), "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-5,
                  "num_kv_heads": None, "n_head_kv": None, "alibi": False, "new_decoder_architecture": False,
                  "multi_query": True, "parallel_attn": True, "bias": False, "max_position_embeddings": 2048,
                  "ffn_hidden_size": None, "activation": "gelu", "tie_word_embeddings": True},
        only={"apply_residual_connection_post_layernorm": (False,)},
        ignored=("head_dim", "rotary"),
        layers="full_attention",
    ),
    "FalconH1ForCausalLM": Fields(
        "falcon_h1",
        defaults={**GATED, "num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024,
                  "max_position_embeddings": 8192, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1,
                  "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
                  "mamba_norm_before_gate": True, "mamba_rms_norm": False, "time_step_limit": None,
                  "projectors_bias": False, "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0,
                  "mlp_multipliers": None, "key_multiplier": 1.0, "attention_out_multiplier": 1.0,
                  "attention_in_multiplier": 1.0, "ssm_multipliers": None, "ssm_in_multiplier": 1.0,
                  "ssm_out_multiplier": 1.0, "mlp_bias": False},
        only={"attention_bias": (False,), "lm_head_bias": (False,), "mamba_proj_bias": (False,),
              "hidden_act": ("silu",), "mamba_use_mlp": (True,)},
        ignored=("mamba_chunk_size", "num_logits_to_keep", "layers_block_type", "layer_types",
                 "mlp_expansion_factor", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank"),
    ),
    "Gemma3nForCausalLM": Fields(
        "gemma3n_text",
        defaults={"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
                  "num_key_value_heads": 2, "head_dim": 256, "attention_bias": False, "sliding_window": 512,
                  "layer_types": None, "final_logit_softcapping": 30.0, "rope_parameters": None, "rope_theta": 1e6,
                  "rope_scaling": None, "rope_local_base_freq": 10000.0, "vocab_size_per_layer_input": 262144,
                  "hidden_size_per_layer_input": 256, "altup_active_idx": 0, "altup_correct_scale": True,
                  "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
                  "activation_sparsity_pattern": None, "max_position_embeddings": 32768},
        only={**NO_MLP_BIAS, "use_bidirectional_attention": (False,), "partial_rotary_factor": (),
              "hidden_activation": ("gelu_pytorch_tanh",)},
        # Scores of this family are not scaled.
        ignored=("hidden_act", "altup_coef_clip", "altup_lr_multiplier", "default_theta", "query_pre_attn_scalar"),
    ),
    "Gemma4ForCausalLM": Fields(
        "gemma4_text",
        defaults={"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
                  "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "attention_bias": False,
                  "num_global_key_value_heads": None, "per_layer_config": None, "sliding_window": 512,
                  "layer_types": None, "final_logit_softcapping": None, "rope_parameters": None,
                  "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
                  "attention_k_eq_v": False, "num_kv_shared_layers": 0, "enable_moe_block": False,
                  "use_double_wide_mlp": False, "num_experts": None, "top_k_experts": None,
                  "moe_intermediate_size": None, "max_position_embeddings": 131072},
        only={**NO_MLP_BIAS, "use_bidirectional_attention": (False, "vision"), "rope_theta": (), "rope_scaling": (),
              "partial_rotary_factor": (), "original_max_position_embeddings": (),
              "hidden_activation": ("gelu_pytorch_tanh",)},
        ignored=("hidden_act",),
    ),
    "GPT2LMHeadModel": Fields(
        "gpt2",
        needed=GPT_NEEDED,
        defaults={"n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
                  "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True},
        ignored=("n_ctx", "reorder_and_upcast_attn"), layers="full_attention",
    ),
    "OpenAIGPTLMHeadModel": Fields(
        "openai-gpt", needed=GPT_NEEDED, ignored=("n_ctx", "n_special", "predict_special_tokens"),
        defaults={"afn": "gelu", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}, layers="full_attention",
    ),
    "OPTForCausalLM": Fields(
        "opt", layers="full_attention", only={"layer_norm_elementwise_affine": (True,)},
        needed=("vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads",
                "max_position_embeddings"),
        defaults={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "word_embed_proj_dim": None,
                  "activation_function": "relu", "enable_bias": True, "tie_word_embeddings": True},
    ),
}  # fmt: skip
"""Families with a file of their own."""

FIELDS: dict[str, Fields] = {**_FILES, **{name: family.fields for name, family in TABLE.items()}}
_READ = frozenset(name for row in FIELDS.values() for name in (*row.needed, *row.defaults, *row.only))
"""Keys that change a model in at least one family."""

_ONLY: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
}
"""Keys of every architecture with the values that are supported."""

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
"""Keys that never change what a model computes: training, storage, generation settings of older files."""

_CHANGES = re.compile(
    r"clip|cap(ping)?$|multiplier|(^|_)scal(e|es|ing)(_|$)|window|sink|rope|rotary|mrope|alibi|yarn|ntk|"
    r"q[kv]{1,2}_?(layer)?_?norm|(layer|pre|post|sandwich|embed\w*)_?norm$|residual|(^|_)bias(es)?$|parallel_attn|"
    r"cross_attention|mamba|ssm|linear_attn|attention_chunk|bidirectional|prefix_lm|logit_"
)
"""Names in other families of settings that change every answer; accepted only if they are switched off."""

_LEFTOVERS = (
    "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_eps", "mixer_rms_eps", "max_seq_len",
    "n_positions", "seq_length", "position_embedding_type", "num_nextn_predict_layers", "num_mtp_layers",
    "router_jitter_noise", "validate_runner_input", "time_step_min", "time_step_rank", "block_use_swiglu",
    "tie_embedding", "layer_types",
)  # fmt: skip
"""Keys that some families read and that mean nothing in the files of others."""
_GROUPS = (
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_key_value_heads", "num_kv_heads",
     "n_head_kv"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("hidden_size", "n_embd", "n_embed", "d_model", "word_embed_proj_dim"),
    ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
)  # fmt: skip
"""Groups of names for one thing: the same value under another name adds nothing."""


def complete(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The config as the family's builder may see it: defaults for absent keys, and for a null where only some values
    are built (Transformers does not read such a key there). Keys that the family does not know are left out, because
    parts that several families share would read them."""
    row = FIELDS.get(architecture)
    if row is None:
        return dict(config)
    said = {
        name: value
        for name, value in config.items()
        if (value is not None if name in row.only else _is_known(name, row) or name in POSITION_NAMES)
    }
    return {**row.defaults, **said}


def _is_known(name: str, row: Fields) -> bool:
    """Is this key on one of the family's lists, or on those of all families?"""
    return row.knows(name) or name in row.only or name in _ONLY or _HARMLESS.fullmatch(name) is not None


def check_fields(config: Mapping[str, Any], architecture: str) -> list[str]:
    """Refuse what is not supported; returns unknown keys, which may or may not matter."""
    row, unknown = FIELDS[architecture], []
    kind = config.get("model_type")
    if kind != row.model_type and any(kind == other.model_type for other in FIELDS.values()):
        raise ModelError(f"config.json: architecture '{architecture}' and model_type {kind!r} contradict each other.")
    for name, value in config.items():
        if name in row.only or name in _ONLY:
            _check_only(name, value, row.only.get(name, _ONLY.get(name, ())))
        elif name == "layer_types" and row.layers is not None:
            _check_layers(value, row.layers, config)
        elif value is not None and not _is_known(name, row):
            read = name in _READ and name not in _LEFTOVERS and not _again(name, value, complete(config, architecture))
            if (read or _CHANGES.search(name)) and not _off(name, value, config):
                raise ModelError(
                    f"config.json: '{name}' = {_short(value)} changes what a model computes, and {architecture} is not "
                    f"built with it here. If it is a leftover, load with --hf-overrides '{{\"{name}\": null}}'."
                )
            unknown.append(name)
    return unknown


def _check_only(name: str, value: Any, known: tuple[Any, ...]) -> None:
    # Transformers takes a null of this key for false, and of all others for the family's default.
    if (value is not None or name == "is_causal") and not any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in known
    ):
        only = " or ".join("null" if one is None else str(one).lower() for one in known or (None,))
        raise ModelError(f"config.json: '{name}' = {_short(value)} is not supported (only {only}).")


_EARLIER_KINDS = {"indexed_attention": "deepseek_sparse_attention"}
"""What earlier releases of Transformers wrote for a kind of layer."""


def _check_layers(kinds: Any, only: str, config: Mapping[str, Any]) -> None:
    """A family whose layers are all of one kind; without a window both names mean the same."""
    names = (only, _EARLIER_KINDS.get(only, only))
    allowed = names if config.get("sliding_window") else (*names, "full_attention")
    usable = isinstance(kinds, list) and len(kinds) == config.get("num_hidden_layers", config.get("n_layer"))
    if kinds is not None and not (usable and all(kind in allowed for kind in kinds)):
        raise ModelError(f"config.json: 'layer_types' = {_short(kinds)} is not supported (only '{only}' layers).")


def _off(name: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Is this a switch that is off, or a number without effect? (A head count of one is not without effect.)"""
    longest = config.get("max_position_embeddings")
    if name == "sliding_window" and isinstance(value, int) and isinstance(longest, int):
        return value >= longest or not value
    idle = not isinstance(value, bool) and value in ((0,) if name in _GROUPS[0] else (0, 1))
    return value is False or value in ("", [], {}) or idle


def _again(name: str, value: Any, whole: Mapping[str, Any]) -> bool:
    """Does another key with the same meaning already have this value?"""
    hidden, heads = whole.get("hidden_size"), whole.get("num_attention_heads")
    if name == "head_dim":
        return isinstance(value, int) and isinstance(heads, int) and value * heads == hidden
    if name in _GROUPS[3] and isinstance(hidden, int) and value == 4 * hidden:
        return True
    return any(name in group and any(whole.get(one) == value for one in group if one != name) for group in _GROUPS)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
