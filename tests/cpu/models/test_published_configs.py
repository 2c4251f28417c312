"""The keys that published configs of every family have beside their sizes: none is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cpu.models.published_table import PUBLISHED as TABLE_PUBLISHED

from tokenmill.models.config_fields import FIELDS, check_fields

PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "LlamaForCausalLM": [
        {
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": [1, 2],
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 1,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.42",
            "use_cache": True,
            "vocab_size": 1,
            "unsloth_fixed": True,
            "is_llama_config": True,
            "rope_interleaved": False,
        }
    ],
    "Qwen2ForCausalLM": [
        {
            "model_type": "qwen2",
            "use_mrope": False,
            "use_sliding_window": False,
            "sliding_window": 131072,
            "max_window_layers": 70,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        }
    ],
    "Qwen3MoeForCausalLM": [
        {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "rope_scaling": None,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "use_sliding_window": False,
        }
    ],
    "Phi3ForCausalLM": [
        {
            "model_type": "phi3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "embd_pdrop": 0.0,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "resid_pdrop": 0.0,
            "sliding_window": 262144,
            "auto_map": {"a": "b"},
        }
    ],
    "GptOssForCausalLM": [
        {
            "model_type": "gpt_oss",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "experts_per_token": 4,
            "num_experts_per_tok": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention"],
            "max_position_embeddings": 131072,
            "num_local_experts": 32,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "quantization_config": {},
        }
    ],
    "Gemma2ForCausalLM": [
        {
            "model_type": "gemma2",
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 224,
            "sliding_window": 4096,
            "sliding_window_size": 4096,
        }
    ],
    "Gemma3ForCausalLM": [
        {
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "_sliding_window_pattern": 6,
            "use_bidirectional_attention": False,
        }
    ],
    "DeepseekV2ForCausalLM": [
        {
            "model_type": "deepseek_v2",
            "aux_loss_alpha": 0.001,
            "ep_size": 1,
            "first_k_dense_replace": 1,
            "hidden_act": "silu",
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 16,
            "pretraining_tp": 1,
            "scoring_func": "softmax",
            "seq_aux": True,
            "topk_group": 1,
            "topk_method": "greedy",
            "auto_map": {},
        }
    ],
    "FalconForCausalLM": [
        {
            "model_type": "falcon",
            "alibi": False,
            "apply_residual_connection_post_layernorm": False,
            "attention_dropout": 0.0,
            "bias": False,
            "hidden_dropout": 0.0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "num_kv_heads": 71,
        }
    ],
    "GPT2LMHeadModel": [
        {
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        }
    ],
    "GPTNeoXForCausalLM": [
        {
            "model_type": "gpt_neox",
            "classifier_dropout": 0.1,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
            "rope_scaling": None,
        }
    ],
    "OPTForCausalLM": [
        {
            "model_type": "opt",
            "activation_dropout": 0.0,
            "activation_function": "relu",
            "attention_dropout": 0.0,
            "do_layer_norm_before": True,
            "dropout": 0.1,
            "ffn_dim": 1,
            "init_std": 0.02,
            "layerdrop": 0.0,
            "prefix": "</s>",
            "word_embed_proj_dim": 768,
            "_remove_final_layer_norm": False,
        }
    ],
    "BloomForCausalLM": [
        {
            "model_type": "bloom",
            "apply_residual_connection_post_layernorm": False,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "hidden_dropout": 0.0,
            "layer_norm_epsilon": 1e-5,
            "masked_softmax_fusion": True,
            "n_embed": 4096,
            "n_inner": None,
            "n_layer": 30,
            "num_attention_heads": 32,
            "offset_alibi": 100,
            "pretraining_tp": 4,
            "seq_length": 2048,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "unk_token_id": 0,
            "use_cache": True,
        }
    ],
    "MixtralForCausalLM": [
        {
            "model_type": "mixtral",
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "rope_theta": 1e6,
            "attention_dropout": 0.0,
        }
    ],
    "Qwen3NextForCausalLM": [
        {
            "model_type": "qwen3_next",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "decoder_sparse_step": 1,
            "full_attention_interval": 4,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "output_router_logits": False,
            "partial_rotary_factor": 0.25,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
        }
    ],
    "MistralForCausalLM": [{"model_type": "mistral", "sliding_window": None, "head_dim": 128, "rope_theta": 1e6}],
}

LEFT = {"is_llama_config", "rope_interleaved"}


@pytest.mark.parametrize("architecture", FIELDS)
def test_published_keys_pass(architecture):
    more = TABLE_PUBLISHED.get(architecture)
    for config in PUBLISHED.get(architecture, [] if more is None else [more]):
        assert set(check_fields(config, architecture)) <= LEFT


def test_every_family_is_here():
    assert set(FIELDS) == set(PUBLISHED) | set(TABLE_PUBLISHED)
