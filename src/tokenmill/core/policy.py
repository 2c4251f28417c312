"""Who goes first. Owns: the protocol of scheduling policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenmill.core.sequence import Sequence


class SchedulePolicy(Protocol):
    """Who goes first and who gives way. Lower rank goes first; ties are broken by arrival."""

    static: bool
    """True: a sequence's rank never changes while it lives."""

    def rank(self, seq: Sequence) -> tuple: ...
    def reserve(self, seq: Sequence) -> int:
        """Tokens for which blocks must be free before a waiting sequence is admitted."""
        ...
