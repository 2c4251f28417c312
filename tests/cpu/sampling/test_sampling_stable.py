"""Sum, maximum and top-k: right, with ties by lower id, and the same bits whatever the company."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.sampling.stable import WIDE, first_max, line_sums, top_tokens

VALUES = st.sampled_from([-math.inf, -3.0, -0.0, 0.0, 1.0, 1.5, 2.0])


def tied(n: int, size: int, seed: int) -> torch.Tensor:
    """Lines with many equal values: logits rounded to bfloat16's few."""
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed)).mul(3).bfloat16().float()


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 257, 32003, 50257, 131072])
def test_sums_do_not_depend_on_company(size: int) -> None:
    x = torch.randn(7, size)
    sums = line_sums(x)
    np.testing.assert_allclose(sums.numpy(), x.double().sum(-1).numpy(), rtol=1e-5, atol=1e-4)
    for n in (1, 2, 5):
        assert torch.equal(line_sums(x[2 : 2 + n]), sums[2 : 2 + n])
    assert torch.equal(x, x.clone())


def test_sums_leave_their_argument_alone() -> None:
    x = torch.randn(3, 100)
    before = x.clone()
    line_sums(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("size", [1, 5, 4096, 50257, WIDE, WIDE + 1, 3 * WIDE + 77])
@pytest.mark.parametrize("n", [1, 3, 16])
def test_first_max_takes_the_lowest_id(n: int, size: int) -> None:
    x = tied(n, size, size + n)
    values, ids = first_max(x)
    assert torch.equal(values, x.amax(-1))
    assert ids.tolist() == [int(np.flatnonzero(line == line.max())[0]) for line in x.numpy()]
    assert first_max(torch.zeros(n, size))[1].tolist() == [0] * n
    assert first_max(torch.full((n, size), -math.inf))[1].tolist() == [0] * n


@pytest.mark.parametrize("size", [100, WIDE + 1])
def test_first_max_reports_nan(size: int) -> None:
    x = torch.randn(3, size)
    x[1, size // 2] = math.nan
    values, ids = first_max(x)
    assert values.isnan().tolist() == [False, True, False]
    assert 0 <= int(ids[1]) < size


def top_slowly(line: list[float], k: int) -> list[int]:
    return sorted(range(len(line)), key=lambda i: (-line[i], i))[:k]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(VALUES, min_size=1, max_size=40), st.integers(1, 50))
def test_top_tokens_small(line: list[float], k: int) -> None:
    values, ids = top_tokens(torch.tensor([line, line[::-1]]), k)
    assert ids[0].tolist() == top_slowly(line, k)
    assert ids[1].tolist() == top_slowly(line[::-1], k)
    assert values[0].tolist() == [line[i] for i in top_slowly(line, k)]


@pytest.mark.parametrize("size", [1280, 1281, 4097, 50257])
@pytest.mark.parametrize("k", [1, 7, 20])
def test_top_tokens_in_blocks(size: int, k: int) -> None:
    x = tied(3, size, size)
    x[1] = -math.inf
    x[1, random.Random(size).sample(range(size), 5)] = 2.0
    x[2, -1] = 99.0
    _, ids = top_tokens(x, k)
    assert ids.tolist() == [top_slowly(line, k) for line in x.tolist()]


@pytest.mark.parametrize("size", [32003, 50257, 131072])
@pytest.mark.parametrize("name", ["exp", "log", "log1p", "log_double"])
def test_functions_do_not_depend_on_place(name: str, size: int) -> None:
    """What the whole package builds on: torch gives an element the same bits wherever it lies in a call."""
    f = {"exp": lambda t: (t * -20).exp(), "log": torch.log, "log1p": lambda t: torch.log1p(-t)}.get(
        name, lambda t: t.double().log()
    )
    x = torch.rand(9, size).clamp(1e-7, 0.9999)
    full = f(x)
    for start, stop in ((0, 1), (3, 4), (8, 9), (1, 3), (2, 9)):
        assert torch.equal(f(x[start:stop].clone()), full[start:stop])
    flat = full.flatten()
    for start in (1, 5, 31, 1000):
        for length in (1, 7, 16, 33, 4099):
            assert torch.equal(f(x.flatten()[start : start + length].clone()), flat[start : start + length])
