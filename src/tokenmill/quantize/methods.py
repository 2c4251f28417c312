"""Methods that search for the best rounding: AutoRound, HQQ, and clipping as in AWQ. Owns: the searches.

Each takes a weight [out, in] float32 and gives codes. Must not know: files, layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.quantize.codes import SHRINKS, Codes, Spec, best_of, fitted, grid, rounded
from tokenmill.quantize.inputs import Inputs
from tokenmill.quantize.steps import better, damped, stepped

_ROUNDS = 200
_DAMPING = 0.01
"""The part of the inputs' mean energy that each column is given: sums over little text show directions without any."""
_HALF_QUADRATIC = 4
_NORM = 0.7
_HQQ_SHRINKS = 2
"""Without data, HQQ's norm would cut off more than models can bear."""


def clipped(weight: Tensor, spec: Spec, inputs: Inputs) -> Codes:
    """Round to the nearest code of the grid that changes the outputs least, group by group (AWQ's clipping); then
    choose all steps of a row at once, for the codes that were found."""
    rows, columns = weight.shape
    groups = columns // spec.group
    blocks = inputs.hessian.view(groups, spec.group, groups, spec.group)
    blocks = torch.stack([blocks[g, :, g] for g in range(groups)])

    def tried(shrink: float) -> tuple[Tensor, Tensor, Tensor]:
        scales, zeros = grid(weight, spec, shrink)
        error = (rounded(weight, scales, zeros, spec).dense() - weight).view(rows, groups, spec.group)
        return scales, zeros, (torch.einsum("rgi,gij->rgj", error, blocks) * error).sum(-1)

    hessian = damped(inputs.hessian, _DAMPING)
    codes = stepped(rounded(weight, *best_of(map(tried, SHRINKS)), spec), weight, hessian)
    return better(rounded(weight, codes.scales, codes.zeros, spec), codes, weight, hessian)


def autoround(weight: Tensor, spec: Spec, inputs: Inputs, rounds: int = _ROUNDS) -> Codes:
    """Learn whether to round up or down, from the signs of the gradients of the outputs' error (Cheng et al., 2023)."""
    hessian = inputs.hessian / max(inputs.count, 1)
    scales, zeros = fitted(weight, spec, hessian.diagonal())
    most = (1 << spec.bits) - 1
    parts = (weight.unflatten(1, (-1, spec.group)) / scales[..., None] + zeros[..., None]).flatten(1)
    wide = scales.repeat_interleave(spec.group, 1)
    middle = zeros.repeat_interleave(spec.group, 1)
    shift = torch.zeros_like(weight)
    best, least = parts.round().clamp(0, most), None
    for step in range(rounds + 1):
        codes = (parts + shift).round().clamp(0, most)
        slope = ((codes - middle) * wide - weight) @ hessian
        lost = (slope * ((codes - middle) * wide - weight)).sum(-1, keepdim=True)
        better = torch.ones_like(lost, dtype=torch.bool) if least is None else lost < least
        best = torch.where(better, codes, best)
        least = lost if least is None else torch.where(better, lost, least)
        shift = (shift - (1.0 - step / rounds) / rounds * 2.0 * (slope * wide).sign()).clamp(-0.5, 0.5)
    return Codes(best.to(torch.uint8), scales, zeros, spec)


def hqq(weight: Tensor, spec: Spec) -> Codes:
    """Prefer errors with few large entries, by half-quadratic splitting, without data (Badri, Shaji, 2023). Files hold
    whole zero points, so steps are searched as well as zero points."""
    parts, most = weight.unflatten(1, (-1, spec.group)), (1 << spec.bits) - 1
    least, best = None, grid(weight, spec)
    for shrink in SHRINKS[:_HQQ_SHRINKS]:
        scales, zeros = grid(weight, spec, shrink)
        beta = 10.0
        for _ in range(1 if spec.symmetric else _HALF_QUADRATIC):
            codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, most)
            error = parts - (codes - zeros[..., None]) * scales[..., None]
            lost = error.abs().pow(_NORM).sum(-1)
            better = torch.ones_like(lost, dtype=torch.bool) if least is None else lost < least
            best = (torch.where(better, scales, best[0]), torch.where(better, zeros, best[1]))
            least = lost if least is None else torch.where(better, lost, least)
            size = error.abs()
            kept = error.sign() * (size - size.clamp(min=1e-8).pow(_NORM - 1.0) / beta).clamp(min=0.0)
            zeros = (codes - (parts - kept) / scales[..., None]).mean(-1).round().clamp(spec.lowest, most)
            beta *= 1.01
    return rounded(weight, *best, spec)
