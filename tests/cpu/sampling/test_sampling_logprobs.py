"""Prompt logprobs, and acceptance of drafts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.sampling.logprobs import token_logprobs
from tokenmill.sampling.verify import accept


@pytest.mark.parametrize("size", [5, 1000, 32003])
@pytest.mark.parametrize("k", [0, 1, 20])
def test_token_logprobs(size: int, k: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(6, size, generator=generator) * 4).bfloat16().float()
    targets = torch.randint(0, size, (6,), generator=generator)
    rows = token_logprobs(logits, targets, k)
    exact = torch.log_softmax(logits.double(), -1)
    for i, row in enumerate(rows):
        line = logits[i].tolist()
        order = sorted(range(size), key=lambda t, line=line: (-line[t], t))
        assert row.ids == [int(targets[i]), *order[:k]]
        assert row.rank == order.index(int(targets[i])) + 1
        assert row.logprobs == pytest.approx(exact[i, row.ids].tolist(), abs=2e-5)
        assert token_logprobs(logits[i : i + 1], targets[i : i + 1], k) == [row]


def test_token_logprobs_of_nothing_and_of_forbidden_tokens() -> None:
    assert token_logprobs(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), 3) == []
    (row,) = token_logprobs(torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([1]), 2)
    assert row.ids == [1, 0, 2] and row.rank == 3 and row.logprobs[0] == -math.inf
    assert row.logprobs[1:] == pytest.approx([-math.log(2)] * 2)


def test_accept_cuts_at_the_first_difference() -> None:
    assert accept([[7], [1, 2, 3], [1, 2, 3], [9, 2, 3]], [[], [1, 2], [1, 5], [1, 2]]) == [[7], [1, 2, 3], [1, 2], [9]]
    assert accept([], []) == []


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.data())
def test_accepted_tokens_are_those_of_plain_decoding(truth: list[int], data: st.DataObject) -> None:
    drafts = data.draw(st.lists(st.integers(0, 2), min_size=len(truth) - 1, max_size=len(truth) - 1))
    (kept,) = accept([truth], [drafts])
    assert kept == truth[: len(kept)] and len(kept) >= 1
    assert drafts[: len(kept) - 1] == truth[: len(kept) - 1]
    assert len(kept) == len(truth) or drafts[len(kept) - 1] != truth[len(kept) - 1]


def test_accept_refuses_lists_that_do_not_fit() -> None:
    with pytest.raises(AssertionError):
        accept([[1, 2]], [[]])
