"""The loop. Owns: plans in flight, late inputs, and the order submit -> commit. Everything else is behind a seam.

Must not know: text, HTTP, devices, or any feature by name. One thread owns an Engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from tokenmill.core.constraint import Constraint
from tokenmill.core.errors import EngineDeadError, IdInUseError
from tokenmill.core.execution import Executor, Ticket
from tokenmill.core.experts import Balancer, NoBalance
from tokenmill.core.request import Request, TokenDelta
from tokenmill.core.step import LateInputs, StepPlan
from tokenmill.engine.steps.admission import Admission
from tokenmill.engine.steps.faults import FailedSteps, ends_process
from tokenmill.scheduler.scheduler import Scheduler

Fill = Callable[[Sequence[Constraint]], None]


class Engine:
    """Requests in, token deltas out, one step at a time."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, admission: Admission, fill: Fill = lambda constraints: None
    ) -> None:
        """fill: computes the next masks of many constraints together, so that `mask` only looks them up."""
        self.scheduler = scheduler
        self.executor = executor
        self.admission = admission
        self.fill = fill
        self.balance: Balancer = NoBalance()
        self.flying: deque[tuple[StepPlan, Ticket, float]] = deque()
        """Plans, their tickets, and when they were sent."""
        self.committed = 0.0
        self.failures = FailedSteps()

    @property
    def parts(self) -> list[Engine]:
        """The engines that this object consists of: here only itself (running/replicas.py has several)."""
        return [self]

    @property
    def alive(self) -> Mapping[int, Engine]:
        """Those of them that have not died, by number."""
        return {0: self}

    def add(self, request: Request, pooling: str | None = None) -> None:
        """Accept a request, or raise a UserError that says why not. pooling: how to pool an embedding (None:
        generate)."""
        open_requests = self.scheduler.roster.groups
        if request.id in open_requests:
            raise IdInUseError(request.id)
        self.scheduler.add(self.admission.check(request, 0 if request.again else len(open_requests), pooling))

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> list[TokenDelta]:
        """End a request, or one of its outputs; returns the terminal deltas."""
        return self.scheduler.abort(request_id, index, reason)

    @property
    def has_work(self) -> bool:
        """Is any request open, or any plan in flight?"""
        return self.scheduler.has_work

    def forget_prefixes(self, *, running: bool = False) -> None:
        """Empty the prefix cache. running: requests that run give their blocks back, too, and are computed again."""
        if running:
            self.scheduler.roster.preempt_all()
        self.scheduler.tables.cache.clear()

    def step(self) -> list[TokenDelta]:
        """Keep up to `depth` plans in flight; commit the oldest."""
        if self.submit() and len(self.flying) < self.executor.depth:
            return []
        return self.commit() if self.flying else []

    def begin(self, tokens: int) -> None:
        """Prompts of so many tokens have been added, and more are to come: if they fill a plan, and the device can be
        at work meanwhile, it need not wait for the others. (A batch that nobody may join waits for all.)"""
        ahead, limits = len(self.flying), self.scheduler.limits
        fills = tokens >= (ahead + 1) * limits.max_step_tokens
        if fills and ahead < self.executor.depth > 1 and not limits.older.closed_batches:
            self.submit()

    def submit(self) -> bool:
        """Make one more plan and send it to the executor; False: there is none to send now."""
        if not self.balance.between(self.scheduler.counters.steps, self.scheduler.epoch, flying=bool(self.flying)):
            return False
        plan = self.scheduler.plan()  # integers only
        if plan is None:
            return False
        self.flying.append((plan, self.executor.submit(plan), perf_counter()))
        if len(self.flying) == 1:
            self._supply()
        return True

    def commit(self) -> list[TokenDelta]:
        """Wait for the oldest plan and commit its result."""
        result = self.flying[0][1].wait()  # an interrupted wait leaves the plan in flight
        plan, _, sent = self.flying.popleft()
        if result.failure is not None and ends_process(result.failure):
            raise EngineDeadError(f"the device is broken: {result.failure}")
        before, self.committed = self.committed, perf_counter()
        self.scheduler.ahead.committed(plan, self.committed)
        if result.failure is None:
            self.scheduler.pace.took(plan, self.committed - max(sent, before))
        failed = self.scheduler.counters.failures
        deltas = self.scheduler.commit(result)
        self.scheduler.ahead.credit(plan, deltas)
        if self.scheduler.counters.failures > failed:
            self.failures.tell(result.failure or "")
        self._supply()
        return deltas

    def _supply(self) -> None:
        """Send the oldest plan's masks and processors: everything that they depend on is committed now."""
        if self.flying and self.flying[0][0].late:
            plan = self.flying[0][0]
            self.executor.supply(plan.id, self._late_inputs(plan))

    def _late_inputs(self, plan: StepPlan) -> LateInputs:
        inputs = LateInputs()
        wanted = set(plan.late)
        seqs = self.scheduler.flying[0].seqs
        self.fill([seq.constraint for seq in seqs if seq.constraint is not None and seq.row in wanted])
        for i, seq in enumerate(seqs):
            if seq.row not in wanted:
                continue
            constraint = seq.constraint
            if constraint is not None:
                drafts = plan.drafts.get(i)
                masks = _line_masks(constraint, drafts) if drafts else constraint.mask()
                if masks:
                    inputs.masks[seq.row] = masks
            processors = seq.group.request.params.logits_processors
            if processors:
                inputs.processors[seq.row] = processors
                self.scheduler.counters.processed += 1
        return inputs

    def ask_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a control message to every rank."""
        return self.executor.control_all(message)

    def close(self) -> None:
        """Stop the executor and the grammar helper; requests that are still open get no further delta."""
        if self.admission.compiler is not None:
            self.admission.compiler.close()
        self.executor.close()


def _line_masks(constraint: Constraint, drafts: list[int]) -> bytes:
    """The masks of all lines that one grant samples, joined: one before each draft and one after the last."""
    masks = [constraint.mask()]
    trial = constraint.fork()
    for token in drafts:
        trial.accept([token])
        masks.append(trial.mask())
    size = max((len(m) for m in masks if m is not None), default=0)
    return b"".join(b"\xff" * size if m is None else m for m in masks)
