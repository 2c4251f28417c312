"""Rounding a matrix to integers with the scales that give the least error. Owns: the search. Must not know: files,
layers."""

from __future__ import annotations

import torch
from torch import Tensor

DIVISORS = {
    4: [7.0, 7.25, 7.5, 7.75, 8.0, 8.25, 8.5, 8.75, 9.0, 9.5, 10.0, 6.5],
    8: [127.0, 127.5, 128.0, 129.0, 131.0, 134.0],
}
"""Scales that are tried: the largest magnitude of a group divided by each of these. Larger divisors cut off the
extremes."""
_ROWS = 512


def round_best(weight: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """weight [out, in] -> q int8, scales [out, in / group] (numbers that `dtype` and float16 both have), and the
    relative error |w - q * scale| / |w|."""
    rows, columns = weight.shape
    q = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, columns // group)
    lost = total = 0.0
    for start in range(0, rows, _ROWS):
        part = weight[start : start + _ROWS].float().reshape(-1, columns // group, group)
        scale, error = _search(part, bits, dtype)
        q[start : start + _ROWS] = _rounded(part, scale, bits).reshape(-1, columns).to(torch.int8)
        scales[start : start + _ROWS] = scale[..., 0]
        lost, total = lost + float(error.double().sum()), total + float(part.double().square().sum())
    return q, scales.to(dtype), (lost / total) ** 0.5 if total else 0.0


def _search(part: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Search the best scale [rows, groups, 1]; also returns its squared error [rows, groups]."""
    top = part.abs().amax(-1, keepdim=True)
    best = worst = None
    for divisor in DIVISORS[bits]:
        scale = (top / divisor).half().to(dtype).float()
        error = (part - _rounded(part, scale, bits) * scale).square().sum(-1)
        if best is None or worst is None:
            best, worst = scale, error
            continue
        better = error < worst
        best, worst = torch.where(better[..., None], scale, best), torch.where(better, error, worst)
    assert best is not None and worst is not None
    return best, worst


def _rounded(part: Tensor, scale: Tensor, bits: int) -> Tensor:
    half = 1 << (bits - 1)
    return torch.where(scale > 0, part / scale, 0.0).round_().clamp_(-half, half - 1)
