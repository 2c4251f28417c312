"""Several simulated workers behind one Executor. Owns: one plan to all ranks, one answer, one fate.

A plan crosses as bytes, as it does between processes and machines; the first rank's result counts. A rank that fails
fails the step for all of them, although the others wrote what it asks for: every later plan of that epoch fails, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tokenmill.core.step import LateInputs, StepPlan, StepResult
from tokenmill.testing.hash_executor import HashExecutor, HashTicket


@dataclass(slots=True)
class HashRanks:
    """`ranks` hold the same model; which plans fail (`HashExecutor.fail`) is each rank's own affair."""

    ranks: list[HashExecutor]
    failed_epoch: int = -1

    @property
    def depth(self) -> int:
        return self.ranks[0].depth

    @property
    def overlaps(self) -> bool:
        return self.ranks[0].overlaps

    @property
    def num_blocks(self) -> list[int]:
        return self.ranks[0].num_blocks

    def submit(self, plan: StepPlan) -> HashTicket:
        if plan.epoch == self.failed_epoch:
            return HashTicket(StepResult(plan_id=plan.id, failure="an earlier plan failed"))
        message = msgspec.msgpack.encode(plan)
        results = [rank.submit(msgspec.msgpack.decode(message, type=StepPlan)).wait() for rank in self.ranks]
        failures = [result.failure for result in results if result.failure is not None]
        if failures:
            self.failed_epoch = plan.epoch
            return HashTicket(StepResult(plan_id=plan.id, failure=failures[0]))
        assert all(result == results[0] for result in results), "ranks say different things"
        return HashTicket(results[0])

    def supply(self, plan_id: int, inputs: LateInputs) -> None:
        for rank in self.ranks:
            rank.supply(plan_id, inputs)

    def control(self, message: dict) -> dict:
        return self.control_all(message)[0]

    def control_all(self, message: dict) -> list[dict]:
        return [rank.control(message) for rank in self.ranks]

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
