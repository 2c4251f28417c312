"""Who runs plans. Owns: the protocols of executors and of plans in flight, and what
executors around other ones share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenmill.core.step import LateInputs, StepPlan, StepResult


class Ticket(Protocol):
    """A plan in flight."""

    def wait(self) -> StepResult: ...


class Executor(Protocol):
    """Runs plans in order. `depth` plans may be in flight; `overlaps`: a row may be in two uncommitted plans."""

    depth: int
    overlaps: bool
    num_blocks: list[int]

    def submit(self, plan: StepPlan) -> Ticket:
        """Take a plan; does not wait for its result."""
        ...

    def supply(self, plan_id: int, inputs: LateInputs) -> None:
        """Bring what the sampling of this plan still lacks."""
        ...

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a control message to the first rank; returns its answer."""
        ...

    def control_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a control message to every rank; returns their answers."""
        ...

    def progress(self) -> int:
        """How many operations have run so far; this also grows within a step. Another thread may ask."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError if a process that it needs is gone or stopped. Asked while nothing is in flight."""
        ...

    def close(self) -> None: ...


class ExecutorAround:
    """An executor that passes everything on to another one; what wraps one overrides what it changes."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.depth, self.overlaps, self.num_blocks = inner.depth, inner.overlaps, inner.num_blocks

    def submit(self, plan: StepPlan) -> Ticket:
        """Pass on."""
        return self.inner.submit(plan)

    def supply(self, plan_id: int, inputs: LateInputs) -> None:
        """Pass on."""
        self.inner.supply(plan_id, inputs)

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Pass on."""
        return self.inner.control(message)

    def control_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Pass on."""
        return self.inner.control_all(message)

    def progress(self) -> int:
        """Pass on."""
        return self.inner.progress()

    def check(self) -> None:
        """Pass on."""
        self.inner.check()

    def close(self) -> None:
        """Pass on."""
        self.inner.close()
