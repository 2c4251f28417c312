"""Executors in this process. Owns: running plans through a Runner now, behind the Executor seam.

While a runner computes, its device is the current one of the calling thread: an application's own thread or the
engine's. Other engines of this process may have other devices.
On a CPU a plan runs when it is waited for (a second one in flight would only delay tokens). On a GPU `submit` enqueues
it and `wait` reads its results, so the host plans while the device computes. Must not know: scheduling, text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenmill.core.sleeping import obey
from tokenmill.core.step import LateInputs, StepPlan, StepResult
from tokenmill.runner.runner import Runner, Running


@dataclass(slots=True)
class InProcessTicket:
    """A plan that has begun or waits to begin."""

    executor: InProcessExecutor
    plan: StepPlan
    running: Running | None = None
    late: LateInputs | None = None

    def ready(self) -> bool:
        """Would `wait` return at once? If plans run only when they are waited for, the answer is yes."""
        return self.running is None or self.executor.runner.ready(self.running)

    def wait(self) -> StepResult:
        with self.executor.here(), torch.inference_mode():
            return self._result()

    def _result(self) -> StepResult:
        executor, runner = self.executor, self.executor.runner
        if executor.interruption is not None:
            error, executor.interruption = executor.interruption, None
            raise error
        if executor.lazy and self.running is None:
            self.running = runner.begin(self.plan)
            runner.sample(self.running, self.late)
        executor.catch_up(self)
        assert self.running is not None, "what a plan waits for is supplied before its result is asked for"
        executor.tickets.pop(self.plan.id, None)
        return runner.finish(self.running)


@dataclass(slots=True)
class InProcessExecutor:
    """`lazy`: run plans in `wait` (CPU); otherwise enqueue them in `submit` (GPU). A plan's tokens feed the next plan.
    So if a plan's late inputs are missing, the plans behind it are `held` back until these have come."""

    runner: Runner
    num_blocks: list[int]
    depth: int = 1
    overlaps: bool = True
    lazy: bool = True
    tickets: dict[int, InProcessTicket] = field(default_factory=dict)
    held: deque[InProcessTicket] = field(default_factory=deque)
    interruption: BaseException | None = None
    here: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context in which the runner's device is the current one."""

    def submit(self, plan: StepPlan) -> InProcessTicket:
        ticket = InProcessTicket(self, plan)
        self.tickets[plan.id] = ticket
        if not self.lazy:
            self.held.append(ticket)
            try:
                with self.here():
                    self._enqueue()
            except BaseException as error:
                self.interruption = error  # raised by the next wait: a plan without a ticket would never be committed
        return ticket

    def supply(self, plan_id: int, inputs: LateInputs) -> None:
        self.tickets[plan_id].late = inputs
        with self.here():
            self._enqueue()

    def _enqueue(self) -> None:
        """Enqueue everything that can run now: forward passes in order, each plan's sampling before the next forward
        pass."""
        while self.held:
            ticket = self.held[0]
            if ticket.running is None:
                ticket.running = self.runner.begin(ticket.plan)
            if ticket.plan.late and ticket.late is None:
                return
            self.runner.sample(ticket.running, ticket.late)
            self.held.popleft()

    def catch_up(self, ticket: InProcessTicket) -> None:
        """Continue after an interruption. Late inputs of this plan that have not come by now never will."""
        self._enqueue()
        if self.held and self.held[0] is ticket:
            self.held.popleft()

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        with self.here():
            return answer(self.runner, message)

    def control_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer of the only runner."""
        return [self.control(message)]

    def progress(self) -> int:
        """How many operations have run so far; this also grows within a step."""
        return operations(self.runner)

    def check(self) -> None:
        """There is no other process."""

    def close(self) -> None:
        self.tickets.clear()
        self.held.clear()


@dataclass(frozen=True, slots=True)
class FailedTicket:
    """A plan that never reached the devices."""

    plan_id: int
    failure: str

    def ready(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return StepResult(plan_id=self.plan_id, failure=self.failure)


def operations(runner: Runner) -> int:
    """How many operations a runner's kernels have run. It grows within a step, too; another thread may ask."""
    try:
        return sum(op["calls"] + op["fallbacks"] for op in runner.kernels.counters().values())
    except RuntimeError:  # the runner's thread has just added a new operation to the dict
        return 0


def only_asks(message: dict[str, Any]) -> bool:
    """Is it a mere question, which changes nothing that earlier plans might need?"""
    if message.get("what") == "experts":
        return False
    return message.get("what") == "counters" or message.get("op") in ("state", "read")


def answer(runner: Runner, message: dict[str, Any]) -> dict[str, Any]:
    """Answer the control messages that every runner understands."""
    if message.get("what") == "counters":
        return {"kernels": runner.kernels.counters()}
    if message.get("what") == "adapter":
        return runner.adapters.command(message)
    if message.get("what") == "experts":
        return runner.experts.obey(message)
    if message.get("what") in ("sleep", "wake"):
        return obey(runner.sleeper, message)
    raise ValueError(f"unknown control message {message.get('what')!r}")
