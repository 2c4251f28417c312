"""Experts that move between ranks, as the loop and runners see them. Owns: the two protocols, and their null objects.
Must not know: placements, tensors."""

from __future__ import annotations

from typing import Any, Protocol


class Balancer(Protocol):
    """Decides for all ranks which experts move. balancedness: mean over maximum of the ranks' tokens when it was last
    looked at (0: not yet); moved: experts that have come to a slot."""

    balancedness: float
    moved: int

    def between(self, steps: int, epoch: int, *, flying: bool) -> bool:
        """Before a plan: do what is due behind so many steps. False: it is due when no plan is in flight."""
        ...


class NoBalance:
    """Experts stay where they are."""

    balancedness = 0.0
    moved = 0

    def between(self, steps: int, epoch: int, *, flying: bool) -> bool:
        """Nothing is due."""
        return True


class Movers(Protocol):
    """What moves the experts of one rank."""

    def obey(self, message: dict[str, Any]) -> dict[str, Any]:
        """A control message, and its answer."""
        ...


class NoMovers:
    """Of a rank whose experts stay."""

    def obey(self, message: dict[str, Any]) -> dict[str, Any]:
        """Nobody asks."""
        raise ValueError(f"experts stay where they are: {message.get('op')!r}")
