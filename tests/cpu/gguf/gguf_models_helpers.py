"""What test_gguf_models.py and other tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.models.parity import ours
from torch import Tensor
from transformers import (
    ArceeConfig,
    Cohere2Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from tokenmill.checkpoint.gguf_config import read_config
from tokenmill.checkpoint.gguf_model import GgufModel
from tokenmill.compute.forward import StoredMatrix
from tokenmill.core.errors import ModelError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.models.registry import build_model

SIZES = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 64 for i in range(32)],
        "long_factor": [1.0 + i / 4 for i in range(32)]}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "llama3-tied": LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=64),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=20),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
    "qwen3moe": Qwen3MoeConfig(
        **SIZES, head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True
    ),
    "gemma2": Gemma2Config(**SIZES, head_dim=64, query_pre_attn_scalar=64, sliding_window=20),
    "gemma3": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7}, head_dim=64, query_pre_attn_scalar=64, sliding_window=20
    ),
    "phi3": Phi3Config(**SIZES, rope_parameters=LONG, original_max_position_embeddings=64, sliding_window=None,
                       pad_token_id=0),
    "gpt-oss": GptOssConfig(**SIZES, **EXPERTS, head_dim=64, sliding_window=20,
                            rope_parameters={**YARN, "truncate": False}),
    "arcee": ArceeConfig(**SIZES),
    "cohere2": Cohere2Config(**{**SIZES, "num_hidden_layers": 4}, sliding_window=20, logit_scale=0.5),
    "ernie4_5": Ernie4_5Config(**SIZES, head_dim=64, use_bias=False),
    "exaone4": Exaone4Config(**{**SIZES, "num_hidden_layers": 4}, sliding_window=20, sliding_window_pattern=4),
    "glm4": Glm4Config(**SIZES, head_dim=64, attention_bias=True, pad_token_id=0, eos_token_id=[1]),
    "granite": GraniteConfig(**SIZES, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2,
                             logits_scaling=2.0),
    "hunyuan": HunYuanDenseV1Config(**SIZES, head_dim=64),
    "olmo2": Olmo2Config(**SIZES),
    "seed_oss": SeedOssConfig(**SIZES, head_dim=64),
    "smollm3": SmolLM3Config(**{**SIZES, "num_hidden_layers": 4}, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "starcoder2": Starcoder2Config(**SIZES, sliding_window=20),
}  # fmt: skip


class Unrounded(ReferenceKernels):
    """The reference, but with activations as they are: what is left is the weights' own numbers."""

    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        if isinstance(weight, StoredMatrix):
            return torch.nn.functional.linear(x, weight.dense(), weight.bias)
        return super().multiply(x, weight, bias)


def build(path: Path, kernels: Any) -> Any:
    source = GgufModel(path)
    checkpoint = source.open_checkpoint()
    return build_model(source.config, checkpoint, dtype=torch.float32, device="cpu", kernels=kernels)


def prompt() -> list[int]:
    return torch.randint(0, 96, (80,), generator=torch.Generator().manual_seed(5)).tolist()


def logits(path: Path, *steps: int) -> Tensor:
    """Of `prompt`, computed in these steps."""
    kernels = Unrounded()
    return ours(build(path, kernels), {"a": prompt()}, [[("a", count)] for count in steps], kernels)["a"]


def check_same(found: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.03
    assert (found - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


def check_refused(path: Path, change: dict[str, Any], says: str) -> None:
    """The file's metadata can be read; with this change (None: without a key) a message says why they cannot."""
    known = GgufModel(path)
    changed = {key: value for key, value in {**known.metadata, **change}.items() if value is not None}
    with pytest.raises(ModelError, match=says):
        read_config(changed, known.tensors, known._numbers, "m.gguf")


MIXED = {"*": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K"}
