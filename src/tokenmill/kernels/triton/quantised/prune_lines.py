"""SparseGPT's pruning of a block of lines (columns of a weight), one after the other, in one launch. Owns: that kernel.

It is round_lines.py with another question for each number: not which code is nearest, but whether it becomes zero.
Which of some neighbours do is asked when the first of them is reached. Must not know: what is pruned without a pattern.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.quantised.round_lines import MOST_LINES

_ROWS, _WARPS = 32, 4


@triton.jit
def _prune_kernel(
    line_ptr, upper_ptr, gone_ptr, made_ptr, error_ptr,
    lines, rows, line_stride, upper_stride, zeros, of, PATTERN: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    real = row < rows
    n = tl.arange(0, N)
    at = n[:, None] * line_stride + row[None, :]
    left = tl.load(line_ptr + at, mask=(n < lines)[:, None] & real[None, :], other=0.0)
    pivots = tl.load(upper_ptr + n * upper_stride + n, mask=n < lines, other=1.0)
    cost = left
    for i in range(lines):
        pivot = tl.load(upper_ptr + i * upper_stride + i)
        later = tl.load(upper_ptr + i * upper_stride + n, mask=(n > i) & (n < lines), other=0.0)
        this = n[:, None] == i
        if PATTERN:
            first = i - i % of
            if i == first:
                cost = tl.div_rn(left * left, (pivots * pivots)[:, None] + tl.zeros_like(left))
            own = tl.sum(tl.where(this, cost, 0.0), axis=0)[None, :]
            near = ((n >= first) & (n < first + of) & (n < lines))[:, None]  # the last ones may be fewer
            below = (cost < own) | ((cost == own) & (n[:, None] < i))  # of equals the first goes
            gone = tl.sum((near & below).to(tl.int32), axis=0) < zeros
        else:
            gone = tl.load(gone_ptr + i * rows + row, mask=real, other=0) != 0
        line = tl.sum(tl.where(this, left, 0.0), axis=0)
        error = tl.where(gone, tl.div_rn(line, pivot), 0.0)
        tl.store(made_ptr + i * rows + row, tl.where(gone, 0.0, line), mask=real)
        tl.store(error_ptr + i * rows + row, error, mask=real)
        left -= later[:, None] * error[None, :]


def can_prune(lines: Tensor, upper: Tensor) -> bool:
    """Does the kernel know these types and sizes?"""
    floats = lines.dtype == upper.dtype == torch.float32
    return floats and 0 < lines.shape[0] <= MOST_LINES and lines.shape[1] > 0


def prune_lines(lines: Tensor, upper: Tensor, gone: Tensor | None, zeros: int, of: int) -> tuple[Tensor, Tensor]:
    """See compute/lines.py."""
    count, rows = lines.shape
    lines, upper = (part if part.stride(1) == 1 else part.contiguous() for part in (lines, upper))
    made, errors = (torch.empty((count, rows), dtype=torch.float32, device=lines.device) for _ in range(2))
    _prune_kernel[(triton.cdiv(rows, _ROWS),)](
        lines, upper, made if gone is None else gone.to(torch.uint8).contiguous(), made, errors,
        count, rows, lines.stride(0), upper.stride(0), zeros, of, PATTERN=gone is None, N=MOST_LINES, R=_ROWS,
        num_warps=_WARPS,
    )  # fmt: skip
    return made, errors
