"""Predicting a workload. Owns: an executor whose steps take roofline time on a clock of its own.

Scheduler, block tables and prefix cache are the real ones, so chunking, preemption and shared prefixes count as in a
real run. Must not know: tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.core.step import LateInputs, StepPlan, StepResult
from tokenmill.engine.load import loading
from tokenmill.engine.running.build import make_limits
from tokenmill.engine.steps.admission import Admission
from tokenmill.engine.steps.engine import Engine
from tokenmill.engine.steps.text import load_tokenizer
from tokenmill.kvcache.allocation import BlockTables
from tokenmill.measure.calibration import Speeds
from tokenmill.measure.closed_loop import closed_loop
from tokenmill.measure.devices import speeds
from tokenmill.measure.plan import Planner, Setup, layouts, speed_type
from tokenmill.measure.plan_recorder import SharedPrefixes, grants_of
from tokenmill.measure.roofline import step_cost
from tokenmill.measure.step_time import step_time
from tokenmill.measure.workloads import Job, Workload
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.speculate.none import NoDrafter

_TOKEN = 1


@dataclass(slots=True)
class ClockTicket:
    """A plan whose time is known."""

    result: StepResult

    def wait(self) -> StepResult:
        """Return at once."""
        return self.result


@dataclass(slots=True)
class ClockExecutor:
    """Computes nothing. Each plan advances `now` by its least time."""

    planner: Planner
    reach: Speeds
    num_blocks: list[int]
    depth: int = 1
    overlaps: bool = True
    now: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)
    prefixes: SharedPrefixes = field(default_factory=SharedPrefixes)

    def submit(self, plan: StepPlan) -> ClockTicket:
        """Time the plan. Every row that samples gets the same token."""
        (grants,) = grants_of([plan], self.lengths)
        planner = self.planner
        shared = self.prefixes.positions(plan, planner.config.cache.block_size) if planner.kind == "gpu" else 0
        cost = step_cost(planner.sheet, grants, planner.kv_format, shared)
        self.now += step_time(cost, self.reach).seconds
        return ClockTicket(StepResult(plan_id=plan.id, tokens=[[_TOKEN] if s else [] for s in plan.samples]))

    def supply(self, plan_id: int, inputs: LateInputs) -> None:
        """Nothing is sampled."""

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Nothing to control."""
        return {}

    def control_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Nothing to control."""
        return [{}]

    def progress(self) -> int:
        """Nothing watches this clock."""
        return 0

    def check(self) -> None:
        """Nothing can be lost."""

    def close(self) -> None:
        """Nothing to close."""


def simulate(planner: Planner, setup: Setup, workload: Workload) -> dict[str, Any]:
    """What `bench throughput` should report about this workload. All requests arrive at 0."""
    config = planner.config
    tokenizer = load_tokenizer(config, loading.find_model(config)) if workload.has_text else None
    jobs = workload.jobs(None if tokenizer is None else tokenizer.encode, planner.sheet.spec.vocab_size)
    found = predict(planner, setup, jobs)
    kept = {name: value for name, value in found.items() if name not in ("samples", "each")}
    return {"workload": workload.name, **kept}


def predict(planner: Planner, setup: Setup, jobs: list[Job], users: int = 0) -> dict[str, Any]:
    """What `closed_loop` should report about these jobs (users 0: all ask at once)."""
    config, spec = planner.config, planner.sheet.spec
    memory = layouts(planner, setup.device)
    if not all(memory.blocks):
        raise ParameterError(f"{config.model.model} does not fit on {setup.device.title}: nothing can be simulated.")
    tables = BlockTables(
        list(memory.cache.groups),
        memory.blocks,
        config.cache.block_size,
        prefix_cache=config.cache.enable_prefix_caching,
        step_tokens=planner.step_tokens,
    )
    limits = make_limits(config.schedule, planner.step_tokens)
    scheduler = Scheduler(limits, tables, make_policy(config.schedule.scheduling_policy), NoDrafter())
    longest = min(memory.wanted, tables.max_length())
    admission = Admission(spec.vocab_size, longest, config.schedule.max_num_seqs, config.schedule.max_waiting)
    reach = speeds(setup.device, speed_type(planner, setup.device), setup.efficiency)
    executor = ClockExecutor(planner, reach, memory.blocks)
    engine = Engine(scheduler, executor, admission)
    return {
        **closed_loop(engine, lambda: executor.now, jobs, users or len(jobs)),
        "steps": scheduler.counters.steps,
        "cached_tokens": scheduler.counters.cached_tokens,
        "preemptions": scheduler.counters.preemptions,
    }
