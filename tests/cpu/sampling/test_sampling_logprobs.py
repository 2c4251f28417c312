"""Prompt logprobs."""

from __future__ import annotations

import math

import pytest
import torch

from tokenmill.sampling.logprobs import token_logprobs


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
