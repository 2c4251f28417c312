"""Sequences that wait cost a plan next to nothing, however many they are and however much of them is cached."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import SequenceGroup
from tokenmill.core.step import RowSampling
from tokenmill.engine.steps.engine import Engine
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.kvcache.snapshots import Snapshots
from tokenmill.scheduler import scheduler as module
from tokenmill.scheduler.adapters import AdapterSlots
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.search import Sampling
from tokenmill.speculate.none import NoDrafter
from tokenmill.testing.hash_executor import HashExecutor
from tokenmill.testing.hash_model import HashModel

BLOCK = 4


class Counted:
    """A scheduler over the hash model; `walks`: lengths of the prefixes that were looked up."""

    def __init__(self, limits: Limits, blocks: int, *, states: bool = False) -> None:
        model = HashModel(stop_every=1 << 40, stateful=states)
        self.tables = BlockTables([GroupLayout(0)], [blocks], BLOCK, snapshots=Snapshots(20, BLOCK) if states else None)
        self.scheduler = Scheduler(limits, self.tables, make_policy("fcfs"), NoDrafter())
        self.engine = Engine(self.scheduler, HashExecutor(model, [0], [blocks], BLOCK), None)  # type: ignore[arg-type]
        self.walks: list[int] = []
        self.ended: list[str] = []
        walk = self.tables.cache.walk

        def counted(start: Any, keys: list[int], *rest: Any) -> Any:
            self.walks.append(len(keys))
            return walk(start, keys, *rest)

        self.tables.cache.walk = counted  # type: ignore[method-assign]

    def add(self, name: int, prompt: list[int], new: int, adapter: int = 0) -> None:
        request = Request(
            id=f"r{name}", prompt_ids=prompt, params=SamplingParams(), seed=name, arrival=name, adapter=adapter
        )
        self.scheduler.add(SequenceGroup(request, Sampling(), RowSampling(), len(prompt) + new))

    def step(self) -> int:
        """-> how many prefixes the step looked up."""
        self.walks.clear()
        self.ended += [delta.request_id for delta in self.engine.step() if delta.finish is not None]
        return len(self.walks)


def test_a_full_cache_is_not_looked_through_until_blocks_come_back() -> None:
    made = Counted(Limits(8, max_step_tokens=200), blocks=30)
    cached = list(range(1, 85))
    made.add(0, cached, 1)
    while made.engine.has_work:
        made.step()
    made.add(1, [7] * 35, 24)  # leaves no room for what comes next, although that is cached
    made.step()
    made.add(2, [*cached, 9], 4)
    assert made.step() == 1, "it is looked up once"
    while "r1" not in made.ended:
        assert made.step() == 0 and not [seq for seq in made.scheduler.roster.running if seq.group.request.id == "r2"]
    while made.engine.has_work:
        made.step()
    assert made.ended == ["r0", "r1", "r2"] and made.scheduler.counters.preemptions == 0


def test_while_no_row_is_free_nobody_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    has_room = AdapterSlots.has_room
    monkeypatch.setattr(
        AdapterSlots, "has_room", lambda self, n, *, begun: asked.append(n) or has_room(self, n, begun=begun)
    )
    made = Counted(Limits(2, max_step_tokens=64, max_adapters=1), blocks=400, states=True)
    for name in range(60):
        made.add(name, [5] * 30 + [name + 1] * 6, 8, adapter=0 if name < 2 else 1 + name % 2)
    made.step()
    while not made.ended:
        asked.clear()
        assert made.step() <= 2 and not asked
    while made.engine.has_work:
        asked.clear()
        made.step()
        assert len(asked) <= 2 + 4, "an adapter that has no slot is asked for once a plan, not by everybody"
    assert sorted(made.ended) == sorted(f"r{name}" for name in range(60))


def test_those_who_wait_for_a_state_are_looked_up_once_and_not_all_in_one_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOKED", 300)
    made = Counted(Limits(64, max_step_tokens=16), blocks=4000, states=True)
    for name in range(50):
        made.add(name, [5] * 90 + [name + 1] * 9, 3)
    most = 0
    for _ in range(8):
        most = max(most, made.step())
    assert len(made.scheduler.roster.waiting) > 40 and most <= 2 + 300 // 99 + 2
    assert made.step() <= 2 + 300 // 99, "who has been looked up waits"
    while made.engine.has_work:
        made.step()
    assert sorted(made.ended) == sorted(f"r{name}" for name in range(50))


def test_who_gives_up_waiting_is_forgotten() -> None:
    made = Counted(Limits(1, max_step_tokens=64), blocks=400)
    made.add(0, [5] * 9, 300)
    made.add(1, [6] * 9, 2)
    for name in range(2, 500):
        made.add(name, [7] * 9, 2)
        ended = made.scheduler.abort(f"r{name}")
        assert [delta.finish for delta in ended] == ["abort"]
        made.step()
        assert len(made.scheduler.roster.waiting) <= 70
    while made.engine.has_work:
        made.step()
    assert made.ended == ["r0", "r1"]
