"""Linear layers over ranks. Owns: which rows or columns of a weight a rank holds. Knows nothing of formats.

Column-parallel layers concatenate what a layer multiplies together (q/k/v, gate/up), each part split by its units
(heads); a part with fewer units than ranks is repeated. Row-parallel ones sum over the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.core.forward import ForwardContext
from tokenmill.core.protocols import Group
from tokenmill.layers.build import Build


@dataclass(frozen=True, slots=True)
class Rows:
    """One part of a column-parallel weight: its rows before splitting, and the units they may be split by."""

    rows: int
    units: int

    def share(self, group: Group) -> tuple[int, int]:
        """(part, parts) of this rank."""
        parts = min(self.units, group.size)
        if self.units % parts or group.size % parts:
            raise ModelError(f"{self.units} heads or columns cannot be split over {group.size} ranks.")
        return group.rank * parts // group.size, parts

    def index(self, start: int, group: Group) -> Tensor:
        """This rank's row numbers, if the part begins at `start`."""
        part, parts = self.share(group)
        size = self.rows // parts
        return torch.arange(start + part * size, start + (part + 1) * size)


class ColumnLinear:
    """[part; part; ...] along out, this rank's share, as `weight`; `names` are the checkpoint paths of the parts."""

    def __init__(
        self, b: Build, inputs: int, parts: Mapping[str, Rows], *, bias: bool = False, transposed: bool = False
    ) -> None:
        self.names = [b.path(name) for name in parts]
        self.parts = list(parts.values())
        weights = []
        for name, rows in parts.items():
            weight = b.weight(name, (rows.rows, inputs), bias=bias, transposed=transposed)
            weights.append(weight.split(0, *rows.share(b.group)))
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
            starts = [sum(part.rows for part in self.parts[:i]) for i in range(len(self.parts))]
            index = torch.cat([part.index(start, b.group) for part, start in zip(self.parts, starts, strict=True)])
            weight = weight.take((index if order is None else order[index]).to(b.device))
        self.weight = b.settled(weight)


class GatedColumnLinear(ColumnLinear):
    """[q; k; v; gate] from three tensors, the first of which holds the rows of q and gate; `order` puts these into
    [q; gate] first."""

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
        queries, gates = (both.take(order[first.index(at, b.group)].to(b.device)) for at in (0, first.rows))
        keys = [
            b.weight(name, (part.rows, inputs), bias=bias).split(0, *part.share(b.group))
            for name, part in zip(names[1:], others, strict=True)
        ]
        self.weight = b.settled(queries.concat([*keys, gates]))


class RowLinear:
    """Split along in; partial results are summed over the group, together with the residual."""

    def __init__(
        self, b: Build, inputs: int, outputs: int, name: str, *, bias: bool = False, transposed: bool = False
    ) -> None:
        self.names = [b.path(name)]
        self.group = b.group
        weight = b.weight(name, (outputs, inputs), bias=bias, transposed=transposed)
        self.weight = b.settled(weight.split(1, b.group.rank, b.group.size))

    def __call__(self, x: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """residual + x @ W.T + bias -> [T, out]."""
        if self.group.size == 1:
            return self.weight.matmul(x, ctx, residual=residual)
        return self.group.all_reduce(self.weight.matmul(x, ctx), residual)
