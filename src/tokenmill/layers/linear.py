"""Linear layers over ranks. Owns: which rows or columns of a weight a rank holds. Knows nothing of formats.

Column-parallel layers concatenate what a layer multiplies together (q/k/v, gate/up), each part split by its units
(heads); keys and values with fewer heads than there are ranks are repeated. Row-parallel ones sum over the group. In an
exact group they gather what they multiply instead, compute some rows of the result, and gather these: nothing is added
in another order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext
from tokenmill.compute.model import Group
from tokenmill.core.errors import UnevenError
from tokenmill.layers.build import Build

TILE = 64
"""How many columns a backend computes together. If halves are not whole tiles, gated activations round differently."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One part of a column-parallel weight: its rows before splitting, and the units by which they may be split."""

    rows: int
    units: int
    bare: bool = False
    """Nothing is fused with the product, so any cut gives the same bytes."""
    repeats: bool = False
    """If there are fewer units than ranks, several ranks have the same unit (keys and values)."""

    def share(self, group: Group) -> tuple[int, int]:
        """(part, parts) of this rank; (0, 1): every rank has the whole."""
        if group.exact and self.units == self.rows and not self.bare and not self._cuts_evenly(group.size):
            return 0, 1
        parts = min(self.units, group.size) if self.repeats else group.size
        if self.units % parts or group.size % parts:
            raise UnevenError(f"{self.units} heads or columns", group.size)
        return group.rank * parts // group.size, parts

    def _cuts_evenly(self, parts: int) -> bool:
        """Is a part cut into the same tiles as the whole?"""
        return self.rows % parts == 0 and (self.rows % TILE != 0 or self.rows // parts % TILE == 0)

    def index(self, start: int, group: Group) -> Tensor:
        """This rank's row numbers, if the part begins at `start`."""
        part, parts = self.share(group)
        size = self.rows // parts
        return torch.arange(start + part * size, start + (part + 1) * size)


def share_out(b: Build, what: str, units: int, shared: int = 1) -> Build:
    """b, if `units` heads, which lie in `shared` groups, can be split into equal parts for its ranks; otherwise a Build
    with which each rank computes all of them. what: the layers' name in reports."""
    size = b.group.size
    return b if units % size == 0 and (shared % size == 0 or size % shared == 0) else b.alone(what)


def local_rows(group: Group, parts: Sequence[Rows]) -> Tensor:
    """The numbers of this rank's rows in a tensor that holds these parts one behind the other."""
    starts = [sum(part.rows for part in parts[:i]) for i in range(len(parts))]
    return torch.cat([part.index(start, group) for part, start in zip(parts, starts, strict=True)])


class ColumnLinear:
    """`weight` is this rank's share of [part; part; ...] along out; `names` are the checkpoint paths of the parts."""

    def __init__(
        self,
        b: Build,
        inputs: int,
        parts: Mapping[str, Rows],
        *,
        bias: bool | Collection[str] = False,
        transposed: bool = False,
    ) -> None:
        """bias: all parts have one, or none, or those that are named."""
        self.names = [b.path(name) for name in parts]
        self.parts = list(parts.values())
        weights = []
        for name, rows in parts.items():
            share, has = (0, *rows.share(b.group)), bias if isinstance(bias, bool) else name in bias
            weights.append(b.weight(name, (rows.rows, inputs), bias=has, transposed=transposed, share=share))
        self.weight = b.settled(weights[0].concat(weights[1:]))


class FusedColumnLinear(ColumnLinear):
    """The same from one tensor that holds all parts; `order` puts its rows into [part; part; ...] first."""

    def __init__(
        self,
        b: Build,
        inputs: int,
        name: str,
        parts: Sequence[Rows],
        *,
        order: Tensor | None = None,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        self.names = [b.path(name)]
        self.parts = list(parts)
        total = sum(part.rows for part in parts)
        weight = b.weight(name, (total, inputs), bias=bias, transposed=transposed)
        if order is not None or b.group.size > 1:
            index = local_rows(b.group, self.parts)
            weight = weight.take(b.order(index if order is None else order[index]))
        self.weight = b.settled(weight)


class ReorderedColumnLinear(ColumnLinear):
    """The same from several tensors that each hold some parts: name -> (parts, order of its rows)."""

    def __init__(self, b: Build, inputs: int, stored: Mapping[str, tuple[Sequence[Rows], Tensor]]) -> None:
        self.names = [b.path(name) for name in stored]
        self.parts = [part for parts, _ in stored.values() for part in parts]
        weights = []
        for name, (parts, order) in stored.items():
            weight = b.weight(name, (sum(part.rows for part in parts), inputs))
            weights.append(weight.take(b.order(order[local_rows(b.group, parts)])))
        self.weight = b.settled(weights[0].concat(weights[1:]))


class GatedColumnLinear(ColumnLinear):
    """[q; k; v; gate] from three tensors. The first holds the rows of q and gate, which `order` first puts into [q;
    gate]."""

    def __init__(
        self,
        b: Build,
        inputs: int,
        names: tuple[str, str, str],
        parts: tuple[Rows, Rows, Rows],
        *,
        order: Tensor,
        bias: bool = False,
    ) -> None:
        self.names = [b.path(name) for name in names]
        self.parts = [*parts, parts[0]]
        first, *others = parts
        both = b.weight(names[0], (2 * first.rows, inputs), bias=bias)
        queries, gates = (both.take(b.order(order[first.index(at, b.group)])) for at in (0, first.rows))
        keys = [
            b.weight(name, (part.rows, inputs), bias=bias, share=(0, *part.share(b.group)))
            for name, part in zip(names[1:], others, strict=True)
        ]
        self.weight = b.settled(queries.concat([*keys, gates]))


class RowLinear:
    """Split along in; partial results are summed over the group, together with the residual. In an exact group: split
    along out, after gathering x."""

    def __init__(
        self, b: Build, inputs: int, outputs: int, name: str, *, bias: bool = False, transposed: bool = False
    ) -> None:
        self.names = [b.path(name)]
        self.group = b.group
        self.inputs = inputs
        share = (0 if b.group.exact else 1, b.group.rank, b.group.size)
        self.weight = b.settled(b.weight(name, (outputs, inputs), bias=bias, transposed=transposed, share=share))

    def __call__(self, x: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """residual + x @ W.T + bias -> [T, out]."""
        if self.group.size == 1:
            return self.weight.matmul(x, ctx, residual=residual)
        if not self.group.exact:
            return self.group.all_reduce(self.weight.matmul(x, ctx), residual)
        mine = None if residual is None else local_columns(residual, self.group)
        return self.group.all_gather(self.weight.matmul(self.whole(x), ctx, residual=mine))

    def open(self, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        """x @ W.T (this rank's part of it) in parts that whoever reads the sum adds up; None: it is not made so."""
        return self.weight.open(x, ctx) if self.group.size == 1 or self.group.adds_parts else None

    def whole(self, x: Tensor) -> Tensor:
        """All columns of x, gathered if each rank has only some of them."""
        return x if x.shape[-1] == self.inputs else self.group.all_gather(x)


def local_columns(x: Tensor, group: Group) -> Tensor:
    """This rank's equal part of the columns of x [T, D], as a view."""
    width = x.shape[-1] // group.size
    return x[:, group.rank * width : (group.rank + 1) * width]
