"""GPTQ's rounding of a block of lines (columns of a weight), one after the other, in one launch. Owns: that kernel.

A program holds all lines of a tile of rows in registers. Rows know nothing of each other, so nothing is shared between
programs. Each number goes through the same operations in the same order as in kernels/round_lines.py. So codes differ
only where a multiplication that is joined with a subtraction rounds a number to the other side of a tie.
Must not know: how scales are found, in which order lines come.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.lines import LineGrid

MOST_LINES = 128
"""Lines of a launch. More would not fit into registers."""
_ROWS, _WARPS = 32, 4


@triton.jit
def _round_kernel(
    line_ptr, step_ptr, zero_ptr, group_ptr, upper_ptr, code_ptr, error_ptr,
    lines, rows, line_stride, upper_stride, most, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    real = row < rows
    n = tl.arange(0, N)
    at = n[:, None] * line_stride + row[None, :]
    left = tl.load(line_ptr + at, mask=(n < lines)[:, None] & real[None, :], other=0.0)
    for i in range(lines):
        place = tl.load(group_ptr + i) * rows + row  # what needs no earlier line comes first
        step = tl.load(step_ptr + place, mask=real, other=1.0)
        zero = tl.load(zero_ptr + place, mask=real, other=0.0)
        pivot = tl.load(upper_ptr + i * upper_stride + i)
        later = tl.load(upper_ptr + i * upper_stride + n, mask=(n > i) & (n < lines), other=0.0)
        line = tl.sum(tl.where(n[:, None] == i, left, 0.0), axis=0)  # all others are zeros: it stays exact
        wanted = tl.minimum(tl.maximum(tl.div_rn(line, step) + zero, 0.0), most)
        code = (wanted + 12582912.0) - 12582912.0  # to whole numbers, ties to even
        error = tl.div_rn(line - (code - zero) * step, pivot)
        tl.store(code_ptr + i * rows + row, code.to(tl.uint8), mask=real)
        tl.store(error_ptr + i * rows + row, error, mask=real)
        left -= later[:, None] * error[None, :]


def can_round(lines: Tensor, grid: LineGrid, upper: Tensor) -> bool:
    """Does the kernel know these types and sizes?"""
    floats = all(part.dtype == torch.float32 for part in (lines, grid.steps, grid.zeros, upper))
    return floats and 0 < lines.shape[0] <= MOST_LINES and lines.shape[1] > 0


def round_lines(lines: Tensor, grid: LineGrid, upper: Tensor) -> tuple[Tensor, Tensor]:
    """See compute/lines.py."""
    count, rows = lines.shape
    lines, upper = (part if part.stride(1) == 1 else part.contiguous() for part in (lines, upper))
    codes, errors = (
        torch.empty((count, rows), dtype=kind, device=lines.device) for kind in (torch.uint8, torch.float32)
    )
    _round_kernel[(triton.cdiv(rows, _ROWS),)](
        lines, grid.steps.contiguous(), grid.zeros.contiguous(), grid.group, upper, codes, errors,
        count, rows, lines.stride(0), upper.stride(0), float(grid.most), N=MOST_LINES, R=_ROWS, num_warps=_WARPS,
    )  # fmt: skip
    return codes, errors
