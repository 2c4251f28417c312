"""Each edit by itself, on whole lines: what exactly becomes of every logit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cpu.sampling.sampling_oracle import edited, make_lines, packed

from tokenmill.core.step import RowSampling
from tokenmill.sampling import edits
from tokenmill.sampling.edits import ChangedLines, edit_, line_masks
from tokenmill.sampling.table import MASKED, SamplingTable

SIZE = 8
TOKEN = st.integers(0, SIZE - 1)
HISTORY = st.tuples(st.lists(TOKEN, min_size=1, max_size=5), st.lists(TOKEN, max_size=5))
Rows = list[tuple[RowSampling, list[int], list[int]]]


def edit_rows(rows: Rows, logits: torch.Tensor, masks: dict[int, Any] | None = None) -> torch.Tensor:
    table = SamplingTable(len(rows), SIZE, "cpu")
    for row, (params, prompt, _) in enumerate(rows):
        table.set_row(row, params, len(prompt))
    lines = make_lines([(i, prompt + output) for i, (_, prompt, output) in enumerate(rows)], table, masks=masks or {})
    bits = [b | (MASKED if masks and i in masks else 0) for i, b in enumerate(table.bits)]
    work = ChangedLines(
        logits.clone(), list(range(len(rows))), bits, lines, table, line_masks(lines.rows, lines.masks), None, {}
    )
    edit_(work)
    return work.x


def agree(rows: Rows) -> None:
    logits = torch.randn(len(rows), SIZE, generator=torch.Generator().manual_seed(len(rows))) * 3
    logits[:, 5] = -math.inf
    found = edit_rows(rows, logits)
    wanted = [edited(line, p, a, b, set(range(SIZE))) for line, (p, a, b) in zip(logits.tolist(), rows, strict=True)]
    np.testing.assert_allclose(found.numpy(), np.array(wanted), rtol=1e-5, atol=1e-5)


PENALTY = st.builds(
    RowSampling,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
    presence_penalty=st.sampled_from([-1.5, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.9]),
)
BAD = st.builds(RowSampling, bad_words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=3))
SMALL = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(0, 2), max_size=4))
MIN = st.builds(RowSampling, min_tokens=st.integers(0, 5), end_ids=st.lists(st.integers(0, SIZE + 2), max_size=9))
BIAS = st.builds(RowSampling, logit_bias=st.dictionaries(st.integers(0, SIZE + 2), st.floats(-100, 100, width=32)))
ALLOWED = st.builds(RowSampling, allowed_ids=st.none() | st.lists(st.integers(0, SIZE + 2), max_size=9))


def rows_of(params: st.SearchStrategy[RowSampling], history: Any = HISTORY) -> st.SearchStrategy[Rows]:
    row = st.tuples(params | st.just(RowSampling()), history).map(lambda case: (case[0], *case[1]))
    return st.lists(row, min_size=1, max_size=4)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(rows_of(PENALTY))
def test_penalties(rows: Rows) -> None:
    agree(rows)


def test_penalties_of_many_rows_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long histories and large vocabularies are worked off a few lines at a time, with the same result."""
    made: list[int] = []
    honest = edits._penalise_
    monkeypatch.setattr(edits, "_penalise_", lambda work, users, n: (made.append(len(users)), honest(work, users, n)))
    monkeypatch.setattr(edits, "PENALTY_BYTES", 2 * (edits.HISTORY_BYTES * 6 + edits.COUNTS_BYTES * SIZE))
    punished = RowSampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.5)
    agree([(punished, [1, 2, i % SIZE], [3, i % 4, 3]) for i in range(5)])
    assert sorted(made) == [1, 2, 2]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows_of(BAD, SMALL))
def test_bad_words(rows: Rows) -> None:
    agree(rows)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows_of(MIN))
def test_min_tokens(rows: Rows) -> None:
    agree(rows)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows_of(BIAS | ALLOWED))
def test_biases_and_allowed_ids(rows: Rows) -> None:
    agree(rows)


def test_borders() -> None:
    """The cases that decide: prompts do not count for bad words and penalties on output; min_tokens is exact."""
    zero = [0.0] * SIZE
    word = RowSampling(bad_words=[[1, 2, 3]])
    enough = RowSampling(min_tokens=2, end_ids=[4])
    rows: Rows = [(word, [1], [2]), (word, [0], [1, 2]), (enough, [1, 1], [0]), (enough, [1, 1], [0, 0])]
    found = edit_rows(rows, torch.tensor([zero] * 4))
    assert (found == -math.inf).nonzero().tolist() == [[1, 3], [2, 4]]
    punished = RowSampling(frequency_penalty=1.0, presence_penalty=0.5)
    found = edit_rows([(punished, [6, 6], [7, 7])], torch.tensor([zero]))
    assert found[0].tolist() == [0.0] * 7 + [-2.5]


def test_masks_by_row_and_by_line() -> None:
    rows: Rows = [(RowSampling(), [1], [])] * 3
    found = edit_rows(rows, torch.zeros(3, SIZE), {0: packed({1, 7, 9}, 12), 2: [packed({2}, 3)]})
    assert (found == 0).tolist() == [[i in (1, 7) for i in range(SIZE)], [True] * SIZE, [i == 2 for i in range(SIZE)]]


def test_order_is_bias_then_penalties() -> None:
    both = RowSampling(logit_bias={3: 4.0}, repetition_penalty=2.0)
    assert edit_rows([(both, [3], [])], torch.full((1, SIZE), -1.0))[0].tolist() == [-1.0] * 3 + [1.5] + [-1.0] * 4


def test_penalties_next_to_0_leave_no_infinity_and_no_nan() -> None:
    """The largest of several tokens that were raised without bounds is a tie, and what is forbidden stays so."""
    for penalty in (5e-324, 1e-40, 1e-30):
        params = RowSampling(allowed_ids=[0, 1, 2, 3], repetition_penalty=penalty, presence_penalty=2.0)
        logits = torch.tensor([[-5.0, 1e9, 2e9, 0.5] + [1.0] * (SIZE - 4)])
        found = edit_rows([(params, [0, 1, 2, 5], [2])], logits)[0]
        assert not found.isnan().any() and (found[4:] == -math.inf).all() and found[:4].isfinite().all()
        assert found[1] > 1e30 and found[2] > 1e30 and abs(found[0]) < 1e-20 and found[3] == 0.5


def test_seen_tokens_that_are_forbidden_stay_forbidden() -> None:
    params = RowSampling(allowed_ids=[0], repetition_penalty=1.3, presence_penalty=-2.0, frequency_penalty=-2.0)
    found = edit_rows([(params, [2, 3], [3, 4])], torch.randn(1, SIZE))
    assert (found[0, 1:] == -math.inf).all() and found[0, 0].isfinite()
