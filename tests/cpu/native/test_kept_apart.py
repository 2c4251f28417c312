"""LLM.int8(): large activations multiply unrounded, as bitsandbytes' users expect, but row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.quant.grid import GridWeight

REFERENCE = ReferenceKernels()
SHAPES = [(64, 256, 256), (140, 96, 32), (7, 160, 32), (192, 320, 64)]
"""Outputs, inputs, columns that share a scale."""


def made(outputs: int, inputs: int, group: int, dtype: torch.dtype = torch.float32, apart: float = 6.0) -> Any:
    random = torch.Generator().manual_seed(outputs)
    codes = torch.randint(-127, 128, (outputs, inputs), generator=random).to(torch.int8)
    scales = (torch.rand(outputs, 1, generator=random) * 0.01 + 0.001).half().expand(-1, -(-inputs // group))
    bias = torch.randn(outputs, generator=random).to(dtype)
    weight = GridWeight(codes, scales, bits=8, group=group, dtype=dtype, bias=bias)
    weight.apart = apart
    return weight


def inputs_with_outliers(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The first row has none, the second one exactly at the threshold, the last ones have more and more."""
    random = torch.Generator().manual_seed(columns)
    x = torch.randn(rows, columns, generator=random).clamp(-5, 5)
    for row in range(1, rows):
        x[row, torch.randperm(columns, generator=random)[: 3 * row - 2]] *= 60.0
    x[1:2, 5] = -6.0
    return x.to(dtype)


def by_the_rule(x: Tensor, weight: GridWeight) -> Tensor:
    """bitsandbytes' product of one row: columns of large activations in full, the others with one scale for the row."""
    q, scales = weight.numbers()
    wide, whole = q.double() * scales[:, :1].double(), x.double()
    large = whole.abs() >= 6.0
    rest = torch.where(large, 0.0, whole)
    step = rest.abs().max() / 127.0
    return (rest / step).round() @ wide.T * step + whole[large] @ wide[:, large].T


def product(kernels: Any, weight: GridWeight, x: Tensor, **around: Any) -> Tensor:
    found: Tensor = kernels.product(x, kernels.pack(weight.stored()) or weight.stored(), **around)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_native_products_are_the_references(kernels, shape, dtype):
    weight, x = made(*shape, dtype=dtype), inputs_with_outliers(9, shape[1], dtype)
    wanted, got = product(REFERENCE, weight, x), product(kernels, weight, x)
    error = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert error < (2e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("native", [False, True])
def test_at_least_as_exact_as_the_rule(kernels, native, shape):
    weight, x = made(*shape), inputs_with_outliers(9, shape[1])
    bias = weight.bias.double()
    exact = x.double() @ weight.dense().double().T
    got = product(kernels if native else REFERENCE, weight, x).double() - bias
    weight.apart = 0.0
    rounded = product(kernels if native else REFERENCE, weight, x).double() - bias
    for row in range(9):
        lost = (got[row] - exact[row]).square().mean().sqrt()
        assert lost < 1.05 * (by_the_rule(x[row], weight) - exact[row]).square().mean().sqrt()
        if row > 1:
            assert lost < 0.3 * (rounded[row] - exact[row]).square().mean().sqrt()
        elif row == 0:
            assert torch.equal(got[row], rounded[row])


@pytest.mark.parametrize("native", [False, True])
def test_rows_do_not_depend_on_company(kernels, native):
    weight, x = made(140, 96, 32), inputs_with_outliers(23, 96)
    backend = kernels if native else REFERENCE
    together = product(backend, weight, x)
    for row in range(23):
        assert torch.equal(product(backend, weight, x[row : row + 1])[0], together[row])


def test_only_large_ones_are_exact_and_what_is_not_finite_shows(kernels):
    weight, x = made(64, 256, 256), torch.zeros(2, 256)
    x[0] = inputs_with_outliers(1, 256)[0] + 40.0
    x[1, 3] = torch.inf
    exact = x[0].double() @ weight.dense().double().T + weight.bias.double()
    for backend in (REFERENCE, kernels):
        got = product(backend, weight, x)
        assert (got[0].double() - exact).abs().max() < 2e-6 * exact.abs().max()
        assert not bool(got[1].isfinite().any())


def test_around_the_product_nothing_changes(kernels):
    """The norm comes first: its result is judged, not its input. Gated halves have outliers each."""
    weight, x = made(256, 96, 32), inputs_with_outliers(5, 96)
    norm = NormSpec(torch.full((96,), 3.0), 1e-5)
    residual = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    around: dict[str, Any] = {"norm": norm, "act": "silu_mul", "residual": residual}
    wanted, got = product(REFERENCE, weight, x, **around), product(kernels, weight, x, **around)
    assert float(REFERENCE.norm(x, norm).abs().max()) > 6.0
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_experts_keep_them_apart(kernels):
    weights = [
        [made(128, 96, 32).settle(kernels) for _ in range(3)],
        [made(96, 64, 32).settle(kernels) for _ in range(3)],
    ]
    x, ids = inputs_with_outliers(6, 96), torch.tensor([[0, 2], [1, 2], [2, 0], [0, 1], [1, 0], [2, 1]])
    gates, ctx = torch.full((6, 2), 0.5), ForwardContext(kernels, ids, ids, ids, 1, [], [])
    pair = (weights[0], weights[1])
    got = kernels.experts(x, pair, ids, gates, "silu_mul", ctx)
    assert kernels.counters()["experts"]["fallbacks"] == 0
    parts = []
    for row in range(6):
        both = [
            weights[1][e].matmul(weights[0][e].matmul(x[row : row + 1], ctx, act="silu_mul"), ctx) * 0.5
            for e in ids[row].tolist()
        ]
        parts.append(both[0] + both[1])
    torch.testing.assert_close(got, torch.cat(parts), rtol=1e-6, atol=1e-5)


def test_joined_and_divided_weights_keep_the_threshold(kernels):
    one, other = made(64, 256, 256), made(64, 256, 256)
    assert one.join([other]).apart == 6.0 and one.split(0, 1, 2).apart == 6.0 and one.split(1, 1, 4).apart == 6.0
    assert one.take(torch.tensor([3, 1])).apart == 6.0 and one.to(torch.device("cpu")).apart == 6.0
    other.apart = 5.0
    assert one.join([other]) is None
