"""Guessing tokens ahead. Owns: the protocols of drafters, on the host and on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.core.sequence import Sequence


class HostDrafter(Protocol):
    """Guesses the next tokens on the host. A wrong guess costs time, never correctness."""

    def propose(self, seq: Sequence, most: int) -> list[int]: ...
    def observe(self, seq: Sequence, proposed: int, accepted: int) -> None: ...
    def forget(self, seq: Sequence) -> None: ...


class RowState(Protocol):
    """What a device knows of its rows: tokens [R, L] int32, the first length [R] of them known (int64)."""

    tokens: Tensor
    length: Tensor


class DeviceDrafter(Protocol):
    """Guesses the next tokens where the rows are, without waiting for the device. Runs right after sampling."""

    most: int
    """So many drafts may lie behind a row's known tokens."""

    def propose(self, rows: RowState, row_ids: Tensor, longest: int) -> None:
        """Leave `most` drafts behind the known tokens of each of row_ids [S], none of which has over `longest`."""
        ...
