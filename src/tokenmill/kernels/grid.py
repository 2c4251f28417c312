"""Integer weights in plain torch. Owns: rounding a matrix to int8 or int4 with float16 scales, and its product.

    weight[n, k] ~ q[n, k] * scale[n, k // group]         int8: -127..127     int4: -8..7
Must not know: weights as objects, layers, files.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LOWEST = {8: -127, 4: -8}
HIGHEST = {8: 127, 4: 7}
ACTIVATION_GROUP = 32
SMALLEST_HALF = 2.0**-14
"""The smallest normal number of float16."""


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What a nibble means as a 4 bit float: sign, two bits of exponent, one of mantissa."""


def whole_entries(table: Tensor) -> tuple[Tensor, float]:
    """Whole numbers [n] of at most 127 and a unit: table ~ numbers * unit, as closely as one unit can make it."""
    top = float(table.abs().max())
    if not top:
        return torch.zeros_like(table), 1.0
    units = [unit for unit in (1.0, 0.5, 0.25) if top / unit <= 127] + [top / most for most in range(127, 63, -1)]
    best = units[0]
    least = _lost(table, best)
    for unit in units[1:]:
        if not least:  # the usual case, and every matrix of a mixture asks
            break
        if (lost := _lost(table, unit)) < least:
            least, best = lost, unit
    return (table / best).round(), best


def _lost(table: Tensor, unit: float) -> float:
    return float(((table / unit).round() * unit - table).double().square().sum())


def group_width(columns: int, groups: int) -> int:
    """The smallest multiple of 32 that cuts `columns` into `groups`."""
    least = math.ceil(columns / groups)
    return math.ceil(least / ACTIVATION_GROUP) * ACTIVATION_GROUP


def grid_linear(x: Tensor, q: Tensor, scales: Tensor, bias: Tensor | None = None, apart: float = 0.0) -> Tensor:
    """x [T, K] @ (q [N, K] * scales [N, groups]).T + bias -> [T, N] in x's dtype.

    On a CPU both sides are integers: a group's sum is exact in any order, and groups add up one after the other, so
    rows are stable without padding. If `apart` is given, activations of that magnitude or more are not rounded: their
    products are added one column after the other. Elsewhere the weight is widened.
    """
    columns = q.shape[1]
    group = group_width(columns, scales.shape[1])
    if x.device.type != "cpu":
        weight = (q.float() * scales.float().repeat_interleave(group, dim=1)[:, :columns]).to(x.dtype)
        return F.linear(x, weight, bias)
    y = torch.zeros(x.shape[0], q.shape[0])
    own = x.float()
    large = torch.where(own.abs() >= apart, own, 0.0) if apart else torch.zeros_like(own[:0])
    own = torch.where(own.abs() >= apart, 0.0, own) if apart else own
    for start in range(0, columns, ACTIVATION_GROUP):
        part = own[:, start : start + ACTIVATION_GROUP]
        top = part.abs().amax(-1, keepdim=True)
        rounded = torch.where(top > 0, part * _inverse_step(top), 0.0).round()
        dots = rounded @ q[:, start : start + ACTIVATION_GROUP].float().T
        y += dots * scales[:, start // group].float() * (top / 127.0)
    for column in large.any(0).nonzero().flatten().tolist():
        weights = q[:, column].float() * scales[:, column // group].float()
        some = large[:, column] != 0  # the others stay as they are, so that no row depends on company
        y[some] += large[some, column, None] * weights
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _inverse_step(top: Tensor) -> Tensor:
    """127 / top, truly divided as the native kernels do; a number divided by a tensor is its reciprocal times it."""
    return torch.full_like(top, 127.0) / top


def affine_linear(x: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ (q [N, K] * scale + offset [N, K / group]).T + bias -> [T, N] in x's dtype; group 16 or 32.

    On a CPU as grid_linear: an offset multiplies the sum of its group's rounded activations.
    """
    group = q.shape[1] // scale.shape[1]
    if x.device.type != "cpu":
        return F.linear(x, widen_affine(q, scale, offset).to(x.dtype), bias)
    y = torch.zeros(x.shape[0], q.shape[0])
    for start in range(0, q.shape[1], ACTIVATION_GROUP):
        part = x[:, start : start + ACTIVATION_GROUP].float()
        top = part.abs().amax(-1, keepdim=True)
        rounded = torch.where(top > 0, part * _inverse_step(top), 0.0).round()
        step = top / 127.0
        for at in range(start, start + part.shape[1], group):
            some = rounded[:, at - start : at - start + group]
            y += (some @ q[:, at : at + group].float().T) * scale[:, at // group] * step
            if offset is not None:
                y += some.sum(-1, keepdim=True) * offset[:, at // group] * step
    return (y if bias is None else y + bias.float()).to(x.dtype)


def widen_affine(q: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """The float32 values [n, in] of integers with a scale (and an offset) per group."""
    values = q.view(q.shape[0], scale.shape[1], -1).float() * scale[..., None]
    if offset is not None:
        values += offset[..., None]
    return values.view(q.shape)


def quantise(weight: Tensor, bits: int, group: int = 32) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> q int8 and scales float16, rounded to nearest.

    int8 scales by the largest magnitude; int4 lets the entry of largest magnitude become exactly -8, so that the
    longer side of the range is used.
    """
    rows, columns = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -columns % group)).view(rows, -1, group)
    top = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
    scales = (top.abs() / 127.0 if bits == 8 else top / -8.0).half()
    steps = scales.float()
    q = torch.where(steps != 0, wide / steps, 0.0).round_().clamp_(LOWEST[bits], HIGHEST[bits]).to(torch.int8)
    return q.view(rows, -1)[:, :columns].contiguous(), scales[..., 0]


def beyond_half(weight: Tensor, scales: Tensor, bits: int, parts: int = 1) -> bool:
    """Would float16 scales spoil this matrix, or one of so many equal parts of its rows, because some are too large for
    it, or all so small that its steps lose more than rounding to 8 bits does? (Integers would hide that numbers are
    NaN.)"""
    if weight.device.type == "meta" or not weight.numel():
        return False
    least, most = weight.aminmax() if parts == 1 else torch.aminmax(weight.reshape(parts, -1), dim=1)
    largest = scales.reshape(parts, -1).abs().amax(1)
    found = torch.stack([each.float().reshape(parts) for each in (least, most, largest)], 1)
    return any(
        not all(math.isfinite(x) for x in part) or 0.0 < max(-part[0], part[1]) / -LOWEST[bits] < SMALLEST_HALF / 8
        for part in found.tolist()
    )


def widen(q: Tensor, scales: Tensor) -> Tensor:
    """The float32 values [n, in] of a grid."""
    wide = scales.float().repeat_interleave(group_width(q.shape[1], scales.shape[1]), dim=1)
    return q.float() * wide[:, : q.shape[1]]
