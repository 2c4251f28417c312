"""What test_families.py and other tests share."""

from __future__ import annotations

import torch
from tests.cpu.models.config_types_helpers import Absent, hf
from tests.cpu.models.family_cases import Case

SIZES = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BASE = {**SIZES, **HEADS, "max_position_embeddings": 128}
ONE = {**SIZES, "num_attention_heads": 4, "max_position_embeddings": 128}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.5, 6.0], "rope_theta": 10000.0}
PHI = {**BASE, "num_key_value_heads": 4, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0,
        "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
MLA = {**ONE, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10}
MOE = {"n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 12, "num_experts_per_tok": 3,
       "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}  # fmt: skip
HYBRID = {**BASE, "num_hidden_layers": 4, "head_dim": 16, "rms_norm_eps": 1e-3,  # random states are small
          "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}


def cases() -> dict[str, Case]:
    gemma = {**BASE, "head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 20}
    falcon = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    opt = {"vocab_size": 67, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
           "max_position_embeddings": 128}  # fmt: skip
    tight = {**BASE, "num_hidden_layers": 3}
    return {
        "qwen2": Case(hf.Qwen2Config(**BASE)),
        "qwen2-window": Case(hf.Qwen2Config(**tight, use_sliding_window=True, sliding_window=20, max_window_layers=1)),
        "qwen3-moe": Case(hf.Qwen3MoeConfig(**BASE, head_dim=16, num_experts=6, num_experts_per_tok=3,
                                            moe_intermediate_size=20, mlp_only_layers=[0], norm_topk_prob=True)),
        "qwen3-moe-raw-gates": Case(hf.Qwen3MoeConfig(**BASE, head_dim=8, num_experts=4, num_experts_per_tok=2,
                                                      moe_intermediate_size=24, decoder_sparse_step=2)),
        "mixtral": Case(hf.MixtralConfig(**BASE, num_local_experts=4, sliding_window=24)),
        "gemma2": Case(hf.Gemma2Config(**gemma, attn_logit_softcapping=3.0, final_logit_softcapping=2.0)),
        "gemma3": Case(hf.Gemma3TextConfig(**{**gemma, "num_hidden_layers": 3}, sliding_window_pattern=3,
            rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})),
        "phi3": Case(hf.Phi3Config(**PHI, sliding_window=30)),
        "phi3-short": Case(hf.Phi3Config(**{**PHI, "hidden_size": 24}, original_max_position_embeddings=96,
                                         rope_parameters=dict(LONG)), longest=96),
        "phi3-long": Case(hf.Phi3Config(**{**PHI, "hidden_size": 24}, original_max_position_embeddings=64,
                                        rope_parameters=dict(LONG))),
        "phi3-partial": Case(hf.Phi3Config(**PHI, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                                    "partial_rotary_factor": 0.75})),
        "gpt2": Case(hf.GPT2Config(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
        "gpt2-by-depth": Case(hf.GPT2Config(vocab_size=67, n_embd=36, n_layer=3, n_head=3, n_positions=128, n_inner=50,
                                            scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False)),
        "opt": Case(hf.OPTConfig(**opt)),
        "opt-350m": Case(hf.OPTConfig(**opt, word_embed_proj_dim=16, do_layer_norm_before=False)),
        "bloom": Case(hf.BloomConfig(vocab_size=67, hidden_size=32, n_layer=2, n_head=4)),
        "bloom-6-heads": Case(hf.BloomConfig(vocab_size=67, hidden_size=48, n_layer=2, n_head=6)),
        "falcon-7b": Case(hf.FalconConfig(**falcon)),
        "falcon-40b": Case(hf.FalconConfig(**falcon, new_decoder_architecture=True, num_kv_heads=2)),
        "falcon-11b": Case(hf.FalconConfig(**falcon, new_decoder_architecture=True, num_kv_heads=2,
                                           num_ln_in_parallel_attn=1, tie_word_embeddings=False)),
        "falcon-rw": Case(hf.FalconConfig(**falcon, multi_query=False, parallel_attn=False, alibi=True, bias=True),
                          attention="sdpa"),  # the eager one of Transformers 5 adds the biases twice,
        "gpt-neox": Case(hf.GPTNeoXConfig(**ONE)),
        "gpt-neox-serial": Case(hf.GPTNeoXConfig(**ONE, use_parallel_residual=False, attention_bias=False)),
        "deepseek-v2": Case(hf.DeepseekV2Config(**MLA, **MOE, q_lora_rank=20, n_group=4, topk_group=2,
                                                topk_method="group_limited_greedy", rope_parameters=dict(YARN))),
        "deepseek-v2-lite": Case(hf.DeepseekV2Config(**MLA, **MOE, q_lora_rank=None)),
        "qwen3-next": Case(hf.Qwen3NextConfig(**HYBRID, **DELTA, num_experts=6, num_experts_per_tok=2,
                                              moe_intermediate_size=20, shared_expert_intermediate_size=24,
                                              mlp_only_layers=[1])),
        "qwen3-next-all-dense": Case(hf.Qwen3NextConfig(**HYBRID, **{**DELTA, "linear_num_value_heads": 2},
                                                        num_experts=0, attention_bias=True)),
        "qwen3-5": Case(hf.Qwen3_5TextConfig(**HYBRID, **DELTA)),
        "qwen3-5-moe": Case(hf.Qwen3_5MoeTextConfig(**HYBRID, **DELTA, num_experts=6, num_experts_per_tok=2,
                                                    moe_intermediate_size=20, shared_expert_intermediate_size=24)),
        "gpt-oss": Case(hf.GptOssConfig(**BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                                        sliding_window=20)),
    }  # fmt: skip


CASES = {name: case for name, case in cases().items() if not isinstance(case.config, Absent)}


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 67, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
