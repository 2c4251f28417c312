"""Which columns of a matrix to prune, and how the others make up for them. Owns: that choice, for columns one by one
(channels) or in equal groups (heads).

Without the columns S the outputs err least if the others change by OBS's rule (Hassibi, Stork, 1993):

    K = (H + damping)^-1        W_rest -= W_S (K_SS)^-1 K_S,rest        error = trace(W_S (K_SS)^-1 W_S^T)

H is the sum of x x^T over the inputs x. Must not know: layers, files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.quantize.inputs import Inputs

ROUNDS = 32
METHODS = ("obs", "wanda")
"""obs: the loss of the outputs after the other columns have taken over; wanda: what a column alone adds to the
outputs."""


@dataclass(frozen=True, slots=True)
class PrunedMatrix:
    """weight [out, kept] multiplies the input columns `kept` [kept], in order. lost: the relative error of the
    outputs."""

    weight: Tensor
    kept: Tensor
    lost: float


def prune_columns(
    weight: Tensor, inputs: Inputs, keep: int, *, width: int = 1, method: str = "obs", damping: float = 0.01
) -> PrunedMatrix:
    """Keep `keep` groups of `width` neighbouring columns of weight [out, in]."""
    hessian = inputs.hessian.double()
    slack = damping * float(hessian.diagonal().mean()) or 1.0
    inverse = torch.linalg.inv(hessian + slack * torch.eye(len(hessian), dtype=torch.float64, device=hessian.device))
    w, groups = weight.double(), torch.arange(weight.shape[1] // width, device=weight.device)
    gone = len(groups) - keep
    rounds = min(gone, ROUNDS) if method == "obs" else 1
    for step in range(rounds):
        now = gone * (step + 1) // rounds - gone * step // rounds
        score = _costs(w, inverse, width) if method == "obs" else _shares(weight, hessian, width)
        worst = torch.zeros(len(groups), dtype=torch.bool, device=weight.device)
        worst[score.argsort(stable=True)[:now]] = True
        w, inverse = _without(w, inverse, worst.repeat_interleave(width))
        groups = groups[~worst]
    kept = (groups[:, None] * width + torch.arange(width, device=weight.device)).flatten()
    error = weight.double().clone()
    error[:, kept] -= w
    whole = inputs.loss(weight)
    return PrunedMatrix(w.to(weight.dtype), kept, (inputs.loss(error.float()) / whole) ** 0.5 if whole else 0.0)


def _costs(w: Tensor, inverse: Tensor, width: int) -> Tensor:
    """The loss if one group alone is removed [groups]."""
    if width == 1:
        return w.square().sum(0) / inverse.diagonal()
    parts = w.unflatten(1, (-1, width)).transpose(0, 1)  # [groups, out, width]
    blocks = torch.stack([part[n] for n, part in enumerate(inverse.unflatten(1, (-1, width)).unflatten(0, (-1, width))
                                                           .permute(0, 2, 1, 3))])  # fmt: skip
    return (torch.linalg.solve(blocks, parts, left=False) * parts).sum((1, 2))


def _shares(weight: Tensor, hessian: Tensor, width: int) -> Tensor:
    """The energy that each group adds to the outputs [groups]."""
    return (weight.double().square().sum(0) * hessian.diagonal()).unflatten(0, (-1, width)).sum(1)


def _without(w: Tensor, inverse: Tensor, worst: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix and the inverse for the remaining columns."""
    stay = ~worst
    across = torch.linalg.solve(inverse[worst][:, worst], inverse[worst][:, stay])
    return w[:, stay] - w[:, worst] @ across, inverse[stay][:, stay] - inverse[stay][:, worst] @ across
