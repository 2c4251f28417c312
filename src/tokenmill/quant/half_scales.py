"""Scales from files in half precision, as integer formats hold them. Owns: how scales outside its range are treated.

Scales and offsets above float16's range are refused. If all scales of a matrix are below its normal numbers, they would
lose their digits or become zero, so the matrix is held dense. (Single small scales among larger ones lose less than the
larger ones do.) It is also held dense if zero points that are fractions are so large that half precision moves them by
half a step, and if no kernel knows its groups. Must not know: files, layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.kernels.grid import SMALLEST_HALF
from tokenmill.quant.base import known
from tokenmill.quant.column_order import OrderedWeight
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.grid import GridWeight

Held = GridWeight | OrderedWeight | DenseWeight
_LARGEST_ZERO = 1024.0
"""Half precision has steps of less than 1 up to here."""
_RUN = 32
_NOTHING = 2.0**-24
"""Steps that are such a part of their group's offset do not change it in float32."""


def with_zeros(codes: Tensor, scales: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """codes [n, m] * scales + offsets (both [n, g]) as (codes - zeros) * scales. A group of equal numbers may have a
    scale of 0 and only an offset: this becomes its scale."""
    flat = offsets.abs() * _NOTHING > scales.abs()
    zeros = torch.where(flat, -1.0, torch.where(scales != 0, -offsets / scales, 0.0))
    spread = flat.repeat_interleave(codes.shape[1] // flat.shape[1], 1)
    return torch.where(spread, 0, codes), torch.where(flat, offsets, scales), zeros


def kernels_know(group: int, columns: int) -> bool:
    """Have kernels a form of groups of so many columns? A group is a whole row, or whole runs of 32 that fill it."""
    return group == columns or (group % _RUN == 0 and columns % group == 0)


def held(
    q: Tensor,
    scales: Tensor,
    *,
    bits: int,
    group: int,
    kind: tuple[torch.dtype, Tensor | None],
    what: str,
    zeros: Tensor | None = None,
    order: Tensor | None = None,
) -> Held:
    """(q - zeros) * scales with one scale per `group` columns. order: column p of the matrix by groups is column
    order[p] of q. kind: the compute dtype and the bias. what: the name of the scales' tensor, for messages."""
    q = q if order is None else q[:, order]
    halves = scales.half()
    if known(halves) and not bool(torch.isfinite(halves).all()):
        raise ModelError(f"'{what}' has numbers beyond float16's range, or NaN.")
    if not kernels_know(group, q.shape[1]) or (known(halves) and (too_small(scales) or _too_large(zeros))):
        return DenseWeight(_numbers(q, scales, zeros, group, order).to(kind[0]), kind[1])
    grid = GridWeight(q, halves, bits=bits, group=group, dtype=kind[0], bias=kind[1], zeros=zeros)
    return grid if order is None else OrderedWeight(grid, order, q.shape[1])


def too_small(scales: Tensor) -> bool:
    """Are all scales below float16's normal numbers, so that they would lose nearly all digits?"""
    return bool(scales.numel()) and 0.0 < float(scales.float().abs().max()) < SMALLEST_HALF


def _too_large(zeros: Tensor | None) -> bool:
    """Would half precision move some of these zero points by a whole step?"""
    return zeros is not None and zeros.is_floating_point() and float(zeros.abs().max()) > _LARGEST_ZERO


def _numbers(q: Tensor, scales: Tensor, zeros: Tensor | None, group: int, order: Tensor | None) -> Tensor:
    """The matrix in float32."""
    columns = q.shape[1]
    wide = [None if t is None else t.float().repeat_interleave(group, 1)[:, :columns] for t in (scales, zeros)]
    steps, moved = wide
    assert steps is not None
    values = (q.float() if moved is None else q.float() - moved) * steps
    if order is None:
        return values
    back = torch.empty_like(values)
    back[:, order] = values
    return back
