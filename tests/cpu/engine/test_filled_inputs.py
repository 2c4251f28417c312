"""Where recorded work reads its rows: what could not be written is not taken for written."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.engine.engines import open_llm

from tokenmill.core.step import StepPlan
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.runner import ragged, single
from tokenmill.speculate import choice
from tokenmill.testing.tiny import make_tiny


@pytest.fixture
def runner(tmp_path):
    make_tiny(tmp_path)
    with open_llm(tmp_path, max_num_seqs=3, enforce_eager=True) as llm:
        yield llm.engine.executor.runner


def failing_once(work):
    """It fails the first time, as where memory is short for a moment."""
    left = [MemoryError()]

    def call(*given):
        if left:
            raise left.pop()
        return work(*given)

    return call


def plan(rows, counts):
    return StepPlan(id=0, rows=rows, counts=counts, samples=[True] * len(rows))


def parts(runner):
    return runner.model, ReferenceKernels(), runner.rows, runner.pool


def test_rows_of_one_token(runner, monkeypatch):
    layout, wanted = single.SingleTokens(*parts(runner), exact=False), plan([2, 1], [1, 1])
    key = layout.key(wanted)
    layout.fill(key, None)
    monkeypatch.setattr(single, "send", failing_once(single.send))
    with pytest.raises(MemoryError):
        layout.fill(key, wanted)
    layout.fill(key, wanted)
    assert layout.row_ids[key[0]].tolist()[:2] == [2, 1]


def test_rows_of_several_tokens(runner, monkeypatch):
    layout, wanted = ragged.RaggedTokens(*parts(runner)), plan([2, 1], [1, 2])
    key = layout.key(wanted)
    monkeypatch.setattr(layout, "_fill_members", failing_once(layout._fill_members))
    with pytest.raises(MemoryError):
        layout.fill(key, wanted)
    layout.fill(key, wanted)
    assert layout.members[key[0]][0].tolist() == [[2, 1, runner.rows.spare], [0, 1, 0]]


def test_rows_of_drafters(runner, monkeypatch):
    choosing = choice.Choosing(ReferenceKernels(), runner.rows, exact=False)
    monkeypatch.setattr(choice, "send", failing_once(choice.send))
    with pytest.raises(MemoryError):
        choosing.place([2, 1])
    placed, _ = choosing.place([2, 1])
    assert placed.row_ids.tolist()[:2] == [2, 1] and torch.equal(placed.twice.view(2, -1)[1], placed.row_ids)
