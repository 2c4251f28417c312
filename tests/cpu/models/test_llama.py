"""Llama and Qwen3 against Transformers in float32, and the same bytes however a sequence is computed."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.models.llama_helpers import CONFIGS, LLAMA3
from tests.cpu.models.parity import load, make, ours, theirs


def prompt(length: int, vocab: int, seed: int = 1) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_and_same_bytes(name, backend, tmp_path):
    reference, config, tensors = make(CONFIGS[name], tmp_path)
    model = load(config, tensors, kernels=backend)
    prompts = {"a": prompt(90, config["vocab_size"]), "b": prompt(5, config["vocab_size"], 2),
               "c": prompt(37, config["vocab_size"], 3)}  # fmt: skip
    whole = {k: ours(model, {k: v}, [[(k, len(v))]], backend)[k] for k, v in prompts.items()}
    for key, tokens in prompts.items():
        assert (whole[key] - theirs(reference, tokens)).abs().max() <= 1e-4, key

    chunks = [[("a", 7)]] * 12 + [[("a", 1)]] * 6
    assert torch.equal(ours(model, prompts, chunks, backend)["a"], whole["a"])

    mixed = ours(
        model, prompts, [[("a", 60), ("b", 5)], [("c", 30), ("a", 1)], [("a", 1), ("c", 7)], [("a", 28)]], backend
    )
    for key, logits in mixed.items():
        assert torch.equal(logits, whole[key]), key


def test_same_bytes_in_bfloat16(backend, tmp_path):
    _, config, tensors = make(CONFIGS["llama"], tmp_path)
    model = load(config, tensors, dtype=torch.bfloat16, kernels=backend)
    prompts = {"a": prompt(70, 131), "b": prompt(9, 131, 2)}
    whole = ours(model, prompts, [[("a", 70)]], backend, dtype=torch.bfloat16)["a"]
    steps = [[("a", 33), ("b", 4)], [("b", 5), ("a", 20)]] + [[("a", 1)]] * 17
    assert torch.equal(ours(model, prompts, steps, backend, dtype=torch.bfloat16)["a"], whole)


def test_old_and_new_spellings_of_a_config_agree(tmp_path):
    _, config, tensors = make(CONFIGS["llama3-tied"], tmp_path)
    assert "rope_parameters" in config and "dtype" in config
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype")}
    old |= {"torch_dtype": "float32", "rope_theta": LLAMA3["rope_theta"]}
    old["rope_scaling"] = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    tokens = {"a": prompt(50, 131)}
    new_logits, old_logits = (ours(load(c, tensors), tokens, [[("a", 50)]])["a"] for c in (config, old))
    assert torch.equal(new_logits, old_logits)
