"""Backends that leave the parts of a product unadded: every family computes the same, whatever reads the sum."""

from __future__ import annotations

import pytest
import torch
from families_helpers import CASES, prompt
from parity import load, make, ours
from torch import Tensor

from tokenmill.kernels.reference import ReferenceKernels

PARALLEL = ("falcon-7b", "falcon-40b", "falcon-11b", "gpt-neox")
"""Families that add up attention and network by themselves."""


class Opened(ReferenceKernels):
    """Every product that may be left in parts is: three of K, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0

    def open_product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.opened += 1
        cuts = zip(x.float().tensor_split(3, 1), weight.float().tensor_split(3, 1), strict=True)
        parts = torch.stack([a @ b.t() for a, b in cuts])
        if bias is not None:
            parts[0] += bias
        return parts


@pytest.mark.parametrize("name", CASES)
def test_parts_change_nothing(name, tmp_path):
    case = CASES[name]
    _, config, tensors = make(case.config, tmp_path, attention=case.attention)
    prompts, steps = {"a": prompt(30), "b": prompt(3, 2)}, [[("a", 20)], [("b", 1), ("a", 9)], [("a", 1), ("b", 2)]]
    found = []
    for kernels in (ReferenceKernels(), Opened()):
        model = load(config, tensors, max_positions=case.longest, kernels=kernels)
        found.append(ours(model, prompts, steps, kernels))
    assert kernels.opened > 0 or name in PARALLEL
    for key, logits in found[0].items():
        assert (found[1][key] - logits).abs().max() <= 1e-4, key
