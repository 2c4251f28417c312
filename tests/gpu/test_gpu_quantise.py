"""Quantising and pruning on the device: columns in one launch against plain torch, and every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.gpu.gpu_helpers import triton_kernels

from tokenmill.quantize import recipes
from tokenmill.quantize.codes import Spec
from tokenmill.quantize.gptq import gptq
from tokenmill.quantize.inputs import Inputs
from tokenmill.quantize.quantize_model import QuantizeJob, quantize_model
from tokenmill.quantize.recipes import Recipe, complete_recipe
from tokenmill.quantize.sparse_methods import parse_sparsity, sparsegpt
from tokenmill.testing.tiny import make_tiny


def problem(rows: int, columns: int) -> tuple[Tensor, Inputs]:
    """A weight, and inputs whose columns differ in energy and depend on each other."""
    inputs = Inputs(columns, torch.device("cuda"))
    mix = torch.randn(columns, columns, device="cuda") / columns**0.5
    size = torch.logspace(-1.0, 0.5, columns, device="cuda")[torch.randperm(columns, device="cuda")]
    inputs.add((torch.randn(4 * columns, columns, device="cuda") @ mix) * size)
    return torch.randn(rows, columns, device="cuda"), inputs


@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (1024, 4096), (4097, 1056), (3, 640)])
@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 32, False), (3, 32, True), (2, 32, False), (8, 0, True), (4, 0, False)]
)
def test_gptq_in_blocks(rows: int, columns: int, bits: int, group: int, symmetric: bool) -> None:
    weight, inputs = problem(rows, columns)
    spec, kernels = Spec(bits, group or columns, symmetric), triton_kernels()
    found, wanted = gptq(weight, spec, inputs, kernels=kernels), gptq(weight, spec, inputs)
    assert kernels.counters()["round_lines"] == {"calls": -(-columns // 128), "fallbacks": 0}
    assert (found.codes != wanted.codes).float().mean() <= 1e-2  # where a tie falls the other way, its row goes on so
    lost, least = (inputs.loss(codes.dense() - weight) for codes in (found, wanted))
    assert abs(lost - least) <= 1e-3 * least


@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (1000, 960), (5, 240)])
@pytest.mark.parametrize("sparsity", ["2:4", "1:3", "19:24", "0.5"])
def test_sparsegpt_in_blocks(rows: int, columns: int, sparsity: str) -> None:
    asked, kernels = parse_sparsity(sparsity), triton_kernels()
    columns -= columns % max(asked.of, 1)
    weight, inputs = problem(rows, columns)
    found, wanted = sparsegpt(weight, asked, inputs, kernels=kernels), sparsegpt(weight, asked, inputs)
    assert kernels.counters()["prune_lines"]["fallbacks"] == 0
    assert ((found == 0) != (wanted == 0)).float().mean() <= 1e-2
    lost, least = (inputs.loss(made - weight) for made in (found, wanted))
    assert abs(lost - least) <= 1e-3 * least
    if asked.of:
        assert ((found.unflatten(1, (-1, asked.of)) == 0).sum(-1) == asked.zeros).all()


@pytest.mark.parametrize(
    ("method", "more"),
    [*((method, {}) for method in recipes.METHODS), ("gptq", {"form": "gptq"}), ("gptq", {"form": "awq"}),
     ("sparsegpt", {"form": "compressed-tensors"}), ("gptq", {"kv_scales": True})],
)  # fmt: skip
def test_every_method_makes_what_the_host_makes(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    """By the errors of the matrices: what follows from sums may differ a little."""
    source = make_tiny(tmp_path / "tiny", hidden=128)
    recipe, tokens = complete_recipe(Recipe(method=method, group=32, **more)), torch.randint(0, 300, (8, 64))
    jobs = (QuantizeJob(source, tmp_path / name, recipe, tokens=tokens, device=name) for name in ("cuda", "cpu"))
    found, wanted = (sorted(quantize_model(job).errors, key=lambda each: each.name) for job in jobs)
    assert len(found) == len(wanted) == 14
    for one, other in zip(found, wanted, strict=True):
        assert one.name == other.name and abs(one.error - other.error) <= 0.1 * other.error + 1e-6
