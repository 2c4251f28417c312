"""Pools of runs that Lookahead keeps by row: what is taken is found, and rows with another text forget their own."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.speculate.shapes import Windows
from tokenmill.speculate.windows import RunPool

ROWS = torch.tensor([0, 2])


def behind(pool: RunPool, row: int, token: int) -> list[list[int]]:
    found: Tensor = pool.behind(torch.tensor([row]), torch.tensor([token]))[0]
    return [run for run in found.tolist() if run != [token] * len(run)]


def test_a_row_that_is_gone_forgets_its_runs_and_no_other_row_does() -> None:
    pool = RunPool(3, Windows(window=2, length=3, candidates=2), torch.device("cpu"))
    runs = torch.tensor([[[5, 6, 7], [5, 8, 9]], [[5, 1, 2], [4, 1, 2]]])
    pool.take(ROWS, runs, torch.ones(2, 2, dtype=torch.bool))
    assert behind(pool, 0, 5) == [[8, 9], [6, 7]], "the latest first"
    assert behind(pool, 2, 5) == [[1, 2]]
    pool.forget(ROWS, torch.tensor([True, False]))
    assert behind(pool, 0, 5) == []
    assert behind(pool, 2, 5) == [[1, 2]]
    pool.take(ROWS, runs, torch.tensor([[True, False], [True, True]]))
    assert behind(pool, 0, 5) == [[6, 7]], "what was there before is no reason to leave it out"
    assert behind(pool, 2, 5) == [[1, 2]], "a run stands there once"
