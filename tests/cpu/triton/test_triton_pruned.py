"""Products with 2:4 matrices in Triton's interpreter, against the matrix with its zeros."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.cpu.triton.triton_narrow_helpers import REFERENCE, relative

from tokenmill.compute.forward import NormSpec
from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.pruned.activations import lay_out
from tokenmill.kernels.triton.pruned.expand import with_zeros
from tokenmill.kernels.triton.pruned.few_rows import few_rows
from tokenmill.kernels.triton.pruned.layout import PrunedMatrix, pack_pruned
from tokenmill.kernels.triton.pruned.product import finished
from tokenmill.kernels.triton.quantised.narrow_round import round_rows

FP8 = torch.float8_e4m3fn


def two_of_four(rows: int, columns: int, dtype: torch.dtype, emptier: bool = False) -> torch.Tensor:
    """Random numbers of which two of every four are zero; emptier: more, in some."""
    numbers = torch.randn(rows, columns // 4, 4)
    numbers.scatter_(2, torch.rand(numbers.shape).topk(2, 2).indices, 0.0)
    if emptier:
        numbers *= torch.rand(numbers.shape) > 0.5
    return numbers.flatten(1).to(dtype)


def stored(numbers: torch.Tensor, bias: torch.Tensor | None = None) -> StoredMatrix:
    shape = (numbers.shape[0], numbers.shape[1])
    if numbers.dtype == FP8:
        parts = (("codes", numbers), ("scales", torch.rand(len(numbers), 1) + 0.5))
        return StoredMatrix("fp8", shape, parts, lambda: numbers.float() * parts[1][1], bias)
    return StoredMatrix("dense", shape, (("numbers", numbers),), lambda: numbers, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("emptier", [False, True])
def test_what_is_packed_comes_back(dtype, emptier):
    numbers = two_of_four(64, 256, dtype, emptier)
    packed = pack_pruned(stored(numbers))
    assert packed is not None and packed.bytes() < 0.7 * numbers.nbytes + 64 * 4
    picked = torch.tensor([5, 63, 0])
    scales = 1.0 if packed.scales is None else packed.scales[picked, None]
    assert torch.equal(packed.rows(picked, torch.float32), numbers.float()[picked] * scales)
    assert torch.equal(with_zeros(packed, pdl=False).float(), numbers.float())
    assert torch.equal(packed.pieces()[1]["table"].float(), numbers.float()), "experts are stacked with their zeros"


def test_other_matrices_stay_as_they_are():
    numbers = two_of_four(64, 256, torch.bfloat16)
    full = numbers.clone()
    full[63, 252:] = 1.0  # three of four, in the last place
    assert pack_pruned(stored(full)) is None
    assert pack_pruned(stored(numbers.float())) is None
    assert pack_pruned(replace(stored(numbers.half()), dtype=torch.float32)) is None, "multiplied in another type"
    assert pack_pruned(stored(numbers[:63])) is None and pack_pruned(stored(numbers[:, :192].contiguous())) is None
    assert isinstance(TritonKernels("cpu", pruned="packed").pack(stored(numbers)), PrunedMatrix)
    assert TritonKernels("cpu").pack(stored(numbers)) is None
    assert TritonKernels("cpu", steady=True, pruned="packed").pack(stored(numbers)) is None


@pytest.mark.parametrize(
    ("dtype", "rows", "inputs", "around"),
    [
        (torch.bfloat16, 1, 384, "gated"), (torch.bfloat16, 9, 128, "added"), (torch.bfloat16, 65, 256, "gated"),
        (torch.float16, 7, 256, "bare"), (FP8, 2, 384, "gated"), (FP8, 9, 128, "added"), (FP8, 65, 256, "added"),
    ],
)  # fmt: skip
def test_products(dtype, rows, inputs, around):
    outputs = 64
    numbers = two_of_four(outputs, inputs, dtype)
    bias = torch.randn(outputs, dtype=torch.bfloat16 if dtype == FP8 else dtype) if around != "bare" else None
    matrix = stored(numbers, bias)
    packed = TritonKernels("cpu", pruned="packed").pack(matrix)
    assert isinstance(packed, PrunedMatrix)
    x = torch.randn(rows, inputs).to(torch.bfloat16 if dtype == FP8 else dtype)
    norm = NormSpec(torch.rand(inputs).to(x.dtype) + 0.5, 1e-5) if around == "gated" else None
    act = "silu_mul" if around == "gated" else None
    residual = torch.randn(rows, outputs).to(x.dtype) if around == "added" else None
    found = TritonKernels("cpu").product(x, packed, norm=norm, act=act, residual=residual)
    exact = x.float() if norm is None else REFERENCE.norm(x, norm).float()
    if dtype == FP8 and rows > 64:  # few rows are not rounded to 8 bits
        q, steps = round_rows(exact, FP8, pdl=False)
        exact = q.float() * steps[:, None]
    y = exact @ matrix.dense().float().t() + (0.0 if bias is None else bias.float())
    y = y if act is None else REFERENCE.activate(y, act)
    y = y if residual is None else y + residual.float()
    assert found.dtype == x.dtype and relative(found.float(), y) < (0.05 if dtype == FP8 else 0.01)


@pytest.mark.parametrize("act", [None, "silu_mul", "gelu_tanh"])
def test_sums_are_finished(act):
    packed = pack_pruned(stored(two_of_four(96, 128, FP8), torch.randn(96)))
    assert packed is not None and packed.scales is not None and packed.bias is not None
    y, steps = torch.randn(5, 96), torch.rand(5)
    residual = torch.randn(5, 48 if act == "silu_mul" else 96)
    whole = y * steps[:, None] * packed.scales + packed.bias
    exact = residual + (whole if act is None else REFERENCE.activate(whole, act))
    assert relative(finished(y, steps, packed, act, residual, torch.float32, pdl=False), exact) < 1e-5


@pytest.mark.parametrize(
    ("config", "dtype", "act"),
    [((2, 2, 1), torch.bfloat16, None), ((4, 1, 1), FP8, "silu_mul"), ((2, 1, 1), FP8, None)],
)
def test_warps_side_by_side_and_behind_each_other(config, dtype, act):
    numbers = two_of_four(128, 384, dtype)
    matrix = stored(numbers)
    packed = pack_pruned(matrix)
    assert packed is not None
    x = torch.randn(11, 384).bfloat16()
    laid, steps = lay_out(x, dtype, None, pdl=False)
    found = few_rows(laid, 11, steps, packed, act, None, torch.float32, pdl=False, config=config)
    y = x.float() @ matrix.dense().float().t()
    assert relative(found, y if act is None else REFERENCE.activate(y, act)) < 0.01
