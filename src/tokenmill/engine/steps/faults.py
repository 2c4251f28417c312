"""Faults: which failures of a step the process does not get over, and faults on purpose, as TOKENMILL_FAULTS asks.

Owns: telling a device that is broken from a step that failed, and what the log says of it; an executor that kills,
hangs, slows or breaks its engine's steps, for tests of reliability, in engine processes and in threads. A line of
faults, separated by `;`:

    kill@30          SIGKILL to this process at step 30
    hang@30          step 30 never ends
    raise@30         step 30 fails, as an allocation that did not fit would
    spin@30          step 30 computes for ever
    cuda@30          step 30 and all later ones fail as on a GPU whose context is broken
    raise:7,8        every step that computes a sequence whose prompt holds these tokens next to each other fails
    slow=0.05        every step takes that much longer
    once=/some/file  kill, hang, spin and cuda happen only while this file is absent; it is made then

Must not know: servers, schedulers.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.core.execution import Executor, ExecutorAround, Ticket
from tokenmill.core.step import StepPlan
from tokenmill.engine.steps.executor import FailedTicket

log = logging.getLogger("tokenmill.engine")
FAILURE = "InjectedError: this step was told to fail"
STICKY = "AcceleratorError: CUDA error: device-side assert triggered"
_PASSING = ("out of memory", "alloc_failed", "invalid configuration", "invalid argument", "out of resource")


def ends_process(failure: str) -> bool:
    """Does a step's failure mean that the device's context is broken? Then every later step fails, whatever its
    sequences, until a new process makes a new context. After a lack of memory or a bad launch, later steps can
    succeed."""
    text = failure.lower()
    named = text.startswith("acceleratorerror") or "cuda error" in text or "triton error [cuda]" in text
    return named and not any(word in text for word in _PASSING)


class FailedSteps:
    """Logs why steps failed: each reason once, because a failing step may fail often."""

    most = 20

    def __init__(self) -> None:
        self.said: set[str] = set()

    def tell(self, reason: str) -> None:
        """A step failed."""
        if reason not in self.said and len(self.said) < self.most:
            self.said.add(reason)
            log.warning("a step failed (%s); its sequences are computed again, fewer at once", reason)


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults to cause; steps count from 1."""

    kill_at: int = 0
    hang_at: int = 0
    spin_at: int = 0
    cuda_at: int = 0
    raise_at: int = 0
    guilty: tuple[int, ...] = ()
    slow_s: float = 0.0
    once: Path | None = None


def read_faults(text: str) -> Faults:
    """Read the faults that a line names; raises a ValueError if one is unknown."""
    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        name, at, step = item.partition("@")
        if at and name in ("kill", "hang", "spin", "cuda", "raise"):
            found[f"{name}_at"] = int(step)
        elif item.startswith("raise:"):
            found["guilty"] = tuple(int(token) for token in item.removeprefix("raise:").split(","))
        elif item.startswith("slow="):
            found["slow_s"] = float(item.removeprefix("slow="))
        elif item.startswith("once="):
            found["once"] = Path(item.removeprefix("once="))
        else:
            raise ValueError(f"TOKENMILL_FAULTS: {item!r} is not a fault.")
    return Faults(**found)


class FaultyExecutor(ExecutorAround):
    """An Executor around another one, which causes the faults."""

    def __init__(self, inner: Executor, faults: Faults) -> None:
        super().__init__(inner)
        self.faults = faults
        self.steps = 0
        self.failed_epoch = -1
        self.broken = False
        self.guilty_rows: set[int] = set()

    def submit(self, plan: StepPlan) -> Ticket:
        self.steps += 1
        self._follow(plan)
        if self.faults.slow_s:
            time.sleep(self.faults.slow_s)
        self._end_or_hang()
        if self.broken:
            return FailedTicket(plan.id, STICKY)
        if plan.epoch == self.failed_epoch or self._fails(plan):
            self.failed_epoch = plan.epoch
            return FailedTicket(plan.id, FAILURE)
        return super().submit(plan)

    def _follow(self, plan: StepPlan) -> None:
        """Note which rows now hold prompts that cause faults."""
        self.guilty_rows.difference_update(plan.ended)
        for start in plan.starts:
            self.guilty_rows.discard(start.row)
            if self.faults.guilty and _holds(start.tokens[: start.num_prompt], self.faults.guilty):
                self.guilty_rows.add(start.row)

    def _fails(self, plan: StepPlan) -> bool:
        return self.steps == self.faults.raise_at or not self.guilty_rows.isdisjoint(plan.rows)

    def _end_or_hang(self) -> None:
        faults = self.faults
        if self.steps not in (faults.kill_at, faults.hang_at, faults.spin_at, faults.cuda_at) or self._was_done():
            return
        if self.steps == faults.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.broken = self.steps == faults.cuda_at
        while self.steps == faults.spin_at:
            pass
        while self.steps == faults.hang_at:
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
    """Make a built engine suffer the faults that a line names."""
    built.engine.executor = FaultyExecutor(built.engine.executor, read_faults(text))
