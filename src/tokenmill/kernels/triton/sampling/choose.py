"""Choosing tokens. Owns: the most likely one in one launch, the most likely allowed one in one, a draw in one more.

A draw needs the line's largest logit first, because its scores are rounded as those of all backends are, and the least
score that is kept, which cuts.py finds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tokenmill.compute.forward import Draws
from tokenmill.kernels.triton.common import INTERPRETED, Scratch, begin, wait
from tokenmill.kernels.triton.sampling.cuts import least_of_draws
from tokenmill.kernels.triton.sampling.logit_pieces import allowed, any_of, first_best, get, is_last, put


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
    top, top_id = first_best(best, best_id)
    if any_of(wrong):
        top = float("nan")
        top_id = 0
    put(part_ptr, line * PIECES + piece, top, top_id)
    if is_last(count_ptr, line, PIECES):
        tops, ids = get(part_ptr, line * PIECES + tl.arange(0, PIECES))
        top, top_id = first_best(tops, ids)
        if any_of(tops != tops):
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


@triton.jit(do_not_specialize=["per"], do_not_specialize_on_alignment=["words_ptr", "masks_ptr"])
def _allowed_kernel(
    x_ptr, words_ptr, masks_ptr, id_ptr, marked_ptr, before_ptr, largest_ptr, part_ptr, count_ptr, V, x_stride,
    mask_words, per, PIECES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    line = tl.program_id(0)
    piece = tl.program_id(1)
    wait(PDL)
    source = x_ptr + line.to(tl.int64) * x_stride
    highest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    best_id = tl.full((BLOCK,), 2147483647, dtype=tl.int32)
    wrong = tl.zeros((BLOCK,), dtype=tl.int32)
    for step in range(per):
        i = (piece * per + step) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(source + i, mask=i < V, other=float("-inf")).to(tl.float32)
        wrong |= (x != x).to(tl.int32)
        highest = tl.maximum(highest, x)
        better = allowed(words_ptr, masks_ptr, line, i, V, mask_words) & (x > best)
        best = tl.where(better, x, best)
        best_id = tl.where(better, i, best_id)
    first = tl.max(highest)
    if any_of(wrong):
        first = float("nan")
    top, top_id = first_best(best, best_id)
    firsts_ptr = part_ptr + tl.num_programs(0) * PIECES * 2 + line * PIECES
    tl.store(firsts_ptr + piece, first, cache_modifier=".cg")
    put(part_ptr, line * PIECES + piece, top, top_id)
    if is_last(count_ptr, line, PIECES):
        tops, ids = get(part_ptr, line * PIECES + tl.arange(0, PIECES))
        top, top_id = first_best(tops, ids)
        firsts = tl.load(firsts_ptr + tl.arange(0, PIECES), cache_modifier=".cg")
        first = tl.max(firsts)
        if any_of(firsts != firsts):
            first = float("nan")
        good = (tl.abs(first) < float("inf")) & (tl.abs(top) < float("inf"))
        top_id = tl.where(good, top_id, 0)
        tl.store(before_ptr + line, first)
        tl.store(largest_ptr + line, tl.where(good, top, float("nan")))
        tl.store(id_ptr + line, top_id.to(tl.int64))
        tl.store(marked_ptr + line, tl.where(good, top_id, -1).to(tl.int64))


@triton.jit
def _mixed(z):
    """The noise's 64-bit mixing (sampling/noise.py says what all backends compute)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _log_exponential(i, key, PRECISE: tl.constexpr):
    """log(e) of tokens i for one line's key."""
    h = (i.to(tl.uint32) * 0x9E3779B1) ^ (key & 0xFFFFFFFF).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = ((h ^ (h >> 15)) + (key >> 32).to(tl.uint32)) * 0x846CA68B
    h = h ^ (h >> 16)
    v = ((h & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.6566125955216364e-10
    if PRECISE:
        return libdevice.log(-libdevice.log1p(-v))
    u = 1.0 - v  # the interpreter has no log1p
    return tl.log(tl.where(u == 1.0, v, tl.log(u) * v / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit(
    do_not_specialize=["per", "has_words", "has_least", "mask_words"],
    do_not_specialize_on_alignment=["words_ptr", "masks_ptr", "row_ptr", "position_ptr", "prompt_ptr", "stream_ptr",
                                    "scale_ptr", "least_ptr"],
)  # fmt: skip
def _draw_kernel(
    x_ptr, words_ptr, masks_ptr, row_ptr, position_ptr, stream_ptr, prompt_ptr, scale_ptr, largest_ptr, least_ptr,
    id_ptr, marked_ptr, part_ptr, count_ptr, V, x_stride, mask_words, int_stride, scale_stride, has_words, has_least,
    per, PIECES: tl.constexpr, BLOCK: tl.constexpr, PRECISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    line = tl.program_id(0)
    piece = tl.program_id(1)
    wait(PDL)
    drawn = has_words == 0
    if has_words != 0:
        drawn = tl.load(words_ptr + line) >= 1073741824
    largest = tl.load(largest_ptr + line)
    if drawn & (tl.abs(largest) < float("inf")):
        row = tl.load(row_ptr + line)
        index = tl.load(position_ptr + line) + 1 - tl.load(prompt_ptr + row * int_stride)
        key = _mixed((tl.load(stream_ptr + row * int_stride) + (index + 1) * -7046029254386353131).to(tl.uint64))
        scale = tl.load(scale_ptr + row * scale_stride)
        least = float("-inf")
        if has_least != 0:
            least = tl.load(least_ptr + line)
        source = x_ptr + line.to(tl.int64) * x_stride
        best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        best_id = tl.full((BLOCK,), 2147483647, dtype=tl.int32)
        for step in range(per):
            i = (piece * per + step) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(source + i, mask=i < V, other=float("-inf")).to(tl.float32)
            if has_words != 0:
                x = tl.where(allowed(words_ptr, masks_ptr, line, i, V, mask_words), x, float("-inf"))
            s = (x - largest) * scale
            score = tl.where(s >= least, s, float("-inf")) - _log_exponential(i, key, PRECISE)
            better = score > best
            best = tl.where(better, score, best)
            best_id = tl.where(better, i, best_id)
        top, top_id = first_best(best, best_id)
        put(part_ptr, line * PIECES + piece, top, top_id)
        if is_last(count_ptr, line, PIECES):
            tops, ids = get(part_ptr, line * PIECES + tl.arange(0, PIECES))
            top, top_id = first_best(tops, ids)
            tl.store(id_ptr + line, top_id.to(tl.int64))
            tl.store(marked_ptr + line, top_id.to(tl.int64))


def choose(
    logits: Tensor, words: Tensor | None, masks: Tensor | None, draws: Draws | None, scratch: Scratch, *, pdl: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See Kernels.choose: the most likely allowed token, then, with its logit at hand, the draw."""
    lines, vocab = logits.shape
    counters = scratch.counters(logits.device)
    given = (words if words is not None else counters, masks if masks is not None else counters)
    width = 0 if masks is None else masks.shape[1]
    block = 1024
    blocks = triton.cdiv(vocab, block)
    # A vocabulary has two kinds at most, so that all are compiled when steps are recorded.
    pieces = 1 if blocks == 1 else 16 if lines >= 66 or blocks <= 16 else 64
    common = {"PIECES": pieces, "BLOCK": block, "PDL": pdl, "num_warps": 4, "launch_pdl": pdl}
    if masks is None:
        ids, marked, before = greedy(logits, scratch, pdl=pdl)
        largest = before
    else:
        ids = torch.empty(lines, dtype=torch.int64, device=logits.device)
        marked = torch.empty_like(ids)
        before = torch.empty(lines, dtype=torch.float32, device=logits.device)
        largest = torch.empty_like(before)
        _allowed_kernel[(lines, pieces)](
            logits, *given, ids, marked, before, largest, scratch.partial(logits.device), counters,
            vocab, logits.stride(0), width, triton.cdiv(blocks, pieces), **common,
        )  # fmt: skip
    if draws is not None:
        least = least_of_draws(logits, draws, largest, (*given, width, int(words is not None)), scratch, pdl=pdl)
        # Without fused multiply-adds the scores are the bits that separate operations give.
        _draw_kernel[(lines, pieces)](
            logits, *given, draws.row_ids, draws.positions, draws.streams, draws.num_prompt,
            draws.inverse_temperature, largest, largest if least is None else least, ids, marked,
            scratch.partial(logits.device), counters, vocab, logits.stride(0), width, draws.streams.stride(0),
            draws.inverse_temperature.stride(0), int(words is not None), int(least is not None),
            triton.cdiv(blocks, pieces), **common, PRECISE=not INTERPRETED, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, marked, before
