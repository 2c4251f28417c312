"""Whole GGUF models against Transformers with the weights that the file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import make, ours, theirs
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
from writing import Writer

from tokenmill.checkpoint.gguf_model import GgufModel
from tokenmill.core.forward import StoredMatrix
from tokenmill.kernels import make_kernels
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


def written(name: str, folder: Path, kind: str | dict[str, str]) -> tuple[Any, Path]:
    """(the Transformers model with the weights that the file says, the file)."""
    reference, config, tensors = make(CONFIGS[name], folder)
    path = folder / "m.gguf"
    said = Writer(path, config, {key: value.float() for key, value in tensors.items()}, kind).write()
    replace_weights(reference, said, folder)
    return reference, path


def replace_weights(reference: Any, said: dict[str, Tensor], folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    save_file({**load_file(file), **{k: v.contiguous() for k, v in said.items()}}, file, metadata={"format": "pt"})
    loaded = type(reference).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    reference.load_state_dict(loaded.state_dict())


def build(path: Path, kernels: Any) -> Any:
    source = GgufModel(path)
    checkpoint = source.open_checkpoint()
    return build_model(source.config, checkpoint, dtype=torch.float32, device="cpu", kernels=kernels)


def logits(model: Any, tokens: list[int], kernels: Any) -> Tensor:
    return ours(model, {"a": tokens}, [[("a", len(tokens))]], kernels)["a"]


def prompt() -> list[int]:
    return torch.randint(0, 96, (80,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name: str, kind: str, tmp_path: Path) -> None:
    reference, path = written(name, tmp_path, kind)
    kernels = Unrounded()
    wanted = theirs(reference, prompt())
    error = (logits(build(path, kernels), prompt(), kernels) - wanted).abs().max()
    assert error <= 1e-4 * max(1.0, float(wanted.abs().max())), "libraries of two machines add up in different orders"


MIXED = {"*": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K"}
KINDS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]


@pytest.mark.parametrize("kind", [*KINDS, "MXFP4", "mixed"])
def test_every_type_keeps_its_own_numbers(kind: str, tmp_path: Path) -> None:
    reference, path = written("llama", tmp_path, MIXED if kind == "mixed" else kind)
    kernels = Unrounded()
    error = (logits(build(path, kernels), prompt(), kernels) - theirs(reference, prompt())).abs().max()
    assert error <= 1e-4


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_native_exact_forms(kind: str, tmp_path: Path) -> None:
    """Same integers, same scales: what differs from the reference is the order of additions."""
    pytest.importorskip("tokenmill._native", reason="the native kernels were not built")
    _, path = written("llama", tmp_path, kind)
    plain, native = ReferenceKernels(), make_kernels("cpu")
    model = build(path, native)
    want = logits(build(path, plain), prompt(), plain)
    got = logits(model, prompt(), native)
    assert model.spec.extras["changed"] == []
    assert (got - want).norm() / want.norm() < 1e-2  # a rounding of activations may fall the other way
    assert not native.counters()["linear"]["fallbacks"] and "int8_product" not in native.counters()
