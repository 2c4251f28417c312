"""What an engine's steps were made of. Owns: noting plans on their way to the executor, and reading their grants later.

Noting is one append per step. Everything else happens after the run, so that the run is not disturbed. With drafts, a
row's length is taken as the most it can be. Must not know: models, speeds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tokenmill.core.execution import Executor, ExecutorAround, Ticket
from tokenmill.core.step import StepPlan
from tokenmill.measure.roofline import Grant
from tokenmill.runner.batch import SHARED_ENTRIES


class PlanRecorder(ExecutorAround):
    """An executor around another one. It records every plan with the time at which it was submitted."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.plans: list[tuple[float, StepPlan]] = []

    def submit(self, plan: StepPlan) -> Ticket:
        """Record the plan and pass it on."""
        self.plans.append((time.perf_counter(), plan))
        return super().submit(plan)


def grants_of(plans: list[StepPlan], lengths: dict[int, int]) -> list[list[Grant]]:
    """The grants of each plan. `lengths` holds the computed tokens of each row and is carried on."""
    steps = []
    for plan in plans:
        for row in plan.ended:
            lengths.pop(row, None)
        for start in plan.starts:
            lengths[start.row] = start.computed
        for row, computed in plan.jumps:
            lengths[row] = computed
        grants = []
        for row, count, samples in zip(plan.rows, plan.counts, plan.samples, strict=True):
            before = lengths.get(row, 0)
            grants.append(Grant(count, before, samples))
            lengths[row] = before + count
        steps.append(grants)
    return steps


@dataclass(slots=True)
class SharedPrefixes:
    """The block tables of the first KV group by row, as plans change them."""

    tables: dict[int, list[int]] = field(default_factory=dict)

    def positions(self, plan: StepPlan, block_size: int) -> int:
        """The number of leading positions that all rows of a step of single tokens share, as a GPU's attention finds
        them."""
        for row in plan.ended:
            self.tables.pop(row, None)
        for edit in plan.edits:
            if edit.group == 0:
                table = self.tables.setdefault(edit.row, [])
                del table[: edit.drop]
                table[edit.at :] = edit.blocks
        if len(plan.rows) < 2 or plan.num_tokens > len(plan.rows):
            return 0
        tables = [self.tables.get(row, []) for row in plan.rows]
        pairs = enumerate(zip(min(tables), max(tables), strict=False))  # all others lie between these two
        same = next((i for i, (a, b) in pairs if a != b), min(map(len, tables)))
        return block_size * same if same >= SHARED_ENTRIES else 0
