"""Prompt lookup on the device: it proposes what NgramDrafter proposes. The backend searches the rows, so the host waits
for nothing.

Must not know: models, plans.
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
        """Compile the search with the spare row, which stays unchanged."""
        rows = self.rows
        row_ids = torch.tensor([rows.spare], device=rows.device)
        rows.length[rows.spare] = 1
        self.kernels.look_up_(row_ids, self.most, self.sizes, 1, rows.tokens, rows.length)
        rows.length[rows.spare] = 0

    def propose(self, step: Drafting) -> None:
        """Propose what followed when each row's last tokens occurred before."""
        rows = step.rows
        self.kernels.look_up_(step.row_ids, step.count, self.sizes, step.longest, rows.tokens, rows.length)
