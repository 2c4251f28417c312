"""Guesses of the host take no blocks from other sequences."""

from __future__ import annotations

import pytest

from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import Sequence, SequenceGroup
from tokenmill.core.step import RowSampling
from tokenmill.engine.steps.engine import Engine
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.search import Sampling
from tokenmill.testing.hash_executor import HashExecutor
from tokenmill.testing.hash_model import HashModel


class Wrong:
    """Every guess is wrong."""

    def __init__(self, model: HashModel) -> None:
        self.model = model

    def propose(self, seq: Sequence, most: int) -> list[int]:
        right = self.model.token(self.model.views(seq.tokens), seq.seed)
        return [(right + 1) % self.model.vocab] * most

    def observe(self, seq: Sequence, proposed: int, accepted: int) -> None:
        assert not accepted

    def forget(self, seq: Sequence) -> None:
        pass


def preempted(blocks: int, drafts: int) -> int:
    """How often four sequences of up to ten blocks are preempted if the pool has so many."""
    model = HashModel(stop_every=1 << 40)
    tables = BlockTables([GroupLayout(0)], [blocks], 4, prefix_cache=False)
    limits = Limits(max_rows=8, max_step_tokens=64, max_drafts=drafts, step_guesses=100)
    scheduler = Scheduler(limits, tables, make_policy("fcfs"), Wrong(model))
    engine = Engine(scheduler, HashExecutor(model, [0], [blocks], 4), None)  # type: ignore[arg-type]
    for i in range(4):
        request = Request(id=f"r{i}", prompt_ids=[i + 1] * 9, params=SamplingParams(), seed=i, arrival=i)
        scheduler.add(SequenceGroup(request, Sampling(), RowSampling(), 40))
    while engine.has_work:
        engine.step()
    return scheduler.counters.preemptions


@pytest.mark.parametrize("blocks", [10, 20, 30, 36, 38, 39, 40])
def test_wrong_guesses_preempt_nobody(blocks: int) -> None:
    assert preempted(blocks, 8) == preempted(blocks, 0)
