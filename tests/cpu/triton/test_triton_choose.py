"""Masked choices and draws in the interpreter: what the sampler's many operations give, whatever the masks are."""

from __future__ import annotations

import random

import pytest
import torch
from choosing import ROWS, both, cases, check
from hypothesis import given, settings

pytest.importorskip("triton")

from tokenmill.core.step import RowSampling
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.sampling.quick import choose_quickly
from tokenmill.sampling.table import SamplingTable

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN", "ignore:overflow", "ignore:invalid value")
KERNELS = TritonKernels()


@settings(max_examples=25, deadline=None)
@given(cases())
def test_any_masks_and_draws(case):
    logits, rows, _, masks, lengths = case
    before = logits.clone()
    table, *found = both(KERNELS, *case)
    check(table, logits, rows, masks, lengths, *found)
    assert torch.equal(before.nan_to_num(), logits.nan_to_num())


def test_many_lines_and_a_wide_vocabulary():
    """Both ways of cutting the vocabulary, and numbers of log-probabilities beside."""
    for count, size in ((3, 17_000), (66, 1100)):
        logits = torch.randn(count, size, generator=torch.Generator().manual_seed(count))
        rows = [i % ROWS for i in range(count)]
        params = {
            r: RowSampling(temperature=r % 2 * 0.9, seed=r, num_logprobs=2 if r == 1 else -1) for r in range(ROWS)
        }
        rng = random.Random(size)
        each = [rng.randbytes(size // 8 + 1) for _ in range(rows.count(0))]
        masks = {0: each if len(each) > 1 else each[0]}
        found = both(KERNELS, logits, rows, params, masks, [9] * count)
        check(found[0], logits, rows, masks, [9] * count, *found[1:])
        assert found[1].logprobs == found[2].logprobs and set(found[1].logprobs) == {
            i for i in range(count) if rows[i] == 1
        }


@pytest.mark.parametrize("more", [{"top_p": 0.9}, {"top_k": 5}, {"logit_bias": {3: 1.0}}, {"num_candidates": 4},
                                  {"repetition_penalty": 1.1}, {"min_tokens": 3, "end_ids": [1]}])  # fmt: skip
def test_other_edits_are_left_to_the_sampler(more):
    table = SamplingTable(ROWS, 40, "cpu")
    table.set_row(2, RowSampling(temperature=1.0, **more), 3)
    at = torch.tensor([2]), torch.tensor([4])
    assert choose_quickly(torch.zeros(1, 40), [2], at, {0: b"\xff" * 5}, table, KERNELS) is None
