"""Which keys each token sees, where an index chooses them (kernels/key_choice.py is the specification). Owns: scores of
keys, and finding the best of a line without sorting it.

A line of scores belongs to one token. Its keys are numbered so that the best has the least number: the bits of a float
are in order but for their sign. Four passes find the number of the last key that is taken, eight bits each; one more
writes down the positions. Of equal keys the first are taken. Must not know: models, who attends to the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext
from tokenmill.kernels.triton.attention.paging import place_of
from tokenmill.kernels.triton.attention.stored import can_store, kinds_of, scale_strides, scales_of, spot_in, widened
from tokenmill.kernels.triton.common import INTERPRETED, begin, most_of, pow2, product, wait

_ROWS, _KEYS = (16, 16) if INTERPRETED else (128, 64)
"""Pairs of a token and a head that share a tile of keys, and its keys."""
_BLOCK = 64 if INTERPRETED else 2048
_SCORES = 1 << 26
"""How many scores there are at once, in 256 MB: with more, tokens take turns."""
_PROGRAMS = 264
"""Keys of few tokens are split up to so many programs, two of a multiprocessor."""


@triton.jit(do_not_specialize=["S", "table_stride", "line", "first", "stop"])
def _score_kernel(
    q_ptr, gain_ptr, key_ptr, scale_ptr, table_ptr, start_ptr, len_ptr, score_ptr,
    S, table_stride, line, first, stop, key_block, key_row, scale_block, scale_row, scale,
    H: tl.constexpr, D: tl.constexpr, TOP: tl.constexpr, SIZE: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    KIND: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores of the tokens from first to stop that see more than TOP keys."""
    begin(PDL)
    tile, piece = tl.program_id(0), tl.program_id(1)
    wait(PDL)
    seq, local = place_of(tile, start_ptr, S, BT)
    start = tl.load(start_ptr + seq)
    queries = tl.load(start_ptr + seq + 1) - start
    kv_len = tl.load(len_ptr + seq)
    end = tl.minimum(kv_len - queries + local + BT, kv_len)
    if (local >= queries) | (end <= TOP) | (start + local >= stop) | (start + local + BT <= first):
        return
    row = tl.arange(0, BT * BH)
    query, head = local + row // BH, row % BH
    real = (query < queries) & (head < H)
    token = start + query
    d, n = tl.arange(0, BD), tl.arange(0, BN)
    spot = token.to(tl.int64) * H + head
    q = tl.load(q_ptr + spot[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    gain = tl.load(gain_ptr + spot, mask=real, other=0.0)
    own = start + local + tl.arange(0, BT)
    wanted = (local + tl.arange(0, BT) < queries) & (own >= first) & (own < stop)
    lines = score_ptr + (own - first).to(tl.int64) * line
    table = table_ptr + seq.to(tl.int64) * table_stride
    chunk = tl.cdiv(tl.cdiv(end, BN), tl.num_programs(1)) * BN
    for at in range(piece * chunk, tl.minimum((piece + 1) * chunk, end), BN):
        index = at + n
        known = index < end
        block = tl.load(table + index // SIZE, mask=known, other=0).to(tl.int64)
        place = key_ptr + block * key_block + (index % SIZE) * key_row
        k = tl.load(place[:, None] + spot_in(d, KIND, D)[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
        factor = scale_ptr + block * scale_block + (index % SIZE) * scale_row
        k = widened(k, factor[:, None], d[None, :], known[:, None], q.dtype, KIND, D)
        scores = product(q, tl.trans(k), tl.zeros((BT * BH, BN), dtype=tl.float32), WIDE) * scale
        if KIND.PER > 1 and KIND.WHOLE:
            scores = scores * tl.load(factor, mask=known, other=0.0).to(tl.float32)[None, :]
        scores = tl.where(real[:, None], most_of(scores, 0.0) * gain[:, None], 0.0)
        total = tl.sum(tl.reshape(scores, (BT, BH, BN)), axis=1)
        tl.store(lines[:, None] + index[None, :], total, mask=wanted[:, None] & known[None, :])


@triton.jit
def _numbers(line, at, count, BLOCK: tl.constexpr):
    """Numbers [BLOCK] of the keys from `at` on, the best the least, and which of them are keys."""
    index = at + tl.arange(0, BLOCK)
    inside = index < count
    score = tl.load(line + index, mask=inside, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return tl.where(bits < 0, bits, ~bits & 0x7FFFFFFF).to(tl.uint32, bitcast=True), inside


@triton.jit(do_not_specialize=["line", "first"])
def _choose_kernel(
    score_ptr, position_ptr, out_ptr, line, first, TOP: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token = first + tl.program_id(0).to(tl.int64)
    wait(PDL)
    count = (tl.load(position_ptr + token) + 1).to(tl.int32)
    out = out_ptr + token * TOP
    if count <= TOP:
        index = tl.arange(0, WHOLE)
        tl.store(out + index, tl.where(index < count, index, -1).to(tl.int64), mask=index < TOP)
        return
    scores = score_ptr + tl.program_id(0).to(tl.int64) * line
    digit = tl.arange(0, 256)
    cut = tl.zeros((), dtype=tl.uint32)
    before = tl.zeros((), dtype=tl.int32)
    for turn in tl.static_range(4):
        held = tl.zeros((256,), dtype=tl.int32)
        for at in range(0, count, BLOCK):
            number, left = _numbers(scores, at, count, BLOCK)
            if turn > 0:
                left = left & (number >> (32 - 8 * turn) == cut)
            held += tl.histogram(((number >> (24 - 8 * turn)) & 255).to(tl.int32), 256, mask=left)
        up_to = tl.cumsum(held, axis=0)
        found = tl.minimum(tl.sum((before + up_to < TOP).to(tl.int32)), 255)
        before += tl.sum(tl.where(digit < found, held, 0))
        cut = (cut << 8) | found.to(tl.uint32)
    taken = tl.zeros((), dtype=tl.int32)
    equal = before  # those of the last number are taken while there is room
    for at in range(0, count, BLOCK):
        number, inside = _numbers(scores, at, count, BLOCK)
        same = (inside & (number == cut)).to(tl.int32)
        takes = (inside & (number < cut)) | ((same > 0) & (equal + tl.cumsum(same, axis=0) <= TOP))
        spot = taken + tl.cumsum(takes.to(tl.int32), axis=0) - 1
        tl.store(out + spot, (at + tl.arange(0, BLOCK)).to(tl.int64), mask=takes)
        taken += tl.sum(takes.to(tl.int32))
        equal += tl.sum(same)


def can_choose(spec: AttentionSpec, ctx: ForwardContext) -> bool:
    """Plain pages of vectors, whose tables are contiguous, and no trees."""
    plan = ctx.groups[spec.group]
    plain = spec.kv.kind == "latent" and spec.touches.q_norm is None and spec.touches.k_norm is None and not spec.window
    return plain and can_store(ctx.kv[spec.layer]) and plan.first is None and plan.paths is None


def choose_keys(q: Tensor, gains: Tensor, spec: AttentionSpec, top: int, ctx: ForwardContext, *, pdl: bool) -> Tensor:
    """q [T, H, D], gains [T, H] in float32 -> positions [T, top] int64, ascending, with -1 behind the last."""
    kv, plan, tokens = ctx.kv[spec.layer], ctx.groups[spec.group], q.shape[0]
    out = torch.empty((tokens, top), dtype=torch.int64, device=q.device)
    seqs, width = plan.tables.shape[0], plan.tables.shape[1] * ctx.block_size
    kind, scales, dim = kinds_of(kv)["K_KIND"], scale_strides(kv), spec.kv.key_dim
    heads = max(16, pow2(spec.heads)) if ctx.max_query == 1 else pow2(spec.heads)
    together = 1 if ctx.max_query == 1 else max(1, _ROWS // heads, 16 // heads)
    tiles = tokens // together + seqs
    pieces = 1
    while pieces < 32 and pieces * 2 * tiles <= _PROGRAMS and pieces * 2 * _KEYS <= width:
        pieces *= 2
    slab = max(1, min(tokens, _SCORES // width))
    scores = torch.empty((slab, width), dtype=torch.float32, device=q.device)
    for first in range(0, tokens, slab):
        stop = min(first + slab, tokens)
        _score_kernel[(tiles, pieces)](
            q, gains, kv.key, scales_of(kv)[0], plan.tables, ctx.query_start, ctx.kv_len, scores,
            seqs, plan.tables.stride(0), width, first, stop,
            kv.key.stride(0), kv.key.stride(2), scales[0], scales[2], spec.scale,
            H=spec.heads, D=dim, TOP=top, SIZE=ctx.block_size,
            BT=together, BH=heads, BD=max(16, pow2(dim)), BN=_KEYS,
            KIND=kind, WIDE=INTERPRETED or q.dtype == torch.float32, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        _choose_kernel[(stop - first,)](
            scores, ctx.positions, out, width, first,
            TOP=top, WHOLE=pow2(top), BLOCK=_BLOCK, PDL=pdl, num_warps=8, launch_pdl=pdl,
        )  # fmt: skip
    return out
