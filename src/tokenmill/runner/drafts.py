"""The null drafter of a device."""

from __future__ import annotations

from torch import Tensor

from tokenmill.core.drafting import RowState


class NoDeviceDrafter:
    """Leaves no drafts behind."""

    most = 0

    def propose(self, rows: RowState, row_ids: Tensor, longest: int) -> None:
        """Nothing is proposed."""
