"""The null drafter."""

from __future__ import annotations

from tokenmill.core.sequence import Sequence


class NoDrafter:
    """Never proposes anything."""

    def propose(self, seq: Sequence, most: int) -> list[int]:
        return []

    def observe(self, seq: Sequence, proposed: int, accepted: int) -> None:
        """Nothing was proposed."""

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept."""
