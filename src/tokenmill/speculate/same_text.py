"""Does a row still hold the same text? Owns: what is kept per row to tell. Must not know: who asks."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.drafting import RowState


class SameText:
    """How long each row was when it was last seen, and its last token then."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.grown = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tail = torch.full((rows,), -1, dtype=torch.int32, device=device)

    def goes_on(self, rows: RowState, row_ids: Tensor, kept: Tensor) -> Tensor:
        """[S]: is the row's text the one last seen, `kept` [S] tokens longer? If not, it is another text. Marks it as
        seen."""
        known = rows.length[row_ids]
        earlier = known - kept
        same = (self.grown[row_ids] == earlier) & (self.tail[row_ids] == rows.tokens[row_ids, earlier - 1])
        self.grown[row_ids], self.tail[row_ids] = known, rows.tokens[row_ids, known - 1]
        return same
