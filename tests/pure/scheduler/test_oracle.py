"""The hash oracle: random schedules give the right text every time, and seeded bugs are caught."""

from __future__ import annotations

import pytest

from tests.pure.scheduler.oracle import run_story
from tokenmill.core.sequence import Sequence
from tokenmill.core.step import StepResult
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.testing.hash_executor import HashExecutor

STORIES = 2500  # bench/oracle.py runs tens of thousands


@pytest.mark.parametrize("part", range(5))
def test_random_schedules(part: int) -> None:
    size = STORIES // 5
    for seed in range(part * size, (part + 1) * size):
        run_story(seed)


def caught(sabotage, seeds: range = range(400)) -> int:
    """In how many stories a seeded bug was noticed."""
    found = 0
    for seed in seeds:
        try:
            run_story(seed, sabotage=sabotage, failures=False)
        except (AssertionError, IndexError, KeyError):
            found += 1
    return found


def test_stale_block_is_caught() -> None:
    def sabotage(scheduler: Scheduler) -> None:
        def forgetful(block: int) -> None:  # evicts a block, but the tree goes on naming it
            for pool in scheduler.tables.pools:
                if block in pool.idle:
                    del pool.idle[block], pool.cached[block]
                    pool.stack.append(block)

        for pool in scheduler.tables.pools:
            pool.on_evict = forgetful

    assert caught(sabotage) > 5


def test_over_registered_prefix_is_caught() -> None:
    def sabotage(scheduler: Scheduler) -> None:
        honest = scheduler.tables.publish

        def eager(seq: Sequence, upto: int) -> list[object]:
            most = min(len(seq.tokens), seq.capacity)
            return honest(seq, min(most, upto + scheduler.tables.block_size))

        scheduler.tables.publish = eager  # type: ignore[method-assign]

    assert caught(sabotage) > 5


def test_unchecked_draft_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = HashExecutor._sample

    def gullible(self, row, drafts, count, sample, i, result: StepResult):  # type: ignore[no-untyped-def]
        if not drafts:
            return honest(self, row, drafts, count, sample, i, result)
        row.tokens += drafts
        row.computed = len(row.tokens)
        more = honest(self, row, [], 0, True, i, result)
        return drafts + more

    monkeypatch.setattr(HashExecutor, "_sample", gullible)
    assert caught(lambda scheduler: None) > 5


def test_missing_copy_on_write_is_caught() -> None:
    def sabotage(scheduler: Scheduler) -> None:
        scheduler.tables._copy_on_write = lambda *args: None  # type: ignore[method-assign]

    assert caught(sabotage) > 5
