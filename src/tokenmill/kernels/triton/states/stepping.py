"""Between steps. Owns: gathering what a decode step needs from the rows' state, and moving rows on (by a token each, or
by those that verification lets stand), in one launch each.

Must not know: what rows belong to, sampling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.common import begin, wait


@triton.jit(do_not_specialize=["width"])
def _gather_kernel(
    row_ptr, tokens_ptr, computed_ptr, table_ptr, id_ptr, position_ptr, len_ptr, out_ptr, entries_ptr, slot_ptr,
    tokens_stride, width, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    i = tl.program_id(0).to(tl.int64)
    wait(PDL)
    row = tl.load(row_ptr + i)
    position = tl.load(computed_ptr + row)
    tl.store(id_ptr + i, tl.load(tokens_ptr + row * tokens_stride + position).to(tl.int64))
    tl.store(position_ptr + i, position)
    tl.store(len_ptr + i, (position + 1).to(tl.int32))
    table = table_ptr + row * width
    entry = position // SIZE
    block = tl.load(table + entry).to(tl.int64)
    tl.store(slot_ptr + i, block * SIZE + position % SIZE)
    tl.store(entries_ptr + i, (entry + 1).to(tl.int32))
    for at in range(0, tl.cdiv(entry + 1, BLOCK)):
        e = at * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + i * width + e, tl.load(table + e, mask=e < width, other=0), mask=e < width)


def gather_rows(
    row_ids: Tensor, tokens: Tensor, computed: Tensor, tables: list[Tensor], block_size: int, *, pdl: bool
) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """See ReferenceKernels.gather_rows; table entries beyond those that count are left undefined."""
    count, device = row_ids.shape[0], row_ids.device
    ids = torch.empty(count, dtype=torch.int64, device=device)
    positions = torch.empty(count, dtype=torch.int64, device=device)
    kv_len = torch.empty(count, dtype=torch.int32, device=device)
    groups = []
    for table in tables:
        width = table.shape[1]
        gathered = torch.empty((count, width), dtype=torch.int32, device=device)
        entries = torch.empty(count, dtype=torch.int32, device=device)
        slots = torch.empty(count, dtype=torch.int64, device=device)
        _gather_kernel[(count,)](
            row_ids, tokens, computed, table, ids, positions, kv_len, gathered, entries, slots,
            tokens.stride(0), width, SIZE=block_size, BLOCK=256, PDL=pdl, num_warps=2, launch_pdl=pdl,
        )  # fmt: skip
        groups.append((gathered, entries, slots))
    return ids, positions, kv_len, groups


@triton.jit
def _advance_kernel(row_ptr, id_ptr, tokens_ptr, length_ptr, computed_ptr, tokens_stride, PDL: tl.constexpr):
    begin(PDL)
    i = tl.program_id(0)
    wait(PDL)
    row = tl.load(row_ptr + i)
    length = tl.load(length_ptr + row)
    tl.store(tokens_ptr + row * tokens_stride + length, tl.load(id_ptr + i).to(tl.int32))
    tl.store(length_ptr + row, length + 1)
    tl.store(computed_ptr + row, tl.load(computed_ptr + row) + 1)


def advance_(row_ids: Tensor, ids: Tensor, tokens: Tensor, length: Tensor, computed: Tensor, *, pdl: bool) -> None:
    """See ReferenceKernels.advance_."""
    _advance_kernel[(row_ids.shape[0],)](
        row_ids, ids, tokens, length, computed, tokens.stride(0), PDL=pdl, num_warps=1, launch_pdl=pdl
    )


@triton.jit(do_not_specialize=["count"])
def _accept_kernel(
    grant_ptr, marked_ptr, tokens_ptr, length_ptr, computed_ptr, kept_ptr, count, tokens_stride, MOST: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row, first, tried = tl.load(grant_ptr + i), tl.load(grant_ptr + count + i), tl.load(grant_ptr + 2 * count + i)
    known = tl.load(length_ptr + row)
    words, samples = tokens_ptr + row * tokens_stride + known, marked_ptr + first
    place = tl.arange(0, MOST)
    draft = tl.load(words + place, mask=place < tried, other=0).to(tl.int64)
    wrong = (tl.load(samples + place, mask=place < tried, other=0) != draft) | (place >= tried)
    right = tl.min(tl.where(wrong, place, MOST), axis=0)
    last = tl.load(samples + right)
    tl.store(words + right, tl.where(last < 0, -1 - last, last).to(tl.int32))
    kept = right + tl.where((last >= 0) | (right == 0), 1, 0)
    tl.store(length_ptr + row, known + kept)
    tl.store(computed_ptr + row, known + kept - 1)
    tl.store(kept_ptr + i, kept.to(tl.int64))


def accept_chains_(
    grants: Tensor, most: int, marked: Tensor, tokens: Tensor, length: Tensor, computed: Tensor
) -> Tensor:
    """See kernels/accept.py."""
    count = grants.shape[1]
    kept = torch.empty(count, dtype=torch.int64, device=grants.device)
    most = max(32, triton.next_power_of_2(most + 1))  # one kernel for all that is usual
    _accept_kernel[(count,)](
        grants, marked, tokens, length, computed, kept, count, tokens.stride(0), MOST=most, num_warps=1
    )
    return kept
