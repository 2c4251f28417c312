"""The tensors of recurrent states. Owns: one state per row and layer, places for the states behind one step's drafts,
slots for kept states, and copies between them.

Must not know: sequences, the prefix cache, which slot is whose. The last row is the spare row, which fills up recorded
steps.

    rows 0 .. rows - 1 | the spare row | `trail` places, where a step leaves the states that rows may have to return to
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.compute.forward import StateSpec
from tokenmill.kvcache.zeros import zeros

Make = Callable[[int, int, str], Tensor]
Pairs = list[tuple[Tensor, Tensor]]
Copy = Callable[[Pairs, Tensor, Tensor], None]


class StatePool:
    """`views[i]`: the parts of layer i's states by row and, from `first` on, by draft: [rows + 1 + trail, ...] each."""

    def __init__(
        self,
        specs: tuple[StateSpec, ...],
        rows: int,
        slots: int,
        device: str,
        copy: Copy,
        trail: int = 0,
        make: Make = zeros,
    ) -> None:
        """copy: the backend's copy_rows_. trail: how many drafts may be tried in a step. make: makes zeroed memory."""
        self.trail = trail
        self.first = rows + 1
        self.nowhere = slots
        """The slot for states that are not to be kept."""
        self.views = [_zeros(spec, rows + 1 + trail, device, make) for spec in specs]
        self.kept = [_zeros(spec, slots + (trail > 0), device, make) for spec in specs]
        self._copy = copy
        self._among, self._back, self._away = (
            [pair for old, new in zip(source, target, strict=True) for pair in zip(old, new, strict=True)]
            for source, target in ((self.views, self.views), (self.kept, self.views), (self.views, self.kept))
        )

    @property
    def size_bytes(self) -> int:
        """The bytes of all states, kept ones included."""
        return sum(part.nbytes for layer in (*self.views, *self.kept) for part in layer)

    def drop(self, rows: list[int]) -> None:
        """Rows without states."""
        for layer in self.views:
            for part in layer:
                part[rows] = 0

    def restore(self, slots: Tensor, rows: Tensor) -> None:
        """Copy the states kept in `slots` [n] to `rows` [n]."""
        self._copy(self._back, slots, rows)

    def move(self, froms: Tensor, rows: Tensor) -> None:
        """Copy the states at places `froms` [n] to `rows` [n]."""
        self._copy(self._among, froms, rows)

    def keep(self, froms: Tensor, slots: Tensor) -> None:
        """Keep the states at places `froms` [n] in `slots` [n]."""
        self._copy(self._away, froms, slots)


def row_bytes(specs: tuple[StateSpec, ...]) -> int:
    """The bytes of one row's states."""
    return sum(spec.size_bytes for spec in specs)


def _zeros(spec: StateSpec, count: int, device: str, make: Make) -> tuple[Tensor, ...]:
    made = []
    for dtype, shape in spec.parts:
        kind = getattr(torch, dtype)
        made.append(make(count, math.prod(shape) * kind.itemsize, device).view(kind).view(count, *shape))
    return tuple(made)
