"""The null drafter of a device, and what those have in common that keep nothing."""

from __future__ import annotations

from typing import Any

from tokenmill.core.drafting import Drafting, Seen


class Forgetful:
    """A drafter that keeps nothing beside the rows: what follows has no meaning for it."""

    most = 0
    follows = False
    catches_up = True

    def bind(self, rows: Any, pool: Any) -> None:
        """Rows come with each proposal."""

    def warm(self) -> None:
        """Nothing is recorded."""

    def follow(self, spans: list[tuple[int, int, int]], seen: Seen) -> None:
        """Nothing is kept."""

    def propose(self, step: Drafting) -> None:
        """Nothing is proposed."""

    def forget_weights(self) -> None:
        """There are none."""


class NoDeviceDrafter(Forgetful):
    """Leaves no drafts behind."""
