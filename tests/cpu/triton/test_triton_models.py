"""Whole models with experts and latent attention on Triton kernels, in the interpreter, against the reference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
hf = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from parity import load, make, ours  # noqa: E402

from tokenmill.kernels.reference import ReferenceKernels  # noqa: E402
from tokenmill.kernels.triton.kernels import TritonKernels  # noqa: E402

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
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_like_the_reference(name, tmp_path):
    _, config, tensors = make(CASES[name](), tmp_path)
    prompts = {"a": torch.randint(0, 40, (13,)).tolist(), "b": torch.randint(0, 40, (6,)).tolist()}
    steps = [[("a", 10)], [("a", 1)], [("b", 5), ("a", 1)], [("a", 1), ("b", 1)]]
    found = {}
    for kernels in (TritonKernels(), ReferenceKernels()):
        model = load(config, tensors, kernels=kernels)
        found[kernels] = ours(model, prompts, steps, kernels)
    mine, theirs = found.values()
    for key in prompts:
        assert theirs[key].std() > 0.05
        assert torch.allclose(mine[key], theirs[key], atol=2e-4), (mine[key] - theirs[key]).abs().max()
    counters = next(iter(found)).counters()
    assert counters["experts"]["calls"] > 0 and counters["experts"]["fallbacks"] == 0
    assert counters["attention"]["fallbacks"] == 0 and counters["prepare_qkv"]["fallbacks"] == 0
