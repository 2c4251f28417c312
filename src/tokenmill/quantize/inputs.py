"""What a weight's inputs look like. Owns: adding them up. Must not know: weights, files, methods.

H = sum of x x^T over all inputs x, so that |(W - V) X|^2 = trace((W - V) H (W - V)^T)
"""

from __future__ import annotations

import torch
from torch import Tensor


class Squares:
    """Only sums of squares over the inputs x [columns] of a matrix, or of several matrices with the same input."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.squares = torch.zeros(columns, device=device)
        self.count = 0

    def add(self, x: Tensor) -> None:
        """Add inputs x [T, columns]."""
        self.squares += x.detach().float().square().sum(0)
        self.count += len(x)


class Inputs:
    """Sums over the inputs x [columns] of a matrix, or of several matrices with the same input."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.hessian = torch.zeros(columns, columns, device=device)
        self.magnitude = torch.zeros(columns, device=device)
        self.largest = torch.zeros(columns, device=device)
        self.count = 0
        self.drift: Tensor | None = None
        """The sum of (m - x) x^T over those inputs x of which m is known: what the unrounded model has in their
        place."""
        self.paired = 0
        """How many these are."""
        self.factored: dict[float, tuple[Tensor, Tensor]] = {}
        """What methods made of the sums, by how they asked for it: matrices with the same input need it once."""

    def add(self, x: Tensor, meant: Tensor | None = None) -> None:
        """Add inputs x [T, columns]. meant: what the unrounded model has in their place."""
        self.factored.clear()
        wide = x.detach().float()
        self.hessian.addmm_(wide.T, wide)
        if meant is not None:
            self.drift = torch.zeros_like(self.hessian) if self.drift is None else self.drift
            self.drift.addmm_((meant.float() - wide).T, wide)
            self.paired += len(wide)
        size = wide.abs()
        self.magnitude += size.sum(0)
        if len(size):
            self.largest = torch.maximum(self.largest, size.amax(0))
        self.count += len(wide)

    @property
    def mean(self) -> Tensor:
        """The mean magnitude of each column."""
        return self.magnitude / max(self.count, 1)

    def scaled(self, by: Tensor) -> Inputs:
        """The sums for inputs x / by."""
        made = Inputs(len(by), self.hessian.device)
        made.hessian = self.hessian / by[:, None] / by[None, :]
        made.magnitude, made.largest, made.count = self.magnitude / by, self.largest / by, self.count
        made.drift = None if self.drift is None else self.drift / by[:, None] / by[None, :]
        made.paired = self.paired
        return made

    def loss(self, error: Tensor) -> float:
        """The mean squared error of the outputs if the weight [out, columns] has this error."""
        return float(((error @ self.hessian) * error).sum(dtype=torch.float64)) / max(self.count, 1)
