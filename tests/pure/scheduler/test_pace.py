"""A long prompt delays the tokens of others by no more than a bounded step."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import Sequence, SequenceGroup
from tokenmill.core.step import RowSampling, StepPlan, StepResult
from tokenmill.engine.steps import engine as module
from tokenmill.engine.steps.engine import Engine
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.scheduler.pace import ANY, LEAST, STALL_S, Pace
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits, derive_seed
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.search import Sampling
from tokenmill.speculate.none import NoDrafter
from tokenmill.testing.hash_executor import HashExecutor, HashTicket
from tokenmill.testing.hash_model import HashModel

BLOCK, STEP = 16, 2048


@dataclass
class Timed:
    """What a device's step gave, and when it was ready."""

    inner: HashTicket
    machine: Machine
    ready: float

    def wait(self) -> StepResult:
        self.machine.now = max(self.machine.now, self.ready)
        return self.inner.wait()


class SlowExecutor(HashExecutor):
    """Steps take `start` seconds and `each` for a token, by the machine's clock, one after the other."""

    def tell(self, machine: Machine, each: float, start: float) -> None:
        self.machine, self.each, self.start, self.ready = machine, each, start, 0.0

    def submit(self, plan: StepPlan) -> Timed:  # type: ignore[override]
        machine = self.machine
        names = [seq.group.request.id for seq in machine.scheduler.flying[-1].seqs]
        machine.plans.append(dict(zip(names, plan.counts, strict=True)))
        self.ready = max(machine.now, self.ready) + self.start + self.each * plan.num_tokens
        return Timed(super().submit(plan), machine, self.ready)


class Machine:
    """An engine over the hash model with a clock of its own. `plans`: names and counts of the grants of all steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each: float, start: float = 0.0, depth: int = 1) -> None:
        self.model, self.now = HashModel(stop_every=1 << 40), 0.0
        device = SlowExecutor(self.model, [0], [4000], BLOCK, depth)
        device.tell(self, each, start)
        self.scheduler = Scheduler(
            Limits(16, STEP), BlockTables([GroupLayout(0)], [4000], BLOCK), make_policy("fcfs"), NoDrafter()
        )
        self.scheduler.pace = Pace(STALL_S)
        self.engine = Engine(self.scheduler, device, None)  # type: ignore[arg-type]
        self.plans: list[dict[str, int]] = []
        self.texts: dict[str, list[int]] = {}
        self.wanted: dict[str, list[int]] = {}
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def add(self, name: str, length: int, new: int) -> None:
        prompt = [1 + random.Random(name).randrange(1000)] + [7] * (length - 1)
        request = Request(id=name, prompt_ids=prompt, params=SamplingParams(), seed=3)
        self.wanted[name] = self.model.generate(prompt, derive_seed(3, 0), new)
        self.scheduler.add(SequenceGroup(request, Sampling(), RowSampling(), length + new))

    def step(self) -> None:
        for delta in self.engine.step():
            self.texts.setdefault(delta.request_id, []).extend(delta.tokens)

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("each", "start"), [(1 / 500, 0.0), (1 / 500, 0.1), (1 / 20, 0.0), (1e-6, 0.0)])
def test_who_decodes_gets_a_token_in_each_step_and_steps_are_short(
    monkeypatch: pytest.MonkeyPatch, each: float, start: float, depth: int
) -> None:
    made = Machine(monkeypatch, each, start, depth)
    for number in range(3):
        made.add(f"short{number}", 5, 400)
    for _ in range(6):
        made.step()
    made.add("long", 8000, 4)
    made.add("next", 3000, 4)
    made.run()
    assert made.texts == made.wanted
    beside = [plan for plan in made.plans if "short0" in plan and not {"long", "next"}.isdisjoint(plan)]
    assert len(beside) > 4 and all({"short0", "short1", "short2"} <= plan.keys() for plan in beside)
    pieces = [count for plan in beside for name, count in plan.items() if name == "long" and count > 1]
    room = max(LEAST, (STALL_S - start) / each)
    assert pieces[0] == LEAST and max(pieces) <= min(STEP, 1.3 * room), pieces  # the first one tells how long they take
    assert all(piece >= min(STEP, 0.7 * room) - BLOCK for piece in pieces[8:-1]), pieces


def test_who_computes_alone_has_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Machine(monkeypatch, 1 / 500)
    made.add("long", 8000, 4)
    made.add("next", 2000, 4)
    made.run()
    assert made.texts == made.wanted
    assert list(itertools.takewhile(lambda plan: plan.keys() == {"long"}, made.plans)) == [{"long": STEP}] * 3


def test_one_slow_step_is_no_measure() -> None:
    pace, row = Pace(STALL_S), SequenceGroup(Request(id="a", prompt_ids=[1], params=SamplingParams(), seed=0),
                                             Sampling(), RowSampling(), 9)  # fmt: skip
    waiting = [Sequence(0, 0, row, [1, 2], 1, computed=1)]
    assert pace.room([]) == ANY and pace.room(waiting) == LEAST  # nothing is known yet
    piece = StepPlan(id=0, epoch=0, rows=[0, 1], counts=[1, 1000])
    pace.took(piece, 1.0)
    pace.took(StepPlan(id=1, epoch=0, rows=[0, 1], counts=[1, 1]), 9.0)  # no prompt
    pace.took(StepPlan(id=2, epoch=0, rows=[0, 1], counts=[1, 40], guesses={1: 39}), 9.0)  # only guesses
    pace.took(piece, 60.0)
    assert pace.room(waiting) == 500 and pace.room([]) == ANY
    for _ in range(4):
        pace.took(piece, 2.0)
    assert pace.room(waiting) == 250 and Pace().room(waiting) == ANY
