"""New numbers for mixtures whose shared expert is one of the stacked ones, in the interpreter."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from tests.cpu.models.parity import DictCheckpoint, load, make, ours

from tokenmill.core.config import EngineConfig, make_config
from tokenmill.engine.load.inplace import LayerMaker, refill, weights_of
from tokenmill.kernels.triton.kernels import TritonKernels

BASE = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
CASES = {
    "with a gate": lambda: hf.Qwen2MoeConfig(
        **BASE, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
    "without": lambda: hf.Glm4MoeConfig(
        **BASE, head_dim=16, n_routed_experts=6, n_shared_experts=1, num_experts_per_tok=3, moe_intermediate_size=24,
        first_k_dense_replace=0, n_group=1, topk_group=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_was_filled_anew_is_that_of_the_new_numbers(name, tmp_path):
    """Every tensor of the joined experts and of the router with the gate behind it follows, where it stands."""
    _, config, old = make(CASES[name](), tmp_path)
    made = torch.Generator().manual_seed(3)
    new = {key: t + 0.1 * torch.randn(t.shape, generator=made) for key, t in old.items()}
    kernels = TritonKernels()
    model, fresh = (load(config, tensors, kernels=kernels) for tensors in (old, new))
    stacks = [layer.mlp.fused for layer in model.layers]
    assert all(stack is not None and stack.takes for stack in stacks)
    prompts, steps = {"a": [3, 1, 4, 1, 5, 9, 2]}, [[("a", 6)], [("a", 1)]]
    before, wanted = (ours(each, prompts, steps, kernels)["a"] for each in (model, fresh))
    assert not torch.allclose(before, wanted, atol=1e-2)
    places = [t.data_ptr() for t in weights_of(model)]
    for tensor in weights_of(model):
        tensor.zero_()  # as after a sleep that forgets
    with torch.inference_mode():
        refill(model, DictCheckpoint(new), LayerMaker(config, EngineConfig(), torch.float32, "cpu", kernels))
    assert torch.equal(ours(model, prompts, steps, kernels)["a"], wanted)
    assert [t.data_ptr() for t in weights_of(model)] == places


def test_copies_in_16_bits_follow(tmp_path):
    """They lie beside packed weights, and are weights like these: filled anew with the others, where they stand."""
    config = hf.LlamaConfig(**BASE)
    _, config, old = make(config, tmp_path)
    new = {key: t * 1.25 for key, t in old.items()}
    kernels = TritonKernels()
    how = {"kernels": kernels, "quantization": "int4-g32", "dtype": torch.float16}
    model = load(config, old, **how)
    packed = len(weights_of(model))
    assert kernels.keep_widened(torch.float16, 1 << 30) > 0 and len(weights_of(model)) > packed
    before = {each: each.widened.clone() for each in kernels.packed}
    options = make_config(quantization="int4-g32")
    with torch.inference_mode():
        refill(model, DictCheckpoint(new), LayerMaker(config, options, torch.float16, "cpu", kernels))
    for each, was in before.items():
        assert torch.equal(each.widened, each.rows(torch.arange(each.shape[0]), torch.float16))
        assert not torch.equal(each.widened, was)
