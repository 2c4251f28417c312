"""One token through experts of 4 bit numbers. Owns: the two launches that stream the touched experts' words once.

Work is divided as in experts.py, and words are multiplied nearly as in narrow_gemv.py. Activations are rounded to 8
bits, with a step for every four words (`spread_rows`), before the first launch and between the two. Scales lie by
group, as the kernel for several tokens wants them. Must not know: how experts were chosen, layers, who made the scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import INTERPRETED, act_parts, begin, gated_act, plain_act, pow2, wait
from tokenmill.kernels.triton.experts.narrow_grouped import NarrowStack
from tokenmill.kernels.triton.quantised.codes import bytes_of
from tokenmill.kernels.triton.quantised.narrow import BLOCK
from tokenmill.kernels.triton.quantised.narrow_gemv import KINDS, dots_of_group, in_fours, read_words, spread_rows


@triton.jit
def _piece(
    weights, scales, zeros, start, ROWS: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, BJ: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Words [R, BJ] from `start` on; the scales and the zero points of every four of them, group by group [R, BJ / 4].
    scales and zeros [1, R]. Nothing if no words are left."""
    SUMS: tl.constexpr = 1 if GROUP >= 128 else 128 // GROUP if GROUP >= 32 else 4
    of_words = ()
    of_scales = ()
    of_zeros = ()
    if start < WORDS:
        of_words = of_words + (read_words(weights, start, tl.arange(0, BJ)[None, :], WORDS, BJ),)
        # Scales are read turned: as they would be read otherwise, each of them is brought to where its words are.
        turned = tl.arange(0, BJ // 4)[:, None]
        column = (start // 16 + turned // 4) * 128
        if GROUP == 16:  # half a plane
            column += turned % 4 // 2 * 16
        for g in tl.static_range(SUMS):
            at = tl.minimum(column + g * 128 // SUMS, K - 1) // GROUP * ROWS
            of_scales = of_scales + (tl.trans(tl.load(scales + at)),)
            if ZERO:
                of_zeros = of_zeros + (tl.trans(tl.load(zeros + at)),)
    return of_words, of_scales, of_zeros


@triton.jit
def _multiplied(
    piece, x, start, acc, WORDS: tl.constexpr, R: tl.constexpr, X: tl.constexpr, BJ: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """acc [R, BJ / 4] + a piece's words from `start` on times activations x [X, 1]; X: 1 or R.

    Four words lie in one block of columns and share a step of the activations: integers are added up over them."""
    Q: tl.constexpr = BJ // 4
    SUMS: tl.constexpr = 1 if GROUP >= 128 else 128 // GROUP if GROUP >= 32 else 4
    j = tl.arange(0, BJ)[None, :]
    q = tl.arange(0, Q)[None, :]
    xa = in_fours(read_words(x + j, start, j, WORDS, BJ), X, Q)
    xb = in_fours(read_words(x + WORDS + j, start, j, WORDS, BJ), X, Q)
    most = tl.load(x + 2 * WORDS + start + q * 4, mask=start + q * 4 < WORDS, other=0).to(tl.float32, bitcast=True)
    w0, w1, w2, w3 = in_fours(piece[0][0], R, Q)
    e0, o0 = bytes_of(w0, TABLE, WIDE)
    e1, o1 = bytes_of(w1, TABLE, WIDE)
    e2, o2 = bytes_of(w2, TABLE, WIDE)
    e3, o3 = bytes_of(w3, TABLE, WIDE)
    part = tl.zeros((R, Q), dtype=tl.float32)
    zero = 0
    for g in tl.static_range(SUMS):
        if ZERO:
            zero = piece[2][g].to(tl.int32)
        dots = dots_of_group((e0, e1, e2, e3), (o0, o1, o2, o3), xa, xb, zero, g, SUMS, TABLE, R, X, Q, WIDE)
        part += dots * piece[1][g].to(tl.float32)
    return acc + part * most


@triton.jit(do_not_specialize=["step"])
def _up_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, id_ptr, out_ptr, E, step,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, TABLE: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """step: 1, from one row's scale to the next; a compiler that knew would read scales as they lie (`_piece`)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, BJ)[None, :]
    real = n < N
    safe = tl.where(real, n, 0)
    wait(PDL)
    # Only now: whoever starts next may read the ids without waiting for this launch.
    begin(PDL)
    expert = tl.load(id_ptr + tl.program_id(1)).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    ROWS: tl.constexpr = 2 * N if GATED else N
    GROUPS: tl.constexpr = WORDS * 8 // GROUP
    weights = w_ptr.to(tl.pointer_type(tl.int32)) + (expert * ROWS + safe[:, None]) * WORDS + j
    scales = scale_ptr + expert * ROWS * GROUPS + safe[None, :] * step
    zeros = zero_ptr
    if ZERO:
        zeros = zero_ptr + expert * ROWS * GROUPS + safe[None, :] * step
    x = x_ptr + tl.zeros((1, 1), dtype=tl.int32)
    acc = tl.zeros((BN, BJ // 4), dtype=tl.float32)
    piece = _piece(weights, scales, zeros, 0, ROWS, K, WORDS, BJ, GROUP, ZERO)
    if GATED:
        partners = weights + N * WORDS
        scales_u = scales + N
        zeros_u = zeros + N if ZERO else zeros
        acc_u = tl.zeros((BN, BJ // 4), dtype=tl.float32)
        piece_u = _piece(partners, scales_u, zeros_u, 0, ROWS, K, WORDS, BJ, GROUP, ZERO)
    for start in tl.static_range(0, WORDS, BJ):
        # A piece is asked for before the one in front of it is multiplied: memory answers late.
        after = _piece(weights, scales, zeros, start + BJ, ROWS, K, WORDS, BJ, GROUP, ZERO)
        if GATED:
            after_u = _piece(partners, scales_u, zeros_u, start + BJ, ROWS, K, WORDS, BJ, GROUP, ZERO)
        acc = _multiplied(piece, x, start, acc, WORDS, BN, 1, BJ, GROUP, ZERO, TABLE, WIDE)
        piece = after
        if GATED:
            acc_u = _multiplied(piece_u, x, start, acc_u, WORDS, BN, 1, BJ, GROUP, ZERO, TABLE, WIDE)
            piece_u = after_u
    y = tl.sum(acc, axis=1)
    if BIAS:
        y += tl.load(bias_ptr + expert * ROWS + safe).to(tl.float32)
    if GATED:
        y_u = tl.sum(acc_u, axis=1)
        if BIAS:
            y_u += tl.load(bias_ptr + expert * ROWS + N + safe).to(tl.float32)
        y = gated_act(y, y_u, ACT)
    else:
        y = plain_act(y, ACT)
    tl.store(out_ptr + tl.program_id(1) * N + n, y.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _down_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, id_ptr, gate_ptr, residual_ptr, out_ptr, E,
    N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, TOP: tl.constexpr,
    BT: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    # Row r of a tile: expert r // BN in the order of choice, output column r % BN.
    R: tl.constexpr = BT * BN
    r = tl.arange(0, R)
    slot = r // BN
    n = tl.program_id(0) * BN + r % BN
    j = tl.arange(0, BJ)[None, :]
    expert = tl.load(id_ptr + slot, mask=slot < TOP, other=-1).to(tl.int64)
    gate = tl.load(gate_ptr + slot, mask=slot < TOP, other=0.0)
    real = (n < N) & (expert >= 0) & (expert < E)
    expert = tl.where(real, expert, 0)
    safe = tl.where(real, n, 0)
    GROUPS: tl.constexpr = WORDS * 8 // GROUP
    weights = w_ptr.to(tl.pointer_type(tl.int32)) + (expert * N + safe)[:, None] * WORDS + j
    at = (expert * N * GROUPS + safe)[None, :]
    zeros = zero_ptr
    if ZERO:
        zeros = zero_ptr + at
    acc = tl.zeros((R, BJ // 4), dtype=tl.float32)
    x = x_ptr + tl.where(slot < TOP, slot, 0)[:, None] * (3 * WORDS)
    piece = _piece(weights, scale_ptr + at, zeros, 0, N, K, WORDS, BJ, GROUP, ZERO)
    for start in tl.static_range(0, WORDS, BJ):
        after = _piece(weights, scale_ptr + at, zeros, start + BJ, N, K, WORDS, BJ, GROUP, ZERO)
        if start == 0:
            wait(PDL)
        acc = _multiplied(piece, x, start, acc, WORDS, R, R, BJ, GROUP, ZERO, TABLE, WIDE)
        piece = after
    y = tl.sum(acc, axis=1)
    if BIAS:
        y += tl.load(bias_ptr + expert * N + safe).to(tl.float32)
    y = tl.sum(tl.reshape(tl.where(real, y * gate, 0.0), (BT, BN)), axis=0)
    out = tl.program_id(0) * BN + tl.arange(0, BN)
    if RESIDUAL:
        y += tl.load(residual_ptr + out, mask=out < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + out, y.to(out_ptr.dtype.element_ty), mask=out < N)


def takes_one(ups: NarrowStack, downs: NarrowStack) -> bool:
    """Have these kernels a form of them?"""
    return all(stack.shape[1] % 4 == 0 for stack in (ups, downs))


def narrow_one(
    x: Tensor, weights: tuple[NarrowStack, NarrowStack], picked: tuple[Tensor, Tensor], spread: Tensor, act: str,
    residual: Tensor | None, *, pdl: bool,
) -> Tensor:  # fmt: skip
    """x [1, K] and `spread_one(x)`, picked (ids [1, k], gates [1, k]) -> residual + the sum over chosen experts [1, N].

    Both ids and gates were written before `spread` was read by a launch that waited for them."""
    ups, downs = weights
    ids, gates = picked
    (rows, inner), (kind, gated), top = ups.shape, act_parts(act), ids.shape[1]
    width = rows // 2 if gated else rows
    words = _words(ups)
    up = torch.empty((top, width), dtype=x.dtype, device=x.device)
    block_n, block_j, warps = _config(words, 1)
    _up_kernel[(triton.cdiv(width, block_n), top)](
        spread, ups.data, ups.scales, ups.zeros, ups.bias, ids, up, ups.data.shape[0], 1,
        N=width, K=inner, WORDS=words, BN=block_n, BJ=block_j, GROUP=ups.group, ZERO=ups.zeros is not None,
        TABLE=ups.table, ACT=kind, GATED=gated, BIAS=ups.bias is not None, WIDE=INTERPRETED, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    words = _words(downs)
    between = spread_rows(up, words, KINDS[torch.int16], None, pdl=pdl)
    width, inner = downs.shape
    out = torch.empty((1, width), dtype=x.dtype, device=x.device)
    block_n, block_j, warps = _config(words, pow2(top))
    _down_kernel[(triton.cdiv(width, block_n),)](
        between, downs.data, downs.scales, downs.zeros, downs.bias, ids, gates, residual, out, downs.data.shape[0],
        N=width, K=inner, WORDS=words, BN=block_n, BJ=block_j, TOP=top, BT=pow2(top), GROUP=downs.group,
        ZERO=downs.zeros is not None, TABLE=downs.table, BIAS=downs.bias is not None, RESIDUAL=residual is not None,
        WIDE=INTERPRETED, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def spread_one(x: Tensor, ups: NarrowStack, norm: NormSpec | None, *, pdl: bool) -> Tensor:
    """norm(x) of x [1, K] as words of the first product meet it."""
    return spread_rows(x, _words(ups), KINDS[torch.int16], norm, pdl=pdl)


def _words(stack: NarrowStack) -> int:
    """Of 32 bits in a row, filled up."""
    return -(-stack.shape[1] // BLOCK) * (BLOCK // 8)


def _config(words: int, chosen: int) -> tuple[int, int, int]:
    """(BN, BJ, warps) for rows of so many words, of which a program multiplies those of `chosen` experts: measured on
    an H200. Pieces of 256 words are slower, though fewer."""
    if INTERPRETED:
        return max(1, min(32, 32 // chosen)), 32, 1
    block_j = min(128, pow2(words))
    return max(1, min(4, 32 // chosen)), block_j, max(1, block_j // 32)
