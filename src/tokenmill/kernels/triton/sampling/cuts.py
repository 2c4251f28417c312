"""Which tokens may be drawn, without sorting. Owns: the least score that top-k and top-p keep, found digit by digit.

Scores are at most 0, so the bits of |s|, read as an integer, order them: the likeliest token has the smallest key.
Wanted is the smallest key up to which there are k tokens, or probability p. Each launch reads every score once and
counts, or weighs, those in each of 16 parts of the range of keys that is left; the program that finishes a line last
picks the part. Eight launches settle all 31 bits. Weights are integers (exp(s) in steps of 2**-40), so the order of
additions does not matter: a line's cut depends on that line alone. Must not know: rows' parameters, noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import Draws
from tokenmill.kernels.triton.common import INTERPRETED, Scratch, begin, wait
from tokenmill.kernels.triton.sampling.logit_pieces import allowed, any_of, is_last

_SHIFTS = (27, 23, 19, 15, 11, 7, 3, 0)
_BINS, _PIECES, _BLOCK = 16, 2 if INTERPRETED else 64, 256


@triton.jit(
    do_not_specialize=["per", "shift", "first", "has_words", "mask_words", "limit_stride", "scale_stride"],
    do_not_specialize_on_alignment=["words_ptr", "masks_ptr", "row_ptr", "scale_ptr", "limit_ptr"],
)
def _cut_kernel(
    x_ptr, words_ptr, masks_ptr, row_ptr, scale_ptr, largest_ptr, limit_ptr, least_ptr, state_ptr, part_ptr, count_ptr,
    V, x_stride, mask_words, scale_stride, limit_stride, has_words, per, shift, first,
    MASS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    line = tl.program_id(0)
    piece = tl.program_id(1)
    wait(PDL)
    row = tl.load(row_ptr + line)
    limit = tl.load(limit_ptr + row * limit_stride)
    largest = tl.load(largest_ptr + line)
    if MASS:
        cuts = limit < 1.0
    else:
        cuts = limit < V
    if has_words != 0:
        cuts = cuts & (tl.load(words_ptr + line) >= 1073741824)
    if cuts & (tl.abs(largest) < float("inf")):
        scale = tl.load(scale_ptr + row * scale_stride)
        floor = tl.load(least_ptr + line)
        lowest = tl.zeros((), dtype=tl.int64)
        below = tl.zeros((), dtype=tl.int64)
        if first == 0:
            lowest = tl.load(state_ptr + line * 3)
            below = tl.load(state_ptr + line * 3 + 1)
        source = x_ptr + line.to(tl.int64) * x_stride
        number = tl.arange(0, BINS)
        held = tl.zeros((BINS, BLOCK), dtype=tl.int64 if MASS else tl.int32)
        for step in range(per):
            i = (piece * per + step) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(source + i, mask=i < V, other=float("-inf")).to(tl.float32)
            if has_words != 0:
                x = tl.where(allowed(words_ptr, masks_ptr, line, i, V, mask_words), x, float("-inf"))
            s = (x - largest) * scale
            key = tl.abs(s).to(tl.int32, bitcast=True) - lowest.to(tl.int32)
            part = tl.where((key >= 0) & (i < V) & (s >= floor), key >> shift, BINS)
            if any_of(part < BINS):  # most blocks have none once few keys are left
                if MASS:
                    weight = (tl.exp(s) * 1099511627776.0).to(tl.int64)
                    held += tl.where(part[None, :] == number[:, None], weight[None, :], 0)
                else:
                    held += (part[None, :] == number[:, None]).to(tl.int32)
        spot = part_ptr + (line.to(tl.int64) * PIECES + piece) * BINS
        tl.store(spot + number, tl.sum(held, axis=1).to(tl.int64), cache_modifier=".cg")
        if is_last(count_ptr, line, PIECES):
            spots = (line.to(tl.int64) * PIECES + tl.arange(0, PIECES))[:, None] * BINS + number[None, :]
            each = tl.sum(tl.load(part_ptr + spots, cache_modifier=".cg"), axis=0)
            if MASS:
                if first != 0:
                    goal = tl.ceil(limit.to(tl.float64) * tl.sum(each).to(tl.float64)).to(tl.int64)
                    tl.store(state_ptr + line * 3 + 2, goal)
                else:
                    goal = tl.load(state_ptr + line * 3 + 2)
            else:
                goal = limit
            up_to = tl.cumsum(each, axis=0)
            chosen = tl.minimum(tl.sum((up_to < goal - below).to(tl.int32)), BINS - 1)
            below += tl.sum(tl.where(number < chosen, each, 0))
            lowest += chosen.to(tl.int64) << shift
            if shift == 0:
                cut = -tl.minimum(lowest, 0x7F800000).to(tl.int32).to(tl.float32, bitcast=True)
                tl.store(least_ptr + line, tl.maximum(floor, cut))
            else:
                tl.store(state_ptr + line * 3, lowest)
                tl.store(state_ptr + line * 3 + 1, below)


def cut_(
    least: Tensor, logits: Tensor, lines: tuple[Tensor, Tensor, Tensor], masks: tuple[Tensor, Tensor, int, int],
    limits: tuple[Tensor | None, Tensor | None], scratch: Scratch, *, pdl: bool,
) -> None:  # fmt: skip
    """Raise least [n], what is kept already, to what top_k and top_p of limits keep.

    lines: row ids [n]; scales by row; largest logits [n]. masks: words, masks, a mask's width, whether any is there."""
    count, vocab = logits.shape
    rows, scales, largest = lines
    words, packed, width, has_words = masks
    state = torch.empty(count, 3, dtype=torch.int64, device=logits.device)
    blocks = triton.cdiv(vocab, _BLOCK)
    pieces = _PIECES if blocks > 1 else 1
    parts = torch.empty(count, pieces, _BINS, dtype=torch.int64, device=logits.device)
    for limit, mass in zip(limits, (False, True), strict=True):
        if limit is None:
            continue
        for shift in _SHIFTS:
            # Without fused multiply-adds the scores are the bits that separate operations give.
            _cut_kernel[(count, pieces)](
                logits, words, packed, rows, scales, largest, limit, least, state, parts,
                scratch.counters(logits.device), vocab, logits.stride(0), width, scales.stride(0), limit.stride(0),
                has_words, triton.cdiv(blocks, pieces), shift, int(shift == _SHIFTS[0]),
                MASS=mass, PIECES=pieces, BLOCK=_BLOCK, BINS=_BINS, PDL=pdl, num_warps=4, launch_pdl=pdl,
                enable_fp_fusion=False,
            )  # fmt: skip


def least_of_draws(
    logits: Tensor, draws: Draws, largest: Tensor, masks: tuple[Tensor, Tensor, int, int], scratch: Scratch, *,
    pdl: bool,
) -> Tensor | None:  # fmt: skip
    """The least score that each line's draw keeps [n]; None: everything."""
    cuts = draws.cuts
    if cuts is None:
        return None
    if cuts.log_min_p is None:
        least = torch.full_like(largest, float("-inf"))
    else:
        least = cuts.log_min_p[draws.row_ids]
    lines = draws.row_ids, draws.inverse_temperature, largest
    cut_(least, logits, lines, masks, (cuts.top_k, cuts.top_p), scratch, pdl=pdl)
    return least


def least_kept(s: Tensor, k: Tensor | None, p: Tensor | None, scratch: Scratch, *, pdl: bool) -> Tensor:
    """See Kernels.least_kept."""
    least = s.new_full((len(s),), float("-inf"))
    counters = scratch.counters(s.device)
    lines = torch.arange(len(s), device=s.device), torch.ones_like(least), torch.zeros_like(least)
    cut_(least, s, lines, (counters, counters, 0, 0), (k, p), scratch, pdl=pdl)
    return least
