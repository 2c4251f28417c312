"""Prompt lookup where the rows are: what NgramDrafter proposes, found by the backend, which waits for nothing.

Knows nothing of models or plans.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenmill.compute.drafting import Drafting
from tokenmill.compute.forward import Kernels
from tokenmill.runner.drafts import Forgetful


class NgramLookup(Forgetful):
    """Longest match first, from `longest` down to `shortest` tokens; the latest of equally long ones. A guess costs the
    same whether or not anything speaks for it, so there always is one."""

    def __init__(self, kernels: Kernels, most: int, longest: int = 4, shortest: int = 2) -> None:
        self.kernels = kernels
        self.most = most
        self.sizes = shortest, longest

    def bind(self, rows: Any, pool: Any) -> None:
        """The spare row is looked up in `warm`."""
        self.rows = rows

    def warm(self) -> None:
        """Compile the search, with the row that is nobody's; it stays where it was."""
        rows = self.rows
        row_ids = torch.tensor([rows.spare], device=rows.device)
        rows.length[rows.spare] = 1
        self.kernels.look_up_(row_ids, self.most, self.sizes, 1, rows.tokens, rows.length)
        rows.length[rows.spare] = 0

    def propose(self, step: Drafting) -> None:
        """What followed the end of each row before."""
        rows = step.rows
        self.kernels.look_up_(step.row_ids, step.count, self.sizes, step.longest, rows.tokens, rows.length)
