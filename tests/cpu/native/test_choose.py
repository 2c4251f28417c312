"""Choosing tokens natively: the very tokens that the sampler's many operations choose, or the question comes back."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.cpu.kernels.choosing import ROWS, both, cases, check

from tokenmill import _native
from tokenmill.core.step import RowSampling
from tokenmill.kernels.cpu import CpuKernels

KERNELS = CpuKernels()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_any_masks_and_draws(case):
    logits, rows, _, masks, lengths = case
    before = logits.clone()
    table, *found = both(KERNELS, *case)
    if found[1] is not None:
        check(table, logits, rows, masks, lengths, *found, exact=True)
    assert torch.equal(before.nan_to_num(), logits.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_vocabularies(dtype):
    """Pieces of a line are put together alike; few questions are given back; skipped parts held nothing."""
    size, count, given_back = 20_011, 24, 0
    for seed in range(12):
        rng = random.Random(seed)
        logits = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) * rng.choice([0.1, 2, 30])
        logits = logits.to(dtype)
        rows = [i % ROWS for i in range(count)]
        params = {
            r: RowSampling(temperature=rng.choice([0.0, 0.6, 1.0, 3.0]), seed=rng.getrandbits(64)) for r in range(ROWS)
        }
        masks = {}
        if seed % 3:
            masks[2] = [rng.randbytes(size // 8 + 1) for _ in range(rows.count(2))]
            masks[4] = [(1 << rng.randrange(size) | 7).to_bytes(size // 8 + 1, "little") for _ in range(rows.count(4))]
        table, *found = both(KERNELS, logits, rows, params, masks, [9] * count)
        if found[1] is None:
            given_back += 1
        else:
            check(table, logits, rows, masks, [9] * count, *found, exact=True)
    assert given_back <= 3


def test_bad_numbers_are_refused():
    out = torch.zeros(4, dtype=torch.int64)
    x, word = torch.zeros(1, 40), torch.tensor([2], dtype=torch.int32)
    places = (out.data_ptr(),) * 3
    with pytest.raises(ValueError, match="no such mask"):
        _native.choose_tokens(x.data_ptr(), 1, 40, 40, 0, (word.data_ptr(), out.data_ptr(), 1, 2), [], places)
    with pytest.raises(ValueError, match="as wide"):
        _native.choose_tokens(x.data_ptr(), 1, 40, 40, 0, (0, out.data_ptr(), 1, 1), [], places)
    row = torch.tensor([7])
    with pytest.raises(ValueError, match="no such row"):
        _native.choose_tokens(
            x.data_ptr(), 1, 40, 40, 0, (0, 0, 0, 0), [row.data_ptr(), *[out.data_ptr()] * 4, 7, 1, 1], places
        )
