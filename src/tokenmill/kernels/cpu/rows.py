"""The rows' state at both ends of a step. Owns: gathering what one token of each row needs, and advancing rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill import _native


def gather_rows(
    row_ids: Tensor, tokens: Tensor, computed: Tensor, tables: list[Tensor], block_size: int, offsets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """As Kernels.gather_rows; of a table's rows only the counted entries are written."""
    count = row_ids.shape[0]
    ids = torch.empty(count, dtype=torch.int64)
    positions, kv_len = torch.empty_like(ids), torch.empty(count, dtype=torch.int32)
    at = row_ids.data_ptr()
    _native.gather_rows(
        at, count, tokens.data_ptr(), computed.data_ptr(), tuple(tokens.shape),
        (ids.data_ptr(), positions.data_ptr(), kv_len.data_ptr()), 0 if offsets is None else offsets.data_ptr(),
    )  # fmt: skip
    groups = []
    for table in tables:
        out = torch.empty((count, table.shape[1]), dtype=torch.int32)
        entries, slots = torch.empty_like(kv_len), torch.empty_like(ids)
        _native.gather_tables(
            at, positions.data_ptr(), count, table.data_ptr(), block_size, tuple(table.shape),
            (out.data_ptr(), entries.data_ptr(), slots.data_ptr()),
        )  # fmt: skip
        groups.append((out, entries, slots))
    return ids, positions, kv_len, groups


def advance_(row_ids: Tensor, ids: Tensor, tokens: Tensor, length: Tensor, computed: Tensor) -> None:
    """As Kernels.advance_."""
    _native.advance_rows(
        row_ids.data_ptr(), ids.data_ptr(), row_ids.shape[0], tokens.data_ptr(), tuple(tokens.shape),
        length.data_ptr(), computed.data_ptr(),
    )  # fmt: skip
