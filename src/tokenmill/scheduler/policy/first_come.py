"""First come, first served: rank is arrival order. The oldest sequence is never preempted, so work always ends."""

from __future__ import annotations

from tokenmill.core.sequence import Sequence


class FirstCome:
    """Arrival order; a preempted sequence keeps its place."""

    static = True

    def rank(self, seq: Sequence) -> tuple:
        return (seq.group.request.arrival, seq.id)

    def reserve(self, seq: Sequence) -> int:
        return len(seq.tokens) + (seq.group.embed is None)
