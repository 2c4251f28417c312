"""GPTQ: columns are rounded one after the other, and later columns make up for the error of each.

Owns: the method (Frantar et al., 2022), with columns in the order of their inputs' energy and groups in their stored
order. Must not know: files.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.quantize.codes import Codes, Spec, fitted
from tokenmill.quantize.inputs import Inputs

_BLOCK = 128


def gptq(weight: Tensor, spec: Spec, inputs: Inputs, damping: float = 0.01) -> Codes:
    """weight [out, in] float32 -> codes. Scales are computed first, so that columns may be rounded in any order."""
    hessian = inputs.hessian
    scales, zeros = fitted(weight, spec, hessian.diagonal() / max(inputs.count, 1))
    order, upper = factor(hessian, damping)
    group = order // spec.group
    w, codes = weight[:, order].clone(), torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    most = (1 << spec.bits) - 1
    for start in range(0, w.shape[1], _BLOCK):
        stop = min(start + _BLOCK, w.shape[1])
        errors = torch.empty(w.shape[0], stop - start, device=w.device)
        for at in range(start, stop):
            scale, zero = scales[:, group[at]], zeros[:, group[at]]
            code = (w[:, at] / scale + zero).round().clamp(0, most)
            error = (w[:, at] - (code - zero) * scale) / upper[at, at]
            codes[:, order[at]] = code.to(torch.uint8)
            w[:, at:stop] -= error[:, None] * upper[at, at:stop]
            errors[:, at - start] = error
        w[:, stop:] -= errors @ upper[start:stop, stop:]
    return Codes(codes, scales, zeros, spec)


def factor(hessian: Tensor, damping: float, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """An order of columns (by default largest energy first), and the upper Cholesky factor of the inverse in that
    order. A column without inputs gets the damping alone, so it counts least."""
    diagonal = hessian.diagonal()
    step = float(diagonal.mean()) or 1.0
    if not math.isfinite(step):
        raise ModelError("The inputs of a matrix are not finite: it cannot be calibrated.")
    order = diagonal.argsort(descending=True) if order is None else order
    sorted_hessian = hessian[order][:, order].double()
    eye = torch.eye(len(order), dtype=torch.float64, device=hessian.device)
    while True:
        try:
            lower = torch.linalg.cholesky(sorted_hessian + eye * (damping * step))
            inverse = torch.cholesky_inverse(lower)
            return order, torch.linalg.cholesky(inverse, upper=True).float()
        except RuntimeError:  # (LinAlgError is one) not positive definite: too few inputs, or all are alike
            damping *= 10.0
