"""A request's cached tokens are those of its prompt that others had left: samples, beams and preemption add none, and
totals are the sum of what requests are told."""

from __future__ import annotations

import pytest

from tokenmill.core.request import Request, SamplingParams, TokenDelta
from tokenmill.core.sequence import SequenceGroup
from tokenmill.core.step import RowSampling
from tokenmill.engine.running.said import Said
from tokenmill.engine.steps.engine import Engine
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.search import BeamSearch, Sampling
from tokenmill.speculate.none import NoDrafter
from tokenmill.testing.hash_executor import HashExecutor
from tokenmill.testing.hash_model import HashModel

SHARED, OWN, BLOCK = 12, 8, 4


def told(*, n: int = 1, beams: bool = False, rows: int = 4, blocks: int = 60) -> tuple[dict[str, set[int]], Scheduler]:
    """What three requests with one beginning, one soon after the other, hear of cached tokens."""
    model = HashModel(stop_every=1 << 40)
    tables = BlockTables([GroupLayout(0)], [blocks], BLOCK)
    scheduler = Scheduler(Limits(rows, max_step_tokens=8), tables, make_policy("fcfs"), NoDrafter())
    engine = Engine(scheduler, HashExecutor(model, [0], [blocks], BLOCK), None)  # type: ignore[arg-type]
    found: dict[str, set[int]] = {}
    for i in range(3):
        prompt = [1] * SHARED + [2 + i] * OWN
        request = Request(id=f"r{i}", prompt_ids=prompt, params=SamplingParams(n=n), seed=3, arrival=i)
        search = BeamSearch(2, 1.0, False, frozenset({0}), 8) if beams else Sampling()
        sampling = RowSampling(end_ids=[0], num_candidates=search.width)
        scheduler.add(SequenceGroup(request, search, sampling, 30, num_outputs=2 if beams else n))
        for _ in range(3):
            for delta in engine.step():
                found.setdefault(delta.request_id, set()).add(delta.cached)
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, set()).add(delta.cached)
    return found, scheduler


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"n": 3, "rows": 1}, {"beams": True}, {"blocks": 9}], ids=str)
def test_cached_tokens_are_what_others_left(options: dict[str, int]) -> None:
    found, scheduler = told(**options)  # type: ignore[arg-type]
    assert {name: max(values) for name, values in found.items()} == {"r0": 0, "r1": SHARED, "r2": SHARED}
    counters = scheduler.counters
    assert bool(counters.preemptions) == ("blocks" in options)
    assert counters.cached_tokens == 2 * SHARED, "the totals are the sum of what requests are told"
    assert counters.cached_tokens + counters.prompt_tokens == 3 * (SHARED + OWN), "every prompt counts once"
    assert bool(counters.recomputed) == ("n" in options or "blocks" in options)


def test_a_replayed_prompt_counts_once() -> None:
    """What an earlier engine has counted of it is computed again, and not counted."""
    model = HashModel(stop_every=1 << 40)
    tables = BlockTables([GroupLayout(0)], [60], BLOCK)
    scheduler = Scheduler(Limits(4, max_step_tokens=8), tables, make_policy("fcfs"), NoDrafter())
    engine = Engine(scheduler, HashExecutor(model, [0], [60], BLOCK), None)  # type: ignore[arg-type]
    for reached, emitted in ((SHARED, []), (SHARED + OWN, [[7, 7], [7]])):
        request = Request(id="r", prompt_ids=[1] * SHARED + [2] * OWN, params=SamplingParams(n=2), emitted=emitted)
        scheduler.add(SequenceGroup(request, Sampling(), RowSampling(end_ids=[0]), 30, 2, reached=reached))
        while engine.has_work:
            engine.step()
        engine.forget_prefixes()
    assert (scheduler.counters.prompt_tokens, scheduler.counters.cached_tokens) == (OWN, 0)


def test_an_output_that_ended_without_a_word_stays_ended() -> None:
    """Its numbers were not finite, say; then the engine died before the other output had said anything."""
    tables = BlockTables([GroupLayout(0)], [60], BLOCK)
    scheduler = Scheduler(Limits(4, max_step_tokens=8), tables, make_policy("fcfs"), NoDrafter())
    engine = Engine(scheduler, HashExecutor(HashModel(), [0], [60], BLOCK), None)  # type: ignore[arg-type]
    request = Request(id="r", prompt_ids=[1, 2, 3], params=SamplingParams(n=2))
    again = Said(request, None, emitted=[[], []], ended={0}).replayed()
    scheduler.add(SequenceGroup(again, Sampling(), RowSampling(end_ids=[0]), 9, 2))
    found: list[TokenDelta] = []
    while engine.has_work:
        found += engine.step()
    assert {delta.index for delta in found} == {1} and found[-1].finish is not None
