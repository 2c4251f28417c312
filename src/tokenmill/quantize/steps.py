"""Steps that fit codes. Owns: choosing the scales of a rounded matrix anew, so that its outputs err least.

A grid's step is chosen before its codes are known, and group by group. Once they are, the error of a row's outputs is
a square in the steps of its groups, and its least place follows from as many equations as the row has groups. Must not
know: how codes are found, files.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.quantize.codes import Codes, representable

_ROWS = 1024
"""So many rows are treated at once."""
_RIDGE = 1e-6


def damped(hessian: Tensor, damping: float) -> Tensor:
    """The sums over inputs, with this part of their mean energy added to each column."""
    return hessian + torch.eye(len(hessian), device=hessian.device) * (damping * hessian.diagonal().mean())


def lost(codes: Codes, weight: Tensor, hessian: Tensor) -> Tensor:
    """The squared error of each row's outputs [out]."""
    error = codes.dense() - weight
    return ((error @ hessian) * error).sum(-1)


def stepped(codes: Codes, weight: Tensor, hessian: Tensor) -> Codes:
    """The same codes with the steps for which the outputs of weight [out, in] err least. Steps stay positive, and
    numbers that files can hold; a row that would lose more by that keeps its own."""
    units = (codes.codes.float().unflatten(1, (-1, codes.spec.group)) - codes.zeros.float()[..., None]).split(_ROWS)
    parts = zip(units, weight.split(_ROWS), codes.scales.split(_ROWS), strict=True)
    steps = torch.cat([_solved(unit, part, scales, hessian) for unit, part, scales in parts])
    return better(replace(codes, scales=steps), codes, weight, hessian)


def better(one: Codes, other: Codes, weight: Tensor, hessian: Tensor) -> Codes:
    """Of each row the codes with which its outputs err less."""
    first = (lost(one, weight, hessian) < lost(other, weight, hessian))[:, None]
    return Codes(
        torch.where(first, one.codes, other.codes),
        torch.where(first, one.scales, other.scales),
        torch.where(first, one.zeros, other.zeros),
        one.spec,
    )


def _solved(units: Tensor, weight: Tensor, scales: Tensor, hessian: Tensor) -> Tensor:
    """units [n, groups, group]: codes less zero points. The best steps [n, groups]."""
    groups, group = units.shape[1:]
    square = torch.stack(
        [((units[:, g] @ rows).view_as(units) * units).sum(-1) for g, rows in enumerate(hessian.split(group))], 1
    )
    wanted = ((weight @ hessian).view_as(units) * units).sum(-1)
    ridge = square.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-30) * _RIDGE
    square = square.double() + torch.eye(groups, device=units.device) * ridge[:, None, None]
    found = torch.linalg.solve(square, wanted.double()).float()
    return representable(torch.where(torch.isfinite(found) & (found > 0), found, scales))
