"""Families of the table on Triton kernels, in the interpreter, against the reference.

TOKENMILL_FAMILIES=1 runs the first twist of every family; without it two run that do much by hand.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("transformers")


from tests.cpu.models.family_cases import ALL
from tests.cpu.models.parity import load, ours

from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels

FULL = os.environ.get("TOKENMILL_FAMILIES") == "1"
NAMES = [name for name in ALL if name.endswith("-0")] if FULL else ["stablelm-0", "qwen2_moe-0"]
STEPS = [[("a", 10)], [("a", 1)], [("b", 5), ("a", 1)], [("a", 1), ("b", 1)]]


@pytest.mark.parametrize("name", NAMES)
def test_like_the_reference(name, tmp_path):
    case = ALL[name]
    _, config, tensors = case.make(tmp_path)
    prompts = {"a": torch.randint(0, 40, (13,)).tolist(), "b": torch.randint(0, 40, (6,)).tolist()}
    found = []
    for kernels in (TritonKernels(), ReferenceKernels()):
        model = load(config, tensors, kernels=kernels, max_positions=case.longest)
        found.append(ours(model, prompts, STEPS, kernels))
    for key in prompts:
        assert torch.allclose(found[0][key], found[1][key], atol=2e-4), key
