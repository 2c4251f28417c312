"""Scales (and offsets) for groups of numbers that become small integers or entries of a table. Owns: the searches.

    x ~ s q        or        x ~ s q + m, m <= 0        least sum of c (x - what is stored)^2, c: what a column counts

Several scales are tried; for the integers that each gives the best scale follows by least squares. A shared scale of a
block is chosen the same way, over the block's own numbers. Must not know: how blocks lie in bytes, files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Levels = Callable[[Tensor], Tensor]
"""Numbers of any size -> the nearest ones that can be stored, in float32."""
TINY = 1e-30


def integers(low: int, high: int) -> Levels:
    """The whole numbers from low to high."""
    return lambda x: x.round().clamp_(low, high)


def entries(table: Sequence[int]) -> Levels:
    """The entries of an ascending table of bytes."""
    names, values = named(table), torch.tensor(table, dtype=torch.float32)
    return lambda x: values.to(x.device)[names(x).long()]


def named(table: Sequence[int]) -> Levels:
    """Numbers -> index of the nearest entry, uint8. Entries are whole numbers, so borders lie at halves and floor(2 x)
    decides."""
    halves = torch.arange(-256, 256) / 2 + 0.25
    values = torch.tensor(table, dtype=torch.float32)
    nearest = (halves[:, None] - values).abs().argmin(1).to(torch.uint8)
    return lambda x: nearest.to(x.device)[(2.0 * x).floor_().clamp_(-256.0, 255.0).long() + 256]


def counted(importance: Tensor | None, x: Tensor) -> Tensor:
    """The weight of each number's squared error, in the shape of x. importance: one number per column of a row."""
    if importance is None:
        return torch.ones((), device=x.device).expand_as(x)
    # sums of very small or very large weights would leave the range of float32
    level = importance / importance.mean().clamp(min=TINY)
    return level.expand(x.numel() // len(level), -1).reshape(x.shape)


def divided(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, or 0 where the scale is 0."""
    return torch.where(scale != 0, x / torch.where(scale != 0, scale, 1.0), 0.0)


def scales(x: Tensor, c: Tensor, levels: Levels, largest: float, trials: Sequence[float]) -> Tensor:
    """Find scales: x, c [..., n] -> [..., 1]. `largest`: the level that the largest magnitude takes, divided by a
    trial."""
    owner = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    best = least = None
    for by in trials:
        first = owner / largest * by
        for s in (first, _refitted(x, c, levels(divided(x, first)), first)):
            error = (c * (levels(divided(x, s)) * s - x).square()).sum(-1, keepdim=True)
            if best is None or least is None:
                best, least = s, error
                continue
            better = error < least
            best, least = torch.where(better, s, best), torch.where(better, error, least)
    assert best is not None
    return best


def _refitted(x: Tensor, c: Tensor, q: Tensor, instead: Tensor) -> Tensor:
    """The best scale for these levels."""
    square = (c * q * q).sum(-1, keepdim=True)
    return torch.where(square > TINY, (c * x * q).sum(-1, keepdim=True) / square.clamp(min=TINY), instead)


def scales_and_offsets(x: Tensor, c: Tensor, most: int, trials: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Find scales >= 0 and offsets <= 0: x, c [..., n] -> [..., 1] each, for whole numbers from 0 to `most`."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0.0), x.amax(-1, keepdim=True)
    weight = c.sum(-1, keepdim=True)
    mean = (c * x).sum(-1, keepdim=True)
    best: tuple[Tensor, Tensor] | None = None
    least = None
    for by in trials:
        s, m = (high - low).clamp(min=0.0) / most * by, low * min(by, 1.0)
        q = divided(x - m, s).round_().clamp_(0, most)
        first, second, cross = ((c * part).sum(-1, keepdim=True) for part in (q, q * q, q * x))
        space = weight * second - first * first
        fits = space > TINY
        space = torch.where(fits, space, 1.0)
        free = torch.where(fits, (weight * cross - mean * first) / space, s)
        offset = torch.where(fits, (second * mean - first * cross) / space, m)
        bound = torch.where(second > TINY, cross / second.clamp(min=TINY), s)  # the best scale without an offset
        free, offset = torch.where(offset > 0, bound, free), offset.clamp(max=0.0)
        for one in ((s, m), (free.clamp(min=0.0), offset)):
            error = (c * (divided(x - one[1], one[0]).round().clamp(0, most) * one[0] + one[1] - x).square()).sum(
                -1, keepdim=True
            )
            if best is None or least is None:
                best, least = one, error
                continue
            better = error < least
            best = (torch.where(better, one[0], best[0]), torch.where(better, one[1], best[1]))
            least = torch.where(better, error, least)
    assert best is not None
    return best


def shared(values: Tensor, weights: Tensor, low: int, high: int, trials: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Find one scale per block: values, weights [blocks, groups] -> a scale [blocks, 1] exact in half precision, and
    whole numbers low..high whose products with it are nearest to the values."""
    found = scales(values, weights, integers(low, high), float(low if low < 0 else high), trials)
    d = found.clamp(-65504.0, 65504.0).half().float()
    return d, divided(values, d).round().clamp(low, high)
