"""A whole model on the Triton kernels, in the interpreter, in each of their moods, against Transformers."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from tests.cpu.models.parity import load, make, ours, theirs

from tokenmill.kernels.triton.kernels import TritonKernels

CONFIG = hf.LlamaConfig(vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip
STEPS = [[("a", 20), ("b", 3)], [("a", 1), ("b", 1)], [("a", 1), ("b", 8)]]
MOODS = {"plain": {}, "steady": {"steady": True}, "bare": {"without": ("fusion", "cascade")}}


@pytest.mark.parametrize("mood", MOODS)
def test_logits(mood, tmp_path):
    reference, config, tensors = make(CONFIG, tmp_path)
    prompts = {"a": torch.randint(0, 67, (22,)).tolist(), "b": torch.randint(0, 67, (12,)).tolist()}
    kernels = TritonKernels(**MOODS[mood])
    for key, logits in ours(load(config, tensors, kernels=kernels), prompts, STEPS, kernels).items():
        assert (logits - theirs(reference, prompts[key])).abs().max() < 1e-4
    used = kernels.counters()
    assert not any(count["fallbacks"] for count in used.values())
    assert ("attend_qkv" in used) == (mood == "plain") and ("activate" in used) == (mood == "bare")
