"""Integer weights whose columns are grouped in another order than they are stored in (GPTQ's `g_idx`, act-order).

Owns: the order. A row is multiplied with its numbers in the order of the groups; inside is an ordinary GridWeight.
Must not know: files, layers.
"""

from __future__ import annotations

from typing import Self, Unpack

import torch
from torch import Tensor

from tokenmill.compute.forward import Around, ForwardContext, Kernels, Weight
from tokenmill.core.errors import ModelError
from tokenmill.quant.base import WeightBase
from tokenmill.quant.grid import GridWeight

_LEAST = 32
"""Columns of the smallest group that kernels know."""


class OrderedWeight(WeightBase):
    """inner [out, n]: its column p multiplies number order[p] of an input row. A number may occur several times if all
    but one of its columns are zero."""

    def __init__(self, inner: GridWeight, order: Tensor, columns: int) -> None:
        self.inner, self.order = inner, order.long()
        self.settled: Weight | None = None
        self.dtype = inner.dtype
        self.shape = (inner.shape[0], columns)

    def to(self, device: torch.device) -> Self:
        """A copy on another device. The weight must not be settled yet."""
        return type(self)(self.inner.to(device), self.order.to(device), self.shape[1])

    def settle(self, kernels: Kernels) -> Weight:
        """The inner weight in the backend's form."""
        self.settled = self.inner.settle(kernels)
        return self

    def matmul(self, x: Tensor, ctx: ForwardContext, **around: Unpack[Around]) -> Tensor:
        """residual + act(norm(x) @ W.T + bias)."""
        if (norm := around.pop("norm", None)) is not None:
            x = ctx.kernels.norm(x, norm)
        return (self.settled or self.inner).matmul(x[:, self.order], ctx, **around)

    def join(self, others: list[Self]) -> Self | None:
        """One matrix if all have the same order. (Tools quantise weights that share an input in the same order.)"""
        if any(not torch.equal(other.order, self.order) for other in others):
            return None
        inner = self.inner.join([other.inner for other in others])
        return None if inner is None else type(self)(inner, self.order, self.shape[1])

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index."""
        return type(self)(self.inner.take(index), self.order, self.shape[1])

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0) or in (1). Along in, groups are cut, and each is filled up to a multiple of 32
        columns."""
        if parts == 1:
            return self
        if dim == 0:
            return type(self)(self.inner.split(0, part, parts), self.order, self.shape[1])
        start, stop = self.part_range(1, part, parts)
        inner, group = self.inner, self.inner.group
        q, scales = inner.numbers()
        here = (self.order >= start) & (self.order < stop)
        places, groups = [], []
        for at in range(0, len(self.order), group):
            kept = torch.arange(at, min(at + group, len(self.order)), device=here.device)[here[at : at + group]]
            full = torch.full((-(-len(kept) // _LEAST) * _LEAST,), -1, dtype=torch.long, device=here.device)
            full[: len(kept)] = kept
            places.append(full)
            groups += [at // group] * (len(full) // _LEAST)
        place = torch.cat(places)
        used, chosen = place.clamp(min=0), torch.tensor(groups, device=here.device)
        zeros = None if inner.zeros is None else inner.zeros[:, chosen]
        nothing = torch.zeros_like(q[:, :1]) if zeros is None else zeros.repeat_interleave(_LEAST, 1).to(q.dtype)
        cut = GridWeight(
            torch.where(place >= 0, q[:, used], nothing),
            scales[:, chosen],
            bits=inner.bits,
            group=_LEAST,
            dtype=inner.dtype,
            bias=inner.bias if part == 0 else None,
            zeros=zeros,
        )
        return type(self)(cut, torch.where(place >= 0, self.order[used] - start, 0), stop - start)

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        found = (self.settled or self.inner).rows(ids.to(self.order.device))
        out = torch.zeros(found.shape[0], self.shape[1], dtype=found.dtype, device=found.device)
        return out.index_add_(1, self.order, found)

    def dense(self) -> Tensor:
        """The whole matrix."""
        return self.rows(torch.arange(self.shape[0]))

    def bytes(self) -> int:
        """Bytes of the codes and their order."""
        return (self.settled or self.inner).bytes() + self.order.nbytes


def in_order(groups: Tensor, group: int, count: int, what: str) -> Tensor | None:
    """The order in which columns lie group by group. groups [in]: the group of each column. None: they already lie so.
    A group that does not exist is refused, and one that does not have `group` columns (the last: what is left)."""
    if groups.dtype not in (torch.int32, torch.int64):
        raise ModelError(f"'{what}' must hold integers, not {groups.dtype}.")
    groups = groups.long()
    columns = len(groups)
    if torch.equal(groups, torch.arange(columns, device=groups.device) // group):
        return None
    lowest, highest = int(groups.min()), int(groups.max())
    if lowest < 0 or highest >= count:
        raise ModelError(f"'{what}' names group {highest if highest >= count else lowest}; there are {count}.")
    sizes = torch.bincount(groups, minlength=count)
    wanted = torch.full_like(sizes, group)
    wanted[-1] = columns - group * (count - 1)
    if not torch.equal(sizes, wanted):
        raise ModelError(f"'{what}' does not divide {columns} columns into {count} groups of {group}.")
    return torch.argsort(groups, stable=True)
