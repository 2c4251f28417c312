"""Device drafters: the null one, the base of those that keep nothing, and what they are told of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.drafting import Drafting, Seen
from tokenmill.core.step import StepPlan
from tokenmill.sampling.arrays import send, to_device


@dataclass(slots=True)
class GrantResults:
    """The results of the grants behind which new drafts are left. lines: the grant of each sampled line. places: that
    line's token in the batch. stand: the verified grants, and how many of their samples stand. last: if drafts were
    trees, the last line that stands of each of these grants, counted from the grant's first line."""

    plan: StepPlan
    lines: list[int]
    places: list[int]
    stand: tuple[list[int], Tensor] | None
    device: torch.device
    last: Tensor | None = None

    def _firsts(self) -> list[int]:
        """The first line of each grant that proposes."""
        wanted = set(self.plan.proposes)
        firsts = {i: n for n, i in reversed(list(enumerate(self.lines))) if i in wanted}
        return [firsts[i] for i in self.plan.proposes]

    def _of(self, found: Tensor) -> Tensor:
        """Select, from values by verified grant, those of the grants that propose."""
        assert self.stand is not None
        grants = [self.stand[0].index(i) for i in self.plan.proposes]
        return found[to_device(grants, torch.int64, self.device)]

    def _kept(self) -> Tensor | None:
        """How many samples of each proposing grant stand; None: one of each."""
        return None if self.stand is None else self._of(self.stand[1])

    def newest(self) -> Tensor:
        """See Drafting.places."""
        at = to_device([self.places[n] for n in self._firsts()], torch.int64, self.device)
        if self.last is not None:
            return at + self._of(self.last)
        kept = self._kept()
        return at if kept is None else at + kept - 1

    def samples(self, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """See Drafting.samples; ids: the token of each line."""
        assert ids is not None, "nothing was sampled"
        counts = [1 + self.plan.guesses.get(i, 0) for i in self.plan.proposes]
        first, count = send(torch.tensor([self._firsts(), counts], dtype=torch.int64), self.device)
        at = (first[:, None] + torch.arange(max(counts), device=self.device)).clamp_(max=len(self.lines) - 1)
        kept = self._kept()
        return ids[at], count, torch.ones_like(count) if kept is None else kept


class Forgetful:
    """The base of drafters that keep nothing besides the rows: these methods have nothing to do."""

    most = 0
    levels = 0
    follows = False
    catches_up = "on"

    def bind(self, rows: Any, pool: Any) -> None:
        """Nothing to keep: rows come with each proposal."""

    def warm(self) -> None:
        """Nothing is recorded."""

    def follow(self, spans: list[tuple[int, int, int]], seen: Seen) -> None:
        """Nothing is kept."""

    def propose(self, step: Drafting) -> None:
        """Nothing is proposed."""

    def forget_weights(self) -> None:
        """There are no weights."""


class NoDeviceDrafter(Forgetful):
    """Makes no drafts. most: how many drafts a later stage's drafter leaves in the rows of all stages."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
