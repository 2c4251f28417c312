"""Engines that a caller steps together: if some die, the others continue their requests as if nothing had happened."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.core.errors import EngineDeadError, IdInUseError, UserError
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import SequenceGroup
from tokenmill.core.step import RowSampling, StepPlan
from tokenmill.engine.running.replicas import Replicas
from tokenmill.engine.running.successors import Successors
from tokenmill.engine.steps.engine import Engine
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.kvcache.cache_events import CacheEvents
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.search import Sampling
from tokenmill.speculate.none import NoDrafter
from tokenmill.testing.hash_executor import HashExecutor
from tokenmill.testing.hash_model import HashModel

POISON, MODEL = 99, HashModel(stop_every=1 << 40)


class Mortal(HashExecutor):
    """An executor whose process may die: at once (`dying`), or by a prompt that begins with POISON."""

    dying = closed = False
    files: list[int]

    def submit(self, plan: StepPlan) -> Any:
        if self.dying or any(start.tokens[0] == POISON for start in plan.starts):
            raise EngineDeadError("gone")
        ticket = super().submit(plan)

        def wait() -> Any:
            if self.dying:
                raise EngineDeadError("gone")
            return ticket.wait()

        return SimpleNamespace(wait=wait, ready=lambda: True)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def readable() -> Iterator[int]:
    ours, theirs = os.pipe()
    os.write(theirs, b"x")
    yield ours
    os.close(ours)
    os.close(theirs)


def admitted(request: Request, num_open: int, pooling: str | None) -> SequenceGroup:
    assert num_open == 0 or not request.again, "a replayed request is not counted among those that wait"
    sampling = RowSampling(end_ids=[0])
    length, n = len(request.prompt_ids) + (request.params.max_tokens or 0), request.params.n
    return SequenceGroup(request, Sampling(), sampling, length, n, reached=request.reached)


def engine_of(file: int) -> Engine:
    tables = BlockTables([GroupLayout(0)], [80], 4)
    tables.cache.listener = CacheEvents()
    scheduler = Scheduler(Limits(4, max_step_tokens=8), tables, make_policy("fcfs"), NoDrafter())
    executor = Mortal(MODEL, [0], [80], 4)
    executor.files = [file]
    return Engine(scheduler, executor, SimpleNamespace(check=admitted, compiler=None))  # type: ignore[arg-type]


def replicas(count: int, file: int, successors: Successors | None = None) -> Replicas:
    made = Replicas([engine_of(file) for _ in range(count)], 4, successors)
    made.news = SimpleNamespace(register=lambda file, mask: None, unregister=lambda file: None, poll=lambda wait: [])  # type: ignore[assignment]
    return made


def requests(poison: int = -1) -> list[Request]:
    said = [
        Request(id=str(i), prompt_ids=[5 + i % 3] * 9 + [i], params=SamplingParams(n=1 + i % 2, max_tokens=12), seed=i)
        for i in range(12)
    ]
    for request in said[poison : poison + 1] if poison >= 0 else ():
        request.prompt_ids[0] = POISON
    return said


def answers(engine: Replicas, asked: list[Request], deaths: dict[int, int]) -> dict[tuple[str, int], tuple[Any, ...]]:
    """What each output says and how it ends; deaths: by step, the engine that dies there."""
    found: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], str] = {}
    for request in asked:
        engine.add(request)
    step = 0
    while engine.has_work:
        if step in deaths:
            engine.parts[deaths[step]].executor.dying = True  # type: ignore[attr-defined]
        for delta in engine.step():
            place = delta.request_id, delta.index
            found.setdefault(place, []).extend(delta.tokens)
            if delta.finish is not None:
                assert place not in ends, "it ends once"
                ends[place] = delta.finish
        step += 1
    assert ends.keys() == found.keys() and not engine.open and not engine.waiting
    return {place: (found[place], ends[place]) for place in found}


@pytest.mark.parametrize("seed", range(6))
def test_others_continue_what_dead_engines_worked_on(readable: int, seed: int) -> None:
    calm = answers(replicas(3, readable), requests(), {})
    dice = random.Random(seed)
    engine = replicas(3, readable)
    deaths = dict(zip(sorted(dice.sample(range(30), 2)), dice.sample(range(3), 2), strict=True))
    assert answers(engine, requests(), deaths) == calm
    assert len(engine.alive) == 1 and [part.executor.closed for part in engine.parts].count(True) == 2  # type: ignore[attr-defined]
    counted = [part.scheduler.counters for part in engine.parts]
    told = sum(each.prompt_tokens + each.cached_tokens for each in counted)
    assert told == sum(len(request.prompt_ids) for request in requests()), "every prompt counts once"
    assert answers(engine, requests(), {}) == calm, "the one that is left answers what comes later"


@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_kills_engines_is_given_up_and_the_others_answered(again: bool, readable: int) -> None:
    calm = answers(replicas(4, readable), requests(), {})
    successors = Successors(lambda number: SimpleNamespace(engine=engine_of(readable)))  # type: ignore[arg-type, return-value]
    engine = replicas(1, readable, successors) if again else replicas(4, readable)
    found = answers(engine, requests(poison=5), {})
    assert len(successors.deaths.times) == 3 if again else len(engine.alive) == 1
    assert [found[place] for place in found if place[0] == "5"] == [([], "error")] * 2
    assert {p: found[p] for p in found if p[0] != "5"} == {p: calm[p] for p in calm if p[0] != "5"}


@pytest.mark.parametrize("seed", range(6))
def test_engines_come_in_the_place_of_dead_ones(readable: int, seed: int) -> None:
    """Also if none is left meanwhile, and after loads that fail."""
    calm, dice, failed = answers(replicas(2, readable), requests(), {}), random.Random(seed), list[int]()

    def make(number: int) -> Any:
        if dice.random() < 0.3:
            failed.append(number)
            raise UserError("no memory")
        return SimpleNamespace(engine=engine_of(readable))

    successors = Successors(make)
    engine = replicas(2, readable, successors)
    deaths = dict(zip(sorted(dice.sample(range(12), 2)), dice.choices(range(2), k=2), strict=True))
    assert answers(engine, requests(), deaths) == calm
    for part in list(engine.alive.values()):
        part.executor.dying = True  # type: ignore[attr-defined]
    assert answers(engine, requests(), {}) == calm
    successors.close()
    assert not successors.coming and engine.admission is engine.parts[0].admission


def test_who_asks_while_no_engine_is_there_waits(readable: int) -> None:
    may = threading.Event()

    def make(number: int) -> Any:
        may.wait()
        return SimpleNamespace(engine=engine_of(readable))

    engine = replicas(1, readable, Successors(make))
    engine.parts[0].executor.dying = True  # type: ignore[attr-defined]
    first, second, third = requests()[:3]
    engine.add(first)
    assert engine.step() == [] and not engine.alive and engine.has_work
    engine.add(second)
    with pytest.raises(IdInUseError):
        engine.add(first)
    engine.add(third)
    assert [delta.finish for delta in engine.abort(third.id)] == ["abort"] and engine.step() == []
    may.set()
    found = answers(engine, [], {})
    assert {name for name, _ in found} == {first.id, second.id} and {end for _, end in found.values()} == {"length"}


def test_too_many_deaths_are_the_end(readable: int) -> None:
    engine = replicas(1, readable, Successors(lambda number: SimpleNamespace(engine=engine_of(readable))))  # type: ignore[arg-type, return-value]
    for number in range(6):
        name = Request(id=str(number), prompt_ids=[5], params=SamplingParams(max_tokens=2), seed=1)
        assert len(answers(engine, [name], {0: 0} if number < 5 else {})) == 1
    engine.parts[0].executor.dying = True  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match=r"gone.*died 6 times within a minute; giving up"):
        answers(engine, requests(), {})


def test_none_is_loaded_while_the_others_sleep() -> None:
    """Not even one whose load had begun."""
    may, made = threading.Event(), list[Any]()

    def make(number: int) -> Any:
        may.wait()
        made.append(SimpleNamespace(closed=False))
        made[-1].close = lambda one=made[-1]: setattr(one, "closed", True)
        return SimpleNamespace(engine=made[-1])

    successors = Successors(make)
    successors.lost(1)
    successors.rest()
    assert successors.missing == {1} and not successors.expected
    may.set()
    while not made or not made[0].closed:
        time.sleep(0.001)
    successors.lost(0)
    assert successors.missing == {0, 1} and not successors.take()
    successors.rise()
    while len(successors.made) < 2:
        time.sleep(0.001)
    assert {number for number, _ in successors.take()} == {0, 1}


def test_engines_that_die_asleep_come_when_they_are_woken(readable: int) -> None:
    engine = replicas(2, readable, Successors(lambda number: SimpleNamespace(engine=engine_of(readable))))  # type: ignore[arg-type, return-value]

    def told(message: dict[str, Any]) -> list[dict[str, Any]]:
        if message["what"] == "wake":
            raise EngineDeadError("gone")
        return [{"asleep": ["weights"]}]

    for part in engine.parts:
        part.executor.control_all = told  # type: ignore[method-assign]
    assert len(engine.ask_all({"what": "sleep"})) == 2
    assert engine.ask_all({"what": "wake"}) == [] and not engine.alive
    assert len(answers(engine, requests()[:1], {})) == 1


def test_without_any_engine_callers_are_told(readable: int) -> None:
    engine = replicas(2, readable)
    with pytest.raises(EngineDeadError, match="gone"):
        answers(engine, requests(), {2: 0, 4: 1})
    for again in (engine.step, lambda: engine.add(requests()[0])):
        with pytest.raises(EngineDeadError, match="gone"):
            again()
    for name in list(engine.open):
        engine.abort(name)
    assert not engine.has_work and not engine.open


def test_what_waits_to_go_on_alone_can_be_aborted(readable: int) -> None:
    engine = replicas(3, readable)
    for request in requests():
        request.params = SamplingParams(n=2, max_tokens=12)
        engine.add(request)
    for number in (0, 1):
        engine.step()
        engine.parts[number].executor.dying = True  # type: ignore[attr-defined]
    while len(engine.alive) > 1:
        engine.step()
    entry = engine.waiting[-1]
    assert [(d.index, d.finish) for d in engine.abort(entry.request.id, 1, "stop")] == [(1, "stop")]
    assert [(d.index, d.finish) for d in engine.abort(entry.request.id)] == [(0, "abort")]
    assert entry not in engine.waiting and entry.request.id not in engine.open
