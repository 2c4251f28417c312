"""Before a step whose rows compute several tokens each. Owns: gathering what it needs from the rows' state, one launch
for each table instead of dozens of small ones.

Must not know: what rows belong to, which tokens are drafts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import SpanTensors
from tokenmill.kernels.triton.common import begin, wait

MOST_SPANS = 256
"""Rows of a step. A program looks at so many to find a token's, however many there are: one kernel serves all."""
_EACH = 16
"""Tokens of a program."""


# Rows and counts are parts of one tensor, which begin anywhere.
@triton.jit(
    do_not_specialize=["S", "T", "width"],
    do_not_specialize_on_alignment=["row_ptr", "count_ptr", "id_ptr", "whose_ptr", "position_ptr"],
)
def _spans_kernel(
    row_ptr, count_ptr, tokens_ptr, computed_ptr, table_ptr, held_ptr, id_ptr, whose_ptr, position_ptr, start_ptr,
    len_ptr, out_ptr, entries_ptr, slot_ptr, S, T, tokens_stride, table_stride, width,
    SIZE: tl.constexpr, SB: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. S - 1 have a row each, those behind them BT tokens each."""
    begin(PDL)
    i = tl.program_id(0)
    wait(PDL)
    s = tl.arange(0, SB)
    counts = tl.load(count_ptr + s, mask=s < S, other=0).to(tl.int32)
    ends = tl.cumsum(counts, 0)
    if i < S:
        row = tl.load(row_ptr + i)
        known = tl.load(computed_ptr + row).to(tl.int32) + tl.sum(tl.where(s == i, counts, 0), axis=0)
        held = tl.load(held_ptr + row)
        if i == 0:
            tl.store(start_ptr, 0)
        tl.store(start_ptr + i + 1, tl.sum(tl.where(s == i, ends, 0), axis=0))
        tl.store(len_ptr + i, known)
        tl.store(entries_ptr + i, held)
        count = tl.minimum(width, tl.maximum(held, tl.cdiv(known, SIZE)))
        for at in range(0, tl.cdiv(count, BLOCK)):
            e = at * BLOCK + tl.arange(0, BLOCK)
            block = tl.load(table_ptr + row * table_stride + e, mask=e < width, other=0)
            tl.store(out_ptr + i.to(tl.int64) * width + e, block, mask=e < width)
    else:
        t = (i - S) * BT + tl.arange(0, BT)
        real = t < T
        over = ends[None, :] <= t[:, None]
        seq = tl.minimum(tl.sum(over.to(tl.int32), axis=1), S - 1)
        before = tl.sum(tl.where(over, counts[None, :], 0), axis=1)
        whose = tl.load(row_ptr + seq)
        position = tl.load(computed_ptr + whose) + t - before
        token = tl.load(tokens_ptr + whose * tokens_stride + position, mask=real, other=0)
        entry = position // SIZE
        place = tl.load(table_ptr + whose * table_stride + entry, mask=real, other=0).to(tl.int64)
        tl.store(id_ptr + t, token.to(tl.int64), mask=real)
        tl.store(whose_ptr + t, whose, mask=real)
        tl.store(position_ptr + t, position, mask=real)
        tl.store(slot_ptr + t, place * SIZE + position % SIZE, mask=real)


def gather_spans(
    row_ids: Tensor, counts: Tensor, total: int, tokens: Tensor, computed: Tensor,
    tables: list[tuple[Tensor, Tensor, int]], block_size: int, *, pdl: bool,
) -> SpanTensors:  # fmt: skip
    """See ReferenceKernels.gather_spans; table entries beyond those that count are left undefined."""
    rows, device = row_ids.shape[0], row_ids.device
    ids, whose, positions = torch.empty((3, total), dtype=torch.int64, device=device).unbind()
    start = torch.empty(rows + 1, dtype=torch.int32, device=device)
    kv_len = torch.empty(rows, dtype=torch.int32, device=device)
    groups = []
    for table, held, width in tables:
        gathered = torch.empty((rows, width), dtype=torch.int32, device=device)
        entries = torch.empty(rows, dtype=torch.int32, device=device)
        slots = torch.empty(total, dtype=torch.int64, device=device)
        _spans_kernel[(rows + triton.cdiv(total, _EACH),)](
            row_ids, counts, tokens, computed, table, held, ids, whose, positions, start, kv_len, gathered, entries,
            slots, rows, total, tokens.stride(0), table.stride(0), width,
            SIZE=block_size, SB=MOST_SPANS, BT=_EACH, BLOCK=256, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        groups.append((gathered, entries, slots))
    return ids, whose, positions, start, kv_len, groups
