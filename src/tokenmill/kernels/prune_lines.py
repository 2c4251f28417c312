"""Pruning lines one after the other in plain torch: the specification of `RoundsLines.prune_lines`. Must not know: what
is pruned where no pattern says it, files.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prune_lines(lines: Tensor, upper: Tensor, gone: Tensor | None, zeros: int, of: int) -> tuple[Tensor, Tensor]:
    """lines [n, out] -> what is left of them, and errors [n, out]. (Nothing waits for the device.)"""
    lines, errors = lines.clone(memory_format=torch.contiguous_format), torch.empty_like(lines)
    pattern, pivots = gone is None, upper.diagonal()
    gone = torch.zeros_like(lines, dtype=torch.bool) if gone is None else gone
    for n, error in enumerate(errors):
        if pattern and n % of == 0:
            near = slice(n, n + of)
            cost = lines[near].square() / pivots[near].square()[:, None]
            gone[near].scatter_(0, cost.argsort(dim=0, stable=True)[:zeros], True)
        torch.div(torch.where(gone[n], lines[n], 0.0), pivots[n], out=error)
        lines[n + 1 :].addr_(upper[n, n + 1 :], error, alpha=-1)
    return lines.masked_fill_(gone, 0.0), errors
