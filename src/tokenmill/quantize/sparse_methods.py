"""Which numbers become zero: by magnitude, Wanda, SparseGPT. Owns: the choice, n of m or a part of each row.

Each takes a weight [out, in] float32 and gives one with zeros. Must not know: files, layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.compute.lines import RoundsLines
from tokenmill.core.errors import ParameterError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.quantize.gptq import factor
from tokenmill.quantize.inputs import Inputs

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Sparsity:
    """`zeros` of every `of` neighbours become zero. `of` 0: that part of every row."""

    zeros: float
    of: int

    @property
    def share(self) -> float:
        """The part of all numbers that becomes zero."""
        return self.zeros / self.of if self.of else self.zeros


PAIRS = Sparsity(2, 4)
"""Of every four neighbours two are kept."""


def parse_sparsity(text: str) -> Sparsity:
    """Read "2:4" (two of four are kept), or a part like "0.5" that becomes zero."""
    kept, colon, of = text.partition(":")
    try:
        if colon and 0 < int(kept) < int(of) <= 32:
            return Sparsity(int(of) - int(kept), int(of))
        if not colon and 0.0 < float(kept) < 1.0:
            return Sparsity(float(kept), 0)
    except ValueError:
        pass
    raise ParameterError(f"--sparsity {text!r}: use n:m like 2:4, or a part between 0 and 1.")


def lowest(score: Tensor, sparsity: Sparsity, before: int = 0) -> Tensor:
    """The places [out, in] of the lowest scores. before: columns of the matrix in front of these, which have had their
    part of the zeros."""
    if sparsity.of:
        parts = score.unflatten(1, (-1, sparsity.of))
        at = parts.argsort(-1)[..., : int(sparsity.zeros)]
        return torch.zeros_like(parts, dtype=torch.bool).scatter_(-1, at, True).flatten(1)
    count = round(sparsity.zeros * (before + score.shape[1])) - round(sparsity.zeros * before)
    at = score.argsort(1)[:, :count]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, at, True)


def magnitude(weight: Tensor, sparsity: Sparsity, inputs: Inputs | None) -> Tensor:
    """Zero the smallest numbers."""
    return weight.masked_fill(lowest(weight.abs(), sparsity), 0.0)


def wanda(weight: Tensor, sparsity: Sparsity, inputs: Inputs | None) -> Tensor:
    """Zero the smallest numbers times the norm of their inputs (Sun et al., 2023)."""
    if inputs is None or not inputs.count:
        return magnitude(weight, sparsity, None)
    return weight.masked_fill(lowest(weight.abs() * inputs.hessian.diagonal().sqrt(), sparsity), 0.0)


def sparsegpt(
    weight: Tensor,
    sparsity: Sparsity,
    inputs: Inputs | None,
    damping: float = 0.01,
    kernels: RoundsLines | None = None,
) -> Tensor:
    """Zero the numbers that cost least; the columns that follow make up for them (Frantar, Alistarh, 2023). kernels: of
    the weight's device; None: plain torch."""
    if inputs is None or not inputs.count:
        return magnitude(weight, sparsity, None)
    kernels = kernels or ReferenceKernels()
    _, upper = factor(inputs.hessian, damping, torch.arange(weight.shape[1], device=weight.device))
    left = weight.T.clone(memory_format=torch.contiguous_format)  # columns lie as lines
    made, block = torch.empty_like(left), _BLOCK - _BLOCK % max(sparsity.of, 1)
    for start in range(0, len(left), block):
        here, rest = slice(start, start + block), slice(start + block, None)
        gone = None
        if not sparsity.of:
            cost = left[here].square() / upper.diagonal()[here].square()[:, None]
            gone = lowest(cost.T, sparsity, start).T
        made[here], errors = kernels.prune_lines(left[here], upper[here, here], gone, int(sparsity.zeros), sparsity.of)
        left[rest].addmm_(upper[here, rest].T, errors, alpha=-1)
    return made.T.contiguous()


METHODS = {"magnitude": magnitude, "wanda": wanda, "sparsegpt": sparsegpt}
