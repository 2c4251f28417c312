"""The experts of a mixture that may move between ranks. Owns: which slot takes which token's choice, as tables on the
device that a step reads, and how often each expert was chosen.

All ranks have the same tables and see the same tokens, so each choice is computed by one rank, once. Counting is part
of the step; nobody waits for it. Must not know: when experts move, or how.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext
from tokenmill.parallel.experts import Placement, first_placement, routes

COLUMNS = 16
"""So many tokens take an expert's slots in turn: if it has three slots, these get 6, 5 and 5 tokens."""


class Placed:
    """Where the experts of one mixture lie. `placement` is the host's copy; weights: see `Chosen`."""

    def __init__(self, experts: int, ranks: int, rank: int, redundant: int, device: torch.device) -> None:
        self.experts = experts
        self.placement = first_placement(experts, ranks, redundant)
        self.slots = len(self.placement) // ranks
        self.first = rank * self.slots
        """The number of this rank's first slot."""
        self.columns = COLUMNS if redundant else 1
        self.table = torch.zeros(experts * self.columns, dtype=torch.int64, device=device)
        self.counts = torch.zeros(experts, dtype=torch.int64, device=device)
        self.spare = 1 << 30
        """The spare row: its tokens fill up steps and are not counted."""
        self.follow(self.placement)

    @property
    def own(self) -> list[int]:
        """The experts of this rank's slots."""
        return self.placement[self.first : self.first + self.slots]

    def follow(self, placement: Placement) -> None:
        """Take over a new placement of the weights."""
        self.placement = list(placement)
        found = routes(self.placement, self.experts, self.columns)
        self.table.copy_(torch.tensor(found, dtype=torch.int64))

    def slots_for(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Chosen experts [T, k] -> the slots that compute them [T, k]; also counts the tokens of each expert."""
        flat = ids.reshape(-1)
        self._count(flat, ctx)
        if self.columns > 1:
            turns = torch.arange(ids.shape[0], device=ids.device).remainder(self.columns)
            flat = flat * self.columns + turns.repeat_interleave(ids.shape[1])
        return self.table.index_select(0, flat).view(ids.shape)

    def _count(self, flat: Tensor, ctx: ForwardContext) -> None:
        of = None if ctx.rows is None else ctx.rows.tokens
        if of is None or not of.shape[0] or flat.shape[0] % of.shape[0]:
            self.counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int64))
            return
        real = (of < self.spare).to(torch.int64)
        self.counts.index_add_(0, flat, real.repeat_interleave(flat.shape[0] // of.shape[0]))
