"""Integers with scales and zero points as methods make them. Owns: the grid, and rounding to it.

    weight[n, k] ~ (codes[n, k] - zeros[n, k // group]) * scales[n, k // group]       codes from 0 to 2^bits - 1
Must not know: files, inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SHRINKS = tuple(1.0 - 0.05 * i for i in range(12))
"""The parts of a group's range that are tried. A smaller part cuts off extremes but gives finer steps."""


@dataclass(frozen=True, slots=True)
class Spec:
    """How fine the codes are: bits, columns that share a scale, whether the middle code is zero; the lowest zero point
    that files can hold."""

    bits: int
    group: int
    symmetric: bool
    lowest: int = 0


@dataclass(frozen=True, slots=True)
class Codes:
    """A rounded matrix: codes [out, in] uint8, scales [out, groups] (numbers that float16 has), and whole zero points
    of that shape."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    spec: Spec

    def dense(self) -> Tensor:
        """[out, in] float32."""
        group = self.codes.shape[1] // self.scales.shape[1]
        parts = self.codes.float().unflatten(1, (-1, group))
        return ((parts - self.zeros.float()[..., None]) * self.scales.float()[..., None]).flatten(1)


def grid(weight: Tensor, spec: Spec, shrink: float = 1.0) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> scales and zeros [out, groups] that span each group's range times `shrink`."""
    return _spanning(_range(weight.unflatten(1, (-1, spec.group)), spec), spec, shrink)


def _range(parts: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """The lowest and the highest number of each group; of symmetric grids, the largest magnitude twice."""
    if spec.symmetric:
        top = parts.abs().amax(-1)
        return top, top
    return parts.amin(-1).clamp(max=0.0), parts.amax(-1).clamp(min=0.0)


def _spanning(ends: tuple[Tensor, Tensor], spec: Spec, shrink: float) -> tuple[Tensor, Tensor]:
    """Scales and zeros of grids that span this part of a range."""
    low, high = ends[0] * shrink, ends[1] * shrink
    most = (1 << spec.bits) - 1
    if spec.symmetric:
        scales = representable(high * 2 / most)
        return scales, torch.full_like(scales, (most + 1) // 2)
    wanted = torch.maximum(
        (high - low) / most, high / (most - spec.lowest)
    )  # the zero point may lie above the lowest code
    scales = representable(wanted)
    return scales, (-low / scales).round().clamp(spec.lowest, most)


def representable(scales: Tensor) -> Tensor:
    """The nearest numbers that float16 has, none of them zero."""
    return scales.clamp(min=1e-6, max=6e4).half().float()


def rounded(weight: Tensor, scales: Tensor, zeros: Tensor, spec: Spec) -> Codes:
    """Round to the nearest code."""
    parts = weight.unflatten(1, (-1, spec.group)) / scales[..., None] + zeros[..., None]
    codes = parts.round_().clamp_(0, (1 << spec.bits) - 1).flatten(1).to(torch.uint8)
    return Codes(codes, scales, zeros, spec)


def nearest(weight: Tensor, spec: Spec) -> Codes:
    """Round to the nearest code of the grid that spans each group."""
    return rounded(weight, *grid(weight, spec), spec)


def fitted(weight: Tensor, spec: Spec, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round to the best of the grids by SHRINKS: the one with the least squared error, weighted with `importance`
    [in]."""
    parts = weight.unflatten(1, (-1, spec.group))
    each = None if importance is None else importance.view(-1, spec.group)
    ends = _range(parts, spec)

    def tried(shrink: float) -> tuple[Tensor, Tensor, Tensor]:
        scales, zeros = _spanning(ends, spec, shrink)
        error = _errors(parts, scales[..., None], zeros[..., None], spec).square_()
        return scales, zeros, (error if each is None else error.mul_(each)).sum(-1)

    return best_of(map(tried, SHRINKS))


def best_of(grids: Iterable[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(scales, zeros, what each group loses) of many grids -> scales and zeros of those by which each group loses
    least."""
    rest = iter(grids)
    scales, zeros, least = next(rest)
    for other_scales, other_zeros, lost in rest:
        better = lost < least
        scales, zeros = torch.where(better, other_scales, scales), torch.where(better, other_zeros, zeros)
        least = torch.where(better, lost, least)
    return scales, zeros


def _errors(parts: Tensor, scales: Tensor, zeros: Tensor, spec: Spec) -> Tensor:
    """What rounding to the nearest code adds to each number, in one tensor of that size."""
    codes = (parts / scales).add_(zeros).round_().clamp_(0, (1 << spec.bits) - 1)
    return codes.sub_(zeros).mul_(scales).sub_(parts)
