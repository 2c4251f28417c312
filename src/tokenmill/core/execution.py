"""Who runs plans. Owns: the protocols of executors and of plans in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenmill.core.step import LateInputs, StepPlan, StepResult


class Ticket(Protocol):
    """A plan in flight."""

    def wait(self) -> StepResult: ...


class Executor(Protocol):
    """Runs plans in order. `depth` plans may be in flight; `chains`: a row may be in two uncommitted plans."""

    depth: int
    chains: bool
    num_blocks: list[int]

    def submit(self, plan: StepPlan) -> Ticket: ...
    def supply(self, plan_id: int, inputs: LateInputs) -> None: ...
    def control(self, message: dict[str, Any]) -> dict[str, Any]: ...
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
