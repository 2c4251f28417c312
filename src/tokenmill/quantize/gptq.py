"""GPTQ: columns are rounded one after the other, and later columns make up for the error of each.

Owns: the method (Frantar et al., 2022), with columns in the order of their inputs' energy and groups in their stored
order. Must not know: files.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.compute.lines import LineGrid, RoundsLines
from tokenmill.core.errors import ModelError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.quantize.codes import Codes, Spec, fitted
from tokenmill.quantize.inputs import Inputs

_BLOCK = 128
_TRIES, _LEAST = 24, 1e-16
"""So often damping may become ten times as large, from what float64 can add at all. Then it is the largest part of
every finite matrix."""


def gptq(
    weight: Tensor, spec: Spec, inputs: Inputs, damping: float = 0.01, kernels: RoundsLines | None = None
) -> Codes:
    """weight [out, in] float32 -> codes. Scales are computed first, so that columns may be rounded in any order.
    kernels: of the weight's device; None: plain torch."""
    scales, zeros = fitted(weight, spec, inputs.hessian.diagonal() / max(inputs.count, 1))
    order, upper = factored(inputs, damping)
    grid = LineGrid(scales.T.contiguous(), zeros.T.float().contiguous(), order // spec.group, (1 << spec.bits) - 1)
    codes = torch.empty(weight.T.shape, dtype=torch.uint8, device=weight.device)
    codes[order] = in_turn(weight.T[order], grid, upper, kernels or ReferenceKernels())
    return Codes(codes.T.contiguous(), scales, zeros, spec)


def in_turn(columns: Tensor, grid: LineGrid, upper: Tensor, kernels: RoundsLines) -> Tensor:
    """Codes [in, out] of a weight's columns [in, out], one after the other; the later ones make up for the error of
    each. upper [in, in]: see `factor`."""
    left = columns.clone(memory_format=torch.contiguous_format)
    codes = torch.empty(left.shape, dtype=torch.uint8, device=left.device)
    for start in range(0, len(left), _BLOCK):
        block, rest = slice(start, start + _BLOCK), slice(start + _BLOCK, None)
        codes[block], errors = kernels.round_lines(left[block], grid.of(block), upper[block, block])
        left[rest].addmm_(upper[block, rest].T, errors, alpha=-1)
    return codes


def factored(inputs: Inputs, damping: float) -> tuple[Tensor, Tensor]:
    """`factor`, once for all matrices with these inputs."""
    if damping not in inputs.factored:
        inputs.factored[damping] = factor(inputs.hessian, damping)
    return inputs.factored[damping]


def factor(hessian: Tensor, damping: float, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """An order of columns (by default largest energy first), and the upper Cholesky factor of the inverse in that
    order. A column without inputs gets the damping alone, so it counts least."""
    diagonal = hessian.diagonal()
    step = float(diagonal.mean()) or 1.0
    if not math.isfinite(step):
        raise _unusable()
    order = diagonal.argsort(descending=True) if order is None else order
    back = order.flip(0)
    turned = hessian[back][:, back].double()
    ones = torch.eye(len(order), dtype=turned.dtype, device=turned.device)
    for _ in range(_TRIES):
        try:
            # Turned round, the lower factor of the turned matrix is upper: H = R R^T, so H^-1 = U^T U for U = R^-1.
            root = torch.linalg.cholesky(turned + ones * (damping * step)).flip(0, 1)
            return order, torch.linalg.solve_triangular(root, ones, upper=True).float()
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # too few inputs, or all are alike
            damping = max(10.0 * damping, _LEAST)
    raise _unusable()


def _unusable() -> ModelError:
    return ModelError("The inputs of a matrix are not finite: it cannot be calibrated.")
