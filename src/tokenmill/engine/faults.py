"""Faults on purpose. Owns: an executor that kills, hangs, slows or breaks its engine's steps, as TOKENMILL_FAULTS asks.

For tests of reliability, in engine processes and in threads. A line of faults, separated by `;`:

    kill@30          SIGKILL to this process at step 30
    hang@30          step 30 never ends
    raise@30         step 30 fails, as an allocation that did not fit would
    raise:7,8        every step that computes a sequence whose prompt holds these tokens next to each other fails
    slow=0.05        every step takes that much longer
    once=/some/file  kill and hang happen only while this file is absent; it is made then

Must not know: servers, schedulers.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.core.protocols import Executor, Ticket
from tokenmill.core.step import LateInputs, StepPlan, StepResult

FAILURE = "InjectedError: this step was told to fail"


@dataclass(frozen=True, slots=True)
class Faults:
    """What is to go wrong; steps count from 1."""

    kill_at: int = 0
    hang_at: int = 0
    raise_at: int = 0
    guilty: tuple[int, ...] = ()
    slow_s: float = 0.0
    once: Path | None = None


def read_faults(text: str) -> Faults:
    """The faults that a line names; ValueError for one that is unknown."""
    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        name, at, step = item.partition("@")
        if at and name in ("kill", "hang", "raise"):
            found[f"{name}_at"] = int(step)
        elif item.startswith("raise:"):
            found["guilty"] = tuple(int(token) for token in item.removeprefix("raise:").split(","))
        elif item.startswith("slow="):
            found["slow_s"] = float(item.removeprefix("slow="))
        elif item.startswith("once="):
            found["once"] = Path(item.removeprefix("once="))
        else:
            raise ValueError(f"TOKENMILL_FAULTS: {item!r} is no fault.")
    return Faults(**found)


@dataclass(slots=True)
class FailedTicket:
    """A plan that never reached the devices."""

    plan: StepPlan

    def wait(self) -> StepResult:
        return StepResult(plan_id=self.plan.id, failure=FAILURE)


class FaultyExecutor:
    """An Executor around another one."""

    def __init__(self, inner: Executor, faults: Faults) -> None:
        self.inner, self.faults = inner, faults
        self.depth, self.chains, self.num_blocks = inner.depth, inner.chains, inner.num_blocks
        self.steps = 0
        self.failed_epoch = -1
        self.guilty_rows: set[int] = set()

    def submit(self, plan: StepPlan) -> Ticket:
        self.steps += 1
        self._follow(plan)
        if self.faults.slow_s:
            time.sleep(self.faults.slow_s)
        self._end_or_hang()
        if plan.epoch == self.failed_epoch or self._fails(plan):
            self.failed_epoch = plan.epoch
            return FailedTicket(plan)
        return self.inner.submit(plan)

    def supply(self, plan_id: int, inputs: LateInputs) -> None:
        self.inner.supply(plan_id, inputs)

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        return self.inner.control(message)

    def close(self) -> None:
        self.inner.close()

    def _follow(self, plan: StepPlan) -> None:
        """Which rows hold guilty prompts now."""
        self.guilty_rows.difference_update(plan.ended)
        for start in plan.starts:
            self.guilty_rows.discard(start.row)
            if self.faults.guilty and _holds(start.tokens[: start.num_prompt], self.faults.guilty):
                self.guilty_rows.add(start.row)

    def _fails(self, plan: StepPlan) -> bool:
        return self.steps == self.faults.raise_at or not self.guilty_rows.isdisjoint(plan.rows)

    def _end_or_hang(self) -> None:
        if self.steps not in (self.faults.kill_at, self.faults.hang_at) or self._was_done():
            return
        if self.steps == self.faults.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(3600)

    def _was_done(self) -> bool:
        once = self.faults.once
        if once is None:
            return False
        done = once.exists()
        once.touch()
        return done


def _holds(tokens: list[int], part: tuple[int, ...]) -> bool:
    size = len(part)
    return any(tuple(tokens[i : i + size]) == part for i in range(len(tokens) - size + 1))


def inject(built: Any, text: str) -> None:
    """Let a built engine suffer what a line of faults asks."""
    built.engine.executor = FaultyExecutor(built.engine.executor, read_faults(text))
