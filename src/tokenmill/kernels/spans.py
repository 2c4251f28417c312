"""What a step needs of its rows, in plain torch. Must not know: what rows belong to."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import SpanTensors


def gather_spans(
    row_ids: Tensor, counts: Tensor, size: tuple[int, int], tokens: Tensor, computed: Tensor,
    tables: list[tuple[Tensor, Tensor, int]], block_size: int,
) -> SpanTensors:  # fmt: skip
    """As Kernels.gather_spans."""
    device, (total, longest) = row_ids.device, size
    start = computed[row_ids]
    if longest == 1:
        positions, token_rows = start, row_ids
        query_start = torch.arange(total + 1, dtype=torch.int32, device=device)
    else:
        query_start = torch.zeros(row_ids.shape[0] + 1, dtype=torch.int32, device=device)
        ends = counts.cumsum(0)
        query_start[1:] = ends
        sequence = torch.repeat_interleave(counts, output_size=total)
        positions = start[sequence] + torch.arange(total, device=device) - (ends - counts)[sequence]
        token_rows = row_ids[sequence]
    groups = []
    for table, held, width in tables:
        entry = positions // block_size
        slots = table[token_rows, entry].long() * block_size + (positions - entry * block_size)
        groups.append((table[row_ids, :width], held[row_ids], slots))
    ids = tokens[token_rows, positions].long()
    return ids, token_rows, positions, query_start, (start + counts).to(torch.int32), groups
