"""Who goes first. Owns: the protocol of scheduling policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenmill.core.sequence import Sequence


class SchedulePolicy(Protocol):
    """Decides which sequences go first and which are preempted. A lower rank goes first; ties are broken by arrival."""

    static: bool
    """True: a sequence's rank never changes."""

    def rank(self, seq: Sequence) -> tuple: ...
    def reserve(self, seq: Sequence) -> int:
        """For how many tokens blocks must be free before a waiting sequence is admitted."""
        ...
