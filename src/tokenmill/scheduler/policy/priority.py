"""Priority: lower request priority goes first (as in vLLM), ties by arrival; may preempt running sequences."""

from __future__ import annotations

from tokenmill.core.sequence import Sequence
from tokenmill.scheduler.policy.first_come import FirstCome


class Priority(FirstCome):
    """Smaller `Request.priority` first."""

    def rank(self, seq: Sequence) -> tuple:
        return (seq.group.request.priority, seq.group.request.arrival, seq.id)
