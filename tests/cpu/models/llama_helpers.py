"""What test_llama.py and other tests share."""

from __future__ import annotations

from transformers import LlamaConfig, MistralConfig, Qwen3Config

SIZES = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES["max_position_embeddings"] = 256
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ODD = {**SIZES, "vocab_size": 77, "hidden_size": 42, "intermediate_size": 51, "num_attention_heads": 3, "head_dim": 14}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
          "original_max_position_embeddings": 64}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES, **HEADS),
    "llama-odd": LlamaConfig(**ODD, attention_bias=True, mlp_bias=True),
    "llama3-tied": LlamaConfig(**SIZES, **HEADS, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral-window": MistralConfig(**SIZES, **HEADS, sliding_window=20),
    "qwen3": Qwen3Config(**SIZES, **HEADS, head_dim=32),
    "qwen3-windows": Qwen3Config(
        **SIZES, **HEADS, head_dim=16, use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
}
