"""What test_triton_models.py and other tests share."""

from __future__ import annotations

import transformers as hf

BASE = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
CASES = {
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(
        **BASE, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "gpt-oss": lambda: hf.GptOssConfig(
        **BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    ),
    "deepseek-v2": lambda: hf.DeepseekV2Config(
        **{**BASE, "num_key_value_heads": 4, "num_hidden_layers": 2}, n_routed_experts=8, n_shared_experts=2,
        moe_intermediate_size=12,
        num_experts_per_tok=3, first_k_dense_replace=1, n_group=4, topk_group=2, topk_method="group_limited_greedy",
        routed_scaling_factor=1.5, kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    "deepseek-v3.2": lambda: hf.DeepseekV32Config(  # keys that an index chooses
        **{**BASE, "num_key_value_heads": 4, "num_hidden_layers": 2}, n_routed_experts=8, n_shared_experts=1,
        moe_intermediate_size=12, num_experts_per_tok=3, first_k_dense_replace=1, n_group=4, topk_group=2,
        routed_scaling_factor=1.5, kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=8, index_n_heads=6, index_head_dim=16, index_topk=8,
    ),
    "hy-v4": lambda: hf.HYV4Config(
        **{**BASE, "num_key_value_heads": 4, "num_hidden_layers": 3}, n_routed_experts=8, n_shared_experts=1,
        moe_intermediate_size=12, num_experts_per_tok=3, routed_scaling_factor=1.5, kv_lora_rank=16, q_lora_rank=12,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, index_n_heads=6, index_head_dim=16, index_topk=8,
        hc_mult=3, indexer_types=["full", "shared", "full"], pad_token_id=None, bos_token_id=None, eos_token_id=None,
    ),
    "nemotron-h": lambda: hf.NemotronHConfig(  # experts of two matrices
        **{k: v for k, v in BASE.items() if k != "num_hidden_layers"}, head_dim=8,
        layer_types=["full_attention", "moe"], n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=16, n_group=1, topk_group=1,
    ),
}  # fmt: skip
