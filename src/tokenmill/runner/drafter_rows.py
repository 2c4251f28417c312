"""Rows as a drafter's model sees them. Owns: the drafter's own layers and KV groups, and how far it is in each row.

A drafter's model reads the tokens of the rows and has pages in their block tables: its layers follow the target's in
the cache's layout. Must not know: what it guesses, plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenmill.compute.forward import KVSpec, KVView
from tokenmill.kvcache.pool import CacheLayout, KVPool
from tokenmill.runner.rows import Rows


@dataclass(slots=True)
class Side:
    """Takes the place of Rows and KVPool when a drafter's tensors are derived (runner/batch.py). `computed` [R + 1]:
    each row's next position. `length` [R + 1]: where its next token is written."""

    tokens: Tensor
    computed: Tensor
    length: Tensor
    tables: list[Tensor]
    first: list[Tensor]
    held: list[Tensor]
    views: list[KVView]
    layout: CacheLayout
    device: torch.device
    groups: list[int]
    state_views: list[tuple[Tensor, ...]] = field(default_factory=list)
    adapters: Tensor | None = None
    """Drafters use no adapters: what they guess is verified."""

    def moved(self, computed: Tensor) -> Side:
        """The same, with other positions."""
        return Side(
            self.tokens, computed, self.length, self.tables, self.first, self.held, self.views, self.layout,
            self.device, self.groups,
        )  # fmt: skip


def side_of(rows: Rows, pool: KVPool, specs: tuple[KVSpec, ...]) -> Side:
    """The view for a drafter whose layers, with these specs, are the last ones of the pool's layout."""
    layout = pool.layout
    groups = [layout.group_specs.index(spec) for spec in dict.fromkeys(specs)]
    return Side(
        tokens=rows.tokens,
        computed=torch.zeros_like(rows.computed),
        length=torch.zeros_like(rows.length),
        tables=[rows.tables[g] for g in groups],
        first=[rows.first[g] for g in groups],
        held=[rows.held[g] for g in groups],
        views=pool.views[len(layout.specs) - len(specs) :],
        layout=layout,
        device=rows.device,
        groups=groups,
    )
