"""Masked choices and draws in the interpreter: what the sampler's many operations give, whatever the masks are."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from tests.cpu.kernels.choosing import ROWS, both, cases, check

from tokenmill.core.step import RowSampling
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.sampling.choose import Ask, Way, choose, way
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
    for count, size in ((3, 17_000), (66, 300)):
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
    assert way([2], ({0: b"\xff" * 5}, {}), table) is Way.GENERAL
    table.set_row(2, RowSampling(temperature=1.0), 3)
    assert way([2], ({0: b"\xff" * 5}, {}), table) is Way.BACKEND
    assert way([2], ({}, {2: print}), table) is Way.GENERAL


NEW = [
    *({"xtc_probability": 0.9, "xtc_threshold": 0.05}, {"top_n_sigma": 1.0}, {"mirostat": 2}, {"mirostat": 1}),
    *(
        {"dynatemp_range": 0.5},
        {"smoothing_factor": 0.5},
        {"top_a": 0.3},
        {"eta_cutoff": 500.0},
        {"epsilon_cutoff": 9.0},
    ),
    *({"dry_multiplier": 1.0}, {"no_repeat_ngram_size": 2}, {"top_p": 0.8, "order": ["top_p", "temperature"]}),
]


def chosen_by(kernels, rows, params, logits):
    table = SamplingTable(ROWS, logits.shape[1], "cpu")
    for row, one in params.items():
        table.set_row(row, one, 3)
    tokens = torch.randint(0, 9, (ROWS, 32), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    at = torch.tensor(rows), torch.arange(len(rows)) % 20 + 5
    ask = Ask(rows, tokens, lambda: at, lambda: 32)
    sampled, marked = choose(logits.clone(), ask, table, kernels)
    assert torch.equal(marked, sampled.ids)
    return sampled.ids.tolist(), way(rows, ({}, {}), table)


@pytest.mark.parametrize("more", NEW)
def test_the_one_way_gives_the_same_with_these_kernels(more):
    """Rows with a new sampler, in company with rows that a backend could choose alone; and those rows as if alone."""
    size, rows = 300, [0, 1, 2, 1, 0, 2, 1, 1]
    logits = torch.randn(len(rows), size, generator=torch.Generator().manual_seed(7)) * 4
    params = {
        0: RowSampling(),
        1: RowSampling(temperature=0.8, seed=5, **more),
        2: RowSampling(temperature=1.1, seed=6),
    }
    found, by = chosen_by(KERNELS, rows, params, logits)
    assert by is Way.GENERAL and found == chosen_by(ReferenceKernels(), rows, params, logits)[0]
    plain = [i for i, row in enumerate(rows) if row != 1]
    for some in ([rows.index(0)], plain):
        lines = [rows[i] for i in some]
        positions = [found[i] for i in some]
        table = SamplingTable(ROWS, size, "cpu")
        for row, one in params.items():
            table.set_row(row, one, 3)
        at = torch.tensor(lines), torch.tensor([i % 20 + 5 for i in some])
        ask = Ask(lines, torch.zeros(ROWS, 32, dtype=torch.int32), lambda at=at: at, lambda: 32)
        assert choose(logits[some].clone(), ask, table, KERNELS)[0].ids.tolist() == positions
        assert way(lines, ({}, {}), table) in (Way.LARGEST, Way.BACKEND)
