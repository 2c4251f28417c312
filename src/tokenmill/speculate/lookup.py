"""Prompt lookup where the rows are: what NgramDrafter proposes, found by tensor operations that wait for nothing.

Owns: searching the rows' token buffer. There is no index: a row's tokens are compared with its last ones, place by
place, which a device does faster than a host looks one n-gram up. Knows nothing of models or plans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.core.drafting import Drafting
from tokenmill.runner.drafts import Forgetful

CELLS = 1 << 21
"""Places that are compared at one time: what exists of them at once are 40 MB, however many rows there are."""


class NgramLookup(Forgetful):
    """Longest match first, from `longest` down to `shortest` tokens; the latest of equally long ones."""

    def __init__(self, most: int, longest: int = 4, shortest: int = 2) -> None:
        self.most = most
        self.longest = longest
        self.shortest = shortest

    def propose(self, step: Drafting) -> None:
        """What followed the latest earlier occurrence of the row's end, over again where that reaches the end itself;
        the last token where there is none. (A guess costs the same whether or not anything speaks for it.)"""
        rows = step.rows
        ahead = torch.arange(step.count, device=step.row_ids.device)
        for part in step.row_ids.split(max(1, CELLS // max(1, step.longest))):
            known = rows.length[part]
            end = self._ends(rows.tokens[part, : step.longest], known)
            places = end[:, None] + ahead % (known - end)[:, None]
            rows.tokens[part[:, None], known[:, None] + ahead] = rows.tokens[part[:, None], places]

    def _ends(self, tokens: Tensor, known: Tensor) -> Tensor:
        """tokens [S, L], the first known [S] of which count -> where each row's best match ends [S], known - 1 if there
        is none. At place p the row's last n tokens match if they are those before p."""
        places = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        matching = places < known[:, None]
        count = torch.zeros_like(tokens)
        for n in range(1, min(self.longest, tokens.shape[1] - 1) + 1):
            last = tokens.gather(1, (known - n).clamp_(min=0)[:, None])
            matching[:, n:] &= tokens[:, :-n] == last
            matching[:, :n] = False
            count += matching
        score = torch.where(count >= self.shortest, count * tokens.shape[1] + places, 0)
        best = score.amax(1)
        return torch.where(best > 0, best % tokens.shape[1], known - 1)
