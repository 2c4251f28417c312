"""Rounding lines one after the other in plain torch: the specification of `RoundsLines.round_lines`. Must not know: how
scales are found, files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.lines import LineGrid


def round_lines(lines: Tensor, grid: LineGrid, upper: Tensor) -> tuple[Tensor, Tensor]:
    """lines [n, out] -> codes and errors [n, out]. (Nothing waits for the device.)"""
    lines = lines.clone(memory_format=torch.contiguous_format)
    codes, errors = torch.empty(lines.shape, dtype=torch.uint8, device=lines.device), torch.empty_like(lines)
    steps, zeros = grid.steps[grid.group], grid.zeros[grid.group]
    for n, (line, step, zero, error) in enumerate(zip(lines, steps, zeros, errors, strict=True)):
        code = torch.div(line, step).add_(zero).round_().clamp_(0, grid.most)
        codes[n] = code
        torch.div(line - code.sub_(zero).mul_(step), upper[n, n], out=error)
        lines[n + 1 :].addr_(upper[n, n + 1 :], error, alpha=-1)
    return codes, errors
