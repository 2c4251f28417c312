"""Experts that move between ranks, as the loop and runners see them. Owns: the two protocols, and their null objects.
Must not know: placements, tensors."""

from __future__ import annotations

from typing import Any, Protocol


class Balancer(Protocol):
    """Decides for all ranks which experts move. balancedness: mean / maximum of the ranks' tokens when it was last
    computed (0: not yet). moved: how many experts have been put into a slot."""

    balancedness: float
    moved: int

    def between(self, steps: int, epoch: int, *, flying: bool) -> bool:
        """Called before a plan: do what is due after so many steps. False: something is due that must wait until no
        plan is in flight."""
        ...


class NoBalance:
    """Experts stay where they are."""

    balancedness = 0.0
    moved = 0

    def between(self, steps: int, epoch: int, *, flying: bool) -> bool:
        """Nothing is due."""
        return True


class Movers(Protocol):
    """Moves the experts of one rank."""

    def obey(self, message: dict[str, Any]) -> dict[str, Any]:
        """Obey a control message; returns the answer."""
        ...


class NoMovers:
    """The Movers of a rank whose experts stay where they are."""

    def obey(self, message: dict[str, Any]) -> dict[str, Any]:
        """Refuse: nothing can move."""
        raise ValueError(f"experts stay where they are: {message.get('op')!r}")
