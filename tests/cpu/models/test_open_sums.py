"""Backends that leave the parts of a product unadded: every family computes the same, whatever reads the sum."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.cpu.models.families_helpers import CASES, prompt
from tests.cpu.models.family_cases import ALL
from tests.cpu.models.open_helpers import Opened
from tests.cpu.models.parity import load, make, ours
from tests.cpu.models.ranks_helpers import Shared, ThreadGroup
from torch import Tensor

from tokenmill.kernels.reference import ReferenceKernels

PARALLEL = ("falcon-7b", "falcon-40b", "falcon-11b", "gpt-neox")
"""Families that add up attention and network by themselves."""


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
    assert kernels.read == kernels.opened, "the operation that reads a sum adds its parts up"
    for key, logits in found[0].items():
        assert (found[1][key] - logits).abs().max() <= 1e-4, key


@pytest.mark.parametrize(("joins", "pieces"), [(True, 1), (False, 1), (True, 3)])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "granite-0", "opt-350m", "mixtral"])
def test_ranks_send_what_they_have_added_up(name, joins, pieces, tmp_path):
    """joins: the sum comes with a norm, and reads the parts itself. pieces: of rows, in which it is exchanged."""
    _, config, tensors = ({**ALL, **CASES})[name].make(tmp_path)
    prompts, steps = {"a": prompt(30)}, [[("a", 20)], [("a", 9)], [("a", 1)]]
    alone = ours(load(config, tensors), prompts, steps)["a"]
    groups = [ThreadGroup(shared, rank, joins, pieces, adds_parts=True) for shared in (Shared(2),) for rank in range(2)]
    every = [Opened(), Opened()]

    def run(group: ThreadGroup) -> Tensor:
        kernels = every[group.rank]
        with torch.no_grad():
            return ours(load(config, tensors, group=group, kernels=kernels), prompts, steps, kernels)["a"]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, groups))
    assert all(kernels.opened == every[0].opened > 0 for kernels in every)
    assert torch.equal(*found)
    assert (found[0] - alone).abs().max() <= 1e-4
