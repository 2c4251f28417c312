"""GPTQ and SparseGPT with a block of columns in one launch, in the interpreter, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.cpu.triton.bounds import Bounds
from torch import Tensor

from tokenmill.compute.lines import LineGrid
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.quantize.codes import Codes, Spec
from tokenmill.quantize.gptq import gptq
from tokenmill.quantize.inputs import Inputs
from tokenmill.quantize.recipes import Recipe, complete_recipe, hold
from tokenmill.quantize.sparse_methods import parse_sparsity, sparsegpt

CASES = [
    (bits, group, symmetric, columns, rows)
    for bits, group, symmetric, columns, rows in (
        (2, 32, False, 160, 33),  # the last block is short, and so is the last tile
        (3, 32, True, 128, 7),
        (4, 128, False, 256, 64),
        (4, 32, False, 32, 1),
        (4, 160, True, 160, 40),  # a scale for each row
        (8, 256, False, 256, 5),  # the group is larger than a block
        (8, 128, True, 128, 31),
    )
]


def problem(rows: int, columns: int) -> tuple[Tensor, Inputs]:
    """A weight, and inputs whose columns differ in energy and depend on each other, so that they are rounded out of
    order and make up for much."""
    random = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(3 * columns, columns, generator=random) @ torch.randn(columns, columns, generator=random)
    inputs = Inputs(columns, torch.device("cpu"))
    inputs.add(x * torch.logspace(-1.0, 0.5, columns)[torch.randperm(columns, generator=random)])
    return torch.randn(rows, columns, generator=random), inputs


def check_alike(one: Codes, other: Codes, weight: Tensor, inputs: Inputs) -> None:
    """Sums are rounded differently where a multiplication is joined with an addition, so a number within 1e-6 of a tie
    may get the other code, after which the row's later columns differ, too. That must stay rare, and cost nothing."""
    assert torch.equal(one.scales, other.scales) and torch.equal(one.zeros, other.zeros)
    assert (one.codes != other.codes).float().mean() <= 1e-3
    lost, wanted = (inputs.loss(codes.dense() - weight) for codes in (one, other))
    assert abs(lost - wanted) <= 1e-3 * wanted


@pytest.mark.parametrize(("bits", "group", "symmetric", "columns", "rows"), CASES)
@pytest.mark.parametrize("lowest", [0, 1])
def test_codes_are_those_of_plain_torch(
    bits: int, group: int, symmetric: bool, columns: int, rows: int, lowest: int
) -> None:
    weight, inputs = problem(rows, columns)
    spec, kernels = Spec(bits, group, symmetric, lowest), TritonKernels()
    with Bounds().watching() as bounds:
        found = gptq(weight, spec, inputs, kernels=kernels)
    blocks = -(-columns // 128)
    assert bounds.launches == {"_round_kernel": blocks}
    assert kernels.counters()["round_lines"] == {"calls": blocks, "fallbacks": 0}
    assert int(found.codes.max()) < 1 << bits
    check_alike(found, gptq(weight, spec, inputs), weight, inputs)


def test_lines_of_other_strides_and_types() -> None:
    """Lines and factors that are parts of larger matrices, or turned; what the kernel does not know is left to
    torch."""
    random, kernels, plain = torch.Generator().manual_seed(0), TritonKernels(), ReferenceKernels()
    wide, steps = torch.randn(9, 40, generator=random), torch.rand(2, 20, generator=random) + 0.1
    grid = LineGrid(steps, torch.full((2, 20), 7.0), torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1]), 15)
    upper = (torch.randn(12, 12, generator=random).triu() / 4 + torch.eye(12))[:9, :9]
    for lines in (wide[:, 3:23], torch.randn(20, 9, generator=random).T):
        before = lines.clone()
        for turned in (upper, upper.T.contiguous().T):
            (codes, errors), wanted = (each.round_lines(lines, grid, turned) for each in (kernels, plain))
            assert torch.equal(codes, wanted[0]) and torch.allclose(errors, wanted[1], atol=1e-5)
        assert torch.equal(lines, before)
    exact = replace(grid, steps=steps.double(), zeros=grid.zeros.double())
    assert kernels.round_lines(wide[:, :20].double(), exact, upper.double())[1].dtype == torch.float64
    assert kernels.counters()["round_lines"]["fallbacks"] == 1


def test_a_recipe_hands_kernels_on() -> None:
    weight, inputs = problem(16, 128)
    for form in ("compressed-tensors", "gptq"):
        kernels, recipe = TritonKernels(), complete_recipe(Recipe(method="gptq", form=form))
        hold(recipe, weight, 4, inputs, kernels=kernels)
        assert kernels.counters()["round_lines"] == {"calls": 1, "fallbacks": 0}
    kernels = TritonKernels()
    hold(complete_recipe(Recipe(method="sparsegpt")), weight, 4, inputs, kernels=kernels)
    assert kernels.counters()["prune_lines"] == {"calls": 1, "fallbacks": 0}


@pytest.mark.parametrize(
    ("sparsity", "rows", "columns"),
    [("2:4", 33, 160), ("1:3", 7, 240), ("19:24", 5, 240), ("8:32", 32, 128), ("0.5", 40, 160), ("0.3", 1, 64)],
)
def test_pruned_is_what_plain_torch_prunes(sparsity: str, rows: int, columns: int) -> None:
    """Also with columns without inputs, whose numbers cost the same, and numbers that are zero already."""
    weight, inputs = problem(rows, columns)
    weight[:, 5:7], asked, kernels = 0.25, parse_sparsity(sparsity), TritonKernels()
    weight[0] = 0.0
    dead = torch.ones(columns)
    dead[5:7] = 0.0
    inputs.hessian *= dead * dead[:, None]
    with Bounds().watching() as bounds:
        found = sparsegpt(weight, asked, inputs, kernels=kernels)
    block = 128 - 128 % max(asked.of, 1)
    assert bounds.launches == {"_prune_kernel": -(-columns // block)}
    assert kernels.counters()["prune_lines"] == {"calls": -(-columns // block), "fallbacks": 0}
    wanted = sparsegpt(weight, asked, inputs)
    assert ((found == 0) != (wanted == 0)).float().mean() <= 1e-3
    lost, least = (inputs.loss(made - weight) for made in (found, wanted))
    assert abs(lost - least) <= 1e-3 * least
    if asked.of:
        assert ((found.unflatten(1, (-1, asked.of)) == 0).sum(-1)[1:] == asked.zeros).all()


def test_pruned_lines_of_other_strides_and_types() -> None:
    random, kernels, plain = torch.Generator().manual_seed(0), TritonKernels(), ReferenceKernels()
    wide = torch.randn(8, 40, generator=random)
    upper = (torch.randn(12, 12, generator=random).triu() / 4 + torch.eye(12))[:8, :8]
    gone = torch.rand(20, 8, generator=random).T < 0.4
    for lines in (wide[:, 3:23], torch.randn(20, 8, generator=random).T):
        before, mask = lines.clone(), gone.clone()
        for given in ((lines, upper, gone), (lines, upper.T.contiguous().T, None, 3, 4)):
            for found, wanted in zip(kernels.prune_lines(*given), plain.prune_lines(*given), strict=True):
                assert torch.allclose(found, wanted, atol=1e-5)
        assert torch.equal(lines, before) and torch.equal(gone, mask)
    assert kernels.prune_lines(wide.double(), upper.double(), None, 1, 2)[0].dtype == torch.float64
    assert kernels.counters()["prune_lines"]["fallbacks"] == 1


@pytest.mark.parametrize(("lines", "rows", "zeros", "of"), [(6, 7, 2, 4), (10, 3, 2, 4), (1, 1, 1, 4), (5, 1, 2, 3)])
def test_the_last_neighbours_may_be_fewer(lines: int, rows: int, zeros: int, of: int) -> None:
    random = torch.Generator().manual_seed(lines)
    given = torch.randn(lines, rows, generator=random)
    upper = (torch.randn(lines, lines, generator=random) / 8).triu() + torch.eye(lines)
    made = [kernels.prune_lines(given, upper, None, zeros, of) for kernels in (TritonKernels(), ReferenceKernels())]
    for found, wanted in zip(*made, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
