"""Prompt lookup in plain torch: the specification. Owns: finding where the end of a row's tokens occurred before.

There is no index: a row's tokens are compared with its last ones at every position. Nothing here waits for a device.
Must not know: models, plans, who verifies the guesses.
"""

from __future__ import annotations

import torch
from torch import Tensor

CELLS = 1 << 21
"""Places that are compared at one time: what exists of them at once are 40 MB, however many rows there are."""


def look_up_(row_ids: Tensor, count: int, sizes: tuple[int, int], reach: int, tokens: Tensor, length: Tensor) -> None:
    """See ReferenceKernels.look_up_."""
    ahead = torch.arange(count, device=row_ids.device)
    for part in row_ids.split(max(1, CELLS // max(1, reach))):
        known = length[part]
        end = _ends(tokens[part, :reach], known, *sizes)
        places = end[:, None] + ahead % (known - end)[:, None]
        tokens[part[:, None], known[:, None] + ahead] = tokens[part[:, None], places]


def _ends(tokens: Tensor, known: Tensor, shortest: int, longest: int) -> Tensor:
    """tokens [S, L], the first known [S] of which count -> where each row's best match ends [S], known - 1 if there
    is none. At place p the row's last n tokens match if they are those before p."""
    places = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    matching = places < known[:, None]
    count = torch.zeros_like(tokens)
    for n in range(1, min(longest, tokens.shape[1] - 1) + 1):
        last = tokens.gather(1, (known - n).clamp_(min=0)[:, None])
        matching[:, n:] &= tokens[:, :-n] == last
        matching[:, :n] = False
        count += matching
    score = torch.where(count >= shortest, count * tokens.shape[1] + places, 0)
    best = score.amax(1)
    return torch.where(best > 0, best % tokens.shape[1], known - 1)
