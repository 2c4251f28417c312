"""The most likely token. Owns: argmax over a vocabulary in one launch. Must not know: sampling parameters.

The vocabulary is cut into pieces; the program that finishes a line last looks at all pieces, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.common import Scratch, begin, wait


@triton.jit(do_not_specialize=["per"])
def _greedy_kernel(
    x_ptr, id_ptr, marked_ptr, largest_ptr, part_ptr, count_ptr, V, x_stride,
    per, PIECES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    line = tl.program_id(0)
    piece = tl.program_id(1)
    wait(PDL)
    source = x_ptr + line.to(tl.int64) * x_stride
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    best_id = tl.full((BLOCK,), 2147483647, dtype=tl.int32)
    wrong = tl.zeros((BLOCK,), dtype=tl.int32)
    for step in range(per):
        i = (piece * per + step) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(source + i, mask=i < V, other=float("-inf")).to(tl.float32)
        wrong |= (x != x).to(tl.int32)
        better = (x > best) | ((best_id == 2147483647) & (i < V))
        best = tl.where(better, x, best)
        best_id = tl.where(better, i, best_id)
    top = tl.max(best)
    top_id = tl.min(tl.where(best == top, best_id, 2147483647))
    if tl.max(wrong) > 0:
        top = float("nan")
        top_id = 0
    mine = part_ptr + (line * PIECES + piece) * 2
    tl.store(mine, top, cache_modifier=".cg")
    tl.store(mine + 1, top_id.to(tl.float32, bitcast=True), cache_modifier=".cg")
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + line, 1, sem="acq_rel") == PIECES - 1:
        tl.store(count_ptr + line, 0)
        p = tl.arange(0, PIECES)
        tops = tl.load(part_ptr + (line * PIECES + p) * 2, cache_modifier=".cg")
        ids = tl.load(part_ptr + (line * PIECES + p) * 2 + 1, cache_modifier=".cg").to(tl.int32, bitcast=True)
        top = tl.max(tops)
        top_id = tl.min(tl.where(tops == top, ids, 2147483647))
        if tl.max((tops != tops).to(tl.int32)) > 0:
            top = float("nan")
            top_id = 0
        tl.store(largest_ptr + line, top)
        tl.store(id_ptr + line, top_id.to(tl.int64))
        good = (top == top) & (tl.abs(top) < float("inf"))
        tl.store(marked_ptr + line, tl.where(good, top_id, -1 - top_id).to(tl.int64))


def greedy(logits: Tensor, scratch: Scratch, *, pdl: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See ReferenceKernels.greedy."""
    lines, vocab = logits.shape
    ids = torch.empty(lines, dtype=torch.int64, device=logits.device)
    marked = torch.empty_like(ids)
    largest = torch.empty(lines, dtype=torch.float32, device=logits.device)
    block = 1024
    blocks = triton.cdiv(vocab, block)
    # Few kinds, so that all are compiled when steps are recorded.
    pieces = next((p for p in (1, 4, 16) if p * lines >= 264 or p >= blocks), 64)
    _greedy_kernel[(lines, pieces)](
        logits, ids, marked, largest, scratch.partial(logits.device), scratch.counters(logits.device),
        vocab, logits.stride(0), triton.cdiv(blocks, pieces),
        PIECES=pieces, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return ids, marked, largest
