"""Does a row still hold the text that it held? Owns: what is kept of each row to tell. Must not know: who asks."""

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
        """[S]: has the row's text gone on by `kept` [S] tokens since (else it is somebody else's)? It is seen now."""
        known = rows.length[row_ids]
        earlier = known - kept
        same = (self.grown[row_ids] == earlier) & (self.tail[row_ids] == rows.tokens[row_ids, earlier - 1])
        self.grown[row_ids], self.tail[row_ids] = known, rows.tokens[row_ids, known - 1]
        return same
