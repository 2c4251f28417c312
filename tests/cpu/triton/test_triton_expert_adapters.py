"""Adapters of experts in the interpreter against the reference, which multiplies expert by expert.

Several adapters and none in one step, of ranks that differ from expert to expert; shared experts, routers, biases."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.cpu.models.parity import load, make
from tests.cpu.triton.triton_models_helpers import CASES
from tests.thinned import covering
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.lora.fit import Fitter
from tokenmill.lora.peft import Adapter, LowRank
from tokenmill.lora.sites import Sites, mixing

SLOTS, LENGTHS = [2, 0, 1, 2], {"a": 9, "b": 3, "c": 1, "d": 5}


def built(config: dict, tensors: dict[str, Tensor], kernels: Any, *, router: bool, **how: Any) -> tuple[Any, Sites]:
    """The model, with random adapters of its experts (and routers) in slots 1 and 2, the same every time."""
    sites = Sites(2, 8, how.get("dtype", torch.float32), torch.device("cpu"))
    model = load(config, tensors, kernels=kernels, adapters=sites, **how)
    made = torch.Generator().manual_seed(3)
    for path in sorted(sites.places):
        if not mixing(path) or (".experts." not in path and not router):
            continue
        site = sites.places[path][0].site
        sites.ensure(site)
        assert site.down is not None and site.up is not None and site.ranks is not None
        for slot in (1, 2):
            rank = int(torch.randint(0, 9, (1,), generator=made))
            site.host_ranks[slot], site.ranks[slot] = rank, rank
        site.down.copy_(torch.randn(site.down.shape, generator=made) * 0.2)
        site.up.copy_(torch.randn(site.up.shape, generator=made) * 0.2)
    return model, sites


def logits_of(model: Any, kernels: Any, slots: list[int]) -> Tensor:
    """[T, vocab] of one step of all sequences, which have these slots."""
    batch = PagedBatch(model.spec.kv_specs, kernels, states=model.spec.states)
    context = batch.step(list(LENGTHS.items()))
    assert context.rows is not None
    given = torch.tensor(slots, dtype=torch.int32).repeat_interleave(torch.tensor(list(LENGTHS.values())))
    context = dataclasses.replace(context, rows=dataclasses.replace(context.rows, adapters=given))
    tokens = torch.arange(sum(LENGTHS.values())) * 7 % 40
    return model.logits(model.forward(tokens, context), context).float()


@pytest.mark.parametrize(("name", "steady"), covering(CASES, [False, True]))
def test_like_the_reference(name: str, steady: bool, tmp_path: Path) -> None:
    _, config, tensors = make(CASES[name](), tmp_path)
    kernels = TritonKernels(steady=steady)
    found, plain = [], []
    for each in (kernels, ReferenceKernels()):
        model, _ = built(config, tensors, each, router=name != "gpt-oss")
        found.append(logits_of(model, each, SLOTS))
        plain.append(logits_of(model, each, [0, 0, 0, 0]))
    assert torch.allclose(*found, atol=2e-4), (found[0] - found[1]).abs().max()
    assert torch.allclose(*plain, atol=2e-4)
    changed = (found[1] - plain[1]).abs().amax(1)
    assert changed[:9].max() > 0.01 and changed[9:12].max() < 1e-5 and changed[12:].max() > 0.01
    counters = kernels.counters()
    assert counters["expert_adapters"]["calls"] > 0 and counters["experts"]["fallbacks"] == 0


def test_packed_experts(tmp_path: Path) -> None:
    """What adapters add is made of the numbers before they are rounded for the product."""
    _, config, tensors = make(CASES["qwen3-moe"](), tmp_path)
    found = []
    for kernels in (TritonKernels(), ReferenceKernels()):
        model, _ = built(config, tensors, kernels, router=False, quantization="int8")
        found.append(logits_of(model, kernels, SLOTS) - logits_of(model, kernels, [0, 0, 0, 0]))
    assert (found[0] - found[1]).abs().max() < 0.1 * found[1].abs().max()


def test_a_token_has_the_same_bytes_whatever_adapters_are_beside_it(tmp_path: Path) -> None:
    _, config, tensors = make(CASES["qwen3-moe"](), tmp_path)
    kernels = TritonKernels(steady=True)
    model, _ = built(config, tensors, kernels, router=False)
    one, other = logits_of(model, kernels, [2, 0, 1, 2]), logits_of(model, kernels, [2, 1, 2, 0])
    assert torch.equal(one[:9], other[:9])


def test_matrices_are_held_once_and_what_has_no_low_rank_is_refused(tmp_path: Path) -> None:
    _, config, tensors = make(CASES["qwen3-moe"](), tmp_path)
    _, sites = built(config, tensors, TritonKernels(), router=False)
    paths = [path for path in sites.places if ".experts." in path]
    assert all(place.weight is not None and place.weight.base is None for p in paths for place in sites.places[p])
    module = next(path for path in paths if path.endswith("down_proj"))
    low = LowRank(torch.zeros(2, 24), torch.zeros(32, 2), 1.0, magnitude=torch.ones(32))
    adapter = Adapter(Path("here"), linear={module: low})
    with pytest.raises(ModelError, match="low rank only"):
        Fitter(adapter, sites).fit()
