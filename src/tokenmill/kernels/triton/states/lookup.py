"""Prompt lookup after a step's sampling. Owns: searching a row's tokens for where its end occurred before, and writing
the drafts, in one launch.

Must not know: what verifies the guesses.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.common import begin, wait

_BLOCK = 2048
"""Places that a program compares at one time: with few words in common, a round is one read of each."""


@triton.jit(do_not_specialize=["count", "shortest", "longest"])
def _look_up_kernel(
    row_ptr, tokens_ptr, length_ptr, count, shortest, longest, tokens_stride,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    i = tl.program_id(0)
    wait(PDL)
    row = tl.load(row_ptr + i).to(tl.int64)
    known = tl.load(length_ptr + row).to(tl.int32)
    words = tokens_ptr + row * tokens_stride
    last = tl.load(words + known - 1)
    best = tl.zeros((BLOCK,), dtype=tl.int64)
    for at in range(0, tl.cdiv(known, BLOCK)):
        place = at * BLOCK + tl.arange(0, BLOCK)
        same = (place >= 1) & (place < known)
        same = same & (tl.load(words + place - 1, mask=same, other=0) == last)
        matched = same.to(tl.int32)
        n = 1
        while (tl.max(matched, axis=0) == n) & (n < longest):
            n += 1
            same = same & (place >= n)
            end = tl.load(words + tl.maximum(known - n, 0))
            same = same & (tl.load(words + place - n, mask=same, other=0) == end)
            matched += same.to(tl.int32)
        best = tl.maximum(best, tl.where(matched >= shortest, (matched.to(tl.int64) << 32) + place, 0))
    found = tl.max(best, axis=0)
    begun = tl.where(found > 0, (found & 0xFFFFFFFF).to(tl.int32), known - 1)
    ahead = tl.arange(0, AHEAD)
    guess = tl.load(words + begun + ahead % (known - begun), mask=ahead < count)
    tl.store(words + known + ahead, guess, mask=ahead < count)


def look_up_(row_ids: Tensor, count: int, sizes: tuple[int, int], tokens: Tensor, length: Tensor, *, pdl: bool) -> None:
    """See ReferenceKernels.look_up_. A program has a row."""
    ahead = max(16, triton.next_power_of_2(count))
    _look_up_kernel[(row_ids.shape[0],)](
        row_ids, tokens, length, count, *sizes, tokens.stride(0),
        AHEAD=ahead, BLOCK=_BLOCK, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
