"""Which numbers become zero: by magnitude, Wanda, SparseGPT. Owns: the choice, n of m or a part of each row.

Each takes a weight [out, in] float32 and gives one with zeros. Must not know: files, layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.core.errors import ParameterError
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


def sparsegpt(weight: Tensor, sparsity: Sparsity, inputs: Inputs | None, damping: float = 0.01) -> Tensor:
    """Zero the numbers that cost least; the columns that follow make up for them (Frantar, Alistarh, 2023)."""
    if inputs is None or not inputs.count:
        return magnitude(weight, sparsity, None)
    _, upper = factor(inputs.hessian, damping, torch.arange(weight.shape[1], device=weight.device))
    w = weight.clone()
    gone = torch.zeros_like(w, dtype=torch.bool)
    block = _BLOCK - _BLOCK % max(sparsity.of, 1)
    for start in range(0, w.shape[1], block):
        stop = min(start + block, w.shape[1])
        errors = torch.zeros(w.shape[0], stop - start, device=w.device)
        cost = upper.diagonal()[start:stop].square()
        if not sparsity.of:
            gone[:, start:stop] = lowest(w[:, start:stop].square() / cost, sparsity, start)
        for at in range(start, stop):
            if sparsity.of and (at - start) % sparsity.of == 0:
                end = min(at + sparsity.of, stop)
                gone[:, at:end] = lowest(w[:, at:end].square() / cost[at - start : end - start], sparsity)
            lost = torch.where(gone[:, at], w[:, at], 0.0)
            error = lost / upper[at, at]
            w[:, at:stop] -= error[:, None] * upper[at, at:stop]
            errors[:, at - start] = error
        w[:, stop:] -= errors @ upper[start:stop, stop:]
    return w.masked_fill(gone, 0.0)


METHODS = {"magnitude": magnitude, "wanda": wanda, "sparsegpt": sparsegpt}
