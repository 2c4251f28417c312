"""Scheduling policies, one file each: who goes first and who gives way."""

from __future__ import annotations

from tokenmill.core.errors import UserError
from tokenmill.core.policy import SchedulePolicy
from tokenmill.scheduler.policy.first_come import FirstCome
from tokenmill.scheduler.policy.priority import Priority

POLICIES: dict[str, type[SchedulePolicy]] = {"fcfs": FirstCome, "priority": Priority}


def make_policy(name: str) -> SchedulePolicy:
    """The policy of this name."""
    if name not in POLICIES:
        raise UserError(f"Unknown scheduling policy {name!r}; choose from {', '.join(sorted(POLICIES))}.")
    return POLICIES[name]()
