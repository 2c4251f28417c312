"""Ranks that compute one thing together. Owns: the group of one; others live beside it. Knows nothing of layers."""

from __future__ import annotations

from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.compute.model import Exchange

GIVEN_UP = "another rank has given this step up"
"""What a rank on a CPU says that waited for one that failed (csrc/group.cpp)."""


class AtOnce:
    """Ranks whose sums are made while nothing else is, and without a norm."""

    exact = False
    adds_parts = False
    calls = 0

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, norm: NormSpec, scale: float = 1.0, within: NormSpec | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """None: the sum comes alone."""
        return None

    def pieces(self, x: Tensor) -> int:
        """One."""
        return 1

    def exchange(self, part: Tensor) -> Exchange:
        """Never asked for."""
        raise NotImplementedError("sums of this group are made at once")

    def begin(self, epoch: int) -> None:
        """Nothing is to be brought together."""

    def fail(self) -> None:
        """No rank can be told: work that it did not enqueue cannot be made up for."""


class SoloGroup(AtOnce):
    """The null group: one rank that already has everything."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (+ residual), unchanged in shape."""
        return x if residual is None else residual + x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """x itself."""
        return x

    def agree(self, values: list[int]) -> list[int]:
        """The values themselves."""
        return values
