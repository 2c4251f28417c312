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
    scales, zeros = fitted(weight, spec, inputs.hessian.diagonal() / max(inputs.count, 1))
    order, upper = _factored(inputs, damping)
    group = order // spec.group
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    codes[:, order] = in_turn(weight[:, order].T, scales[:, group].T, zeros[:, group].T.float(), upper, spec.bits).T
    return Codes(codes, scales, zeros, spec)


def in_turn(w: Tensor, steps: Tensor, zeros: Tensor, upper: Tensor, bits: int) -> Tensor:
    """Codes [in, out] of w [in, out], line by line; the lines below make up for the error of each. steps and zeros
    [in, out]: the grid of every number. (Columns of the weight lie as lines, and nothing waits for the device.)"""
    w, steps, zeros = w.clone(memory_format=torch.contiguous_format), steps.contiguous(), zeros.contiguous()
    codes, most = torch.empty(w.shape, dtype=torch.uint8, device=w.device), (1 << bits) - 1
    for start in range(0, len(w), _BLOCK):
        block, of_block = slice(start, start + _BLOCK), upper[start : start + _BLOCK, start : start + _BLOCK]
        lines, errors = w[block], torch.empty_like(w[block])
        for n, (line, step, zero, error) in enumerate(zip(lines, steps[block], zeros[block], errors, strict=True)):
            code = torch.div(line, step).add_(zero).round_().clamp_(0, most)
            codes[start + n] = code
            torch.div(line - code.sub_(zero).mul_(step), of_block[n, n], out=error)
            lines[n + 1 :].addr_(of_block[n, n + 1 :], error, alpha=-1)
        w[start + _BLOCK :].addmm_(upper[block, start + _BLOCK :].T, errors, alpha=-1)
    return codes


def _factored(inputs: Inputs, damping: float) -> tuple[Tensor, Tensor]:
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
