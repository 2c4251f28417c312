"""Whole models with experts and latent attention on Triton kernels, in the interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.models.parity import load, make, ours
from tests.cpu.triton.triton_models_helpers import CASES

from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels


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
    assert not any(count["fallbacks"] for count in counters.values())
    assert ("choose_keys" in counters) == (name in ("deepseek-v3.2", "hy-v4"))
