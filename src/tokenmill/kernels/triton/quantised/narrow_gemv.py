"""A few rows times a matrix of 8 or 4 bit numbers. Owns: the two kernels that stream it once.

The first writes what a word of 32 bits needs of the activations (norm, largest magnitude, rounding), once for all rows
of the weight; the second has begun to read weights by then. All its tensors are [BN or 1, words], so that no layout has
to be converted. Must not know: who made the scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import (
    INTERPRETED,
    act_parts,
    begin,
    gated_act,
    plain_act,
    pow2,
    prefetch,
    wait,
)
from tokenmill.kernels.triton.quantised.codes import bytes_of
from tokenmill.kernels.triton.quantised.narrow import BLOCK, NarrowMatrix
from tokenmill.kernels.triton.quantised.narrow_words import (
    above_zero,
    bytes4,
    dot4,
    dot_pairs,
    float8_pairs,
    half_pair,
    halves,
    largest_of,
)

KINDS = {torch.float8_e4m3fn: 0, torch.int8: 1, torch.int16: 2}
"""What a matrix holds -> what kernels call it: float8, integers of 8 bits, integers of 4 bits."""


@triton.jit
def _four(ptr, at, K: tl.constexpr, EVEN: tl.constexpr):
    """The numbers at columns 4 at .. 4 at + 3 as float32."""
    if ptr.dtype.element_ty == tl.bfloat16 and EVEN:
        pair = tl.load(ptr.to(tl.pointer_type(tl.int64)) + at)
        a, b = halves(pair.to(tl.int32))
        c, d = halves((pair >> 32).to(tl.int32))
    else:
        a = tl.load(ptr + at * 4, mask=at * 4 < K, other=0.0).to(tl.float32)
        b = tl.load(ptr + at * 4 + 1, mask=at * 4 + 1 < K, other=0.0).to(tl.float32)
        c = tl.load(ptr + at * 4 + 2, mask=at * 4 + 2 < K, other=0.0).to(tl.float32)
        d = tl.load(ptr + at * 4 + 3, mask=at * 4 + 3 < K, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def _plane_pair(ptr, at, P: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """The two numbers of plane P of 4 bit words `at` as float32."""
    if ptr.dtype.element_ty == tl.bfloat16 and EVEN:
        a, b = halves(tl.load(ptr.to(tl.pointer_type(tl.int32)) + at // 16 * 64 + P * 16 + at % 16))
    else:
        column = at // 16 * 128 + P * 32 + at % 16 * 2
        a = tl.load(ptr + column, mask=column < K, other=0.0).to(tl.float32)
        b = tl.load(ptr + column + 1, mask=column + 1 < K, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _spread_kernel(
    x_ptr, norm_ptr, out_ptr, eps,
    K: tl.constexpr, WORDS: tl.constexpr, BJ: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Words' activations, row by row: [first half | second half | largest magnitude], WORDS of each. Four neighbours
    that meet 4 bit numbers are rounded alike."""
    begin(PDL)
    x_ptr += tl.program_id(1) * K
    out_ptr += tl.program_id(1) * (3 * WORDS)
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)
    EVEN: tl.constexpr = WORDS % BJ == 0 and K % 128 == 0
    real = j < WORDS
    wait(PDL)
    if KIND == 2:
        x0, x1 = _plane_pair(x_ptr, j, 0, K, EVEN)
        x2, x3 = _plane_pair(x_ptr, j, 1, K, EVEN)
        x4, x5 = _plane_pair(x_ptr, j, 2, K, EVEN)
        x6, x7 = _plane_pair(x_ptr, j, 3, K, EVEN)
    else:
        x0, x1, x2, x3 = _four(x_ptr, j, K, EVEN)
    if NORM:
        squares = x0 * x0 + x1 * x1 + (x2 * x2 + x3 * x3)
        if KIND == 2:
            squares += x4 * x4 + x5 * x5 + (x6 * x6 + x7 * x7)
            g0, g1 = _plane_pair(norm_ptr, j, 0, K, EVEN)
            g2, g3 = _plane_pair(norm_ptr, j, 1, K, EVEN)
            g4, g5 = _plane_pair(norm_ptr, j, 2, K, EVEN)
            g6, g7 = _plane_pair(norm_ptr, j, 3, K, EVEN)
        else:
            g0, g1, g2, g3 = _four(norm_ptr, j, K, EVEN)
        root = 1.0 / tl.sqrt(tl.sum(squares) / K + eps)
        x0, x1 = x0 * root * (g0 + OFFSET), x1 * root * (g1 + OFFSET)
        x2, x3 = x2 * root * (g2 + OFFSET), x3 * root * (g3 + OFFSET)
        if KIND == 2:
            x4, x5 = x4 * root * (g4 + OFFSET), x5 * root * (g5 + OFFSET)
            x6, x7 = x6 * root * (g6 + OFFSET), x7 * root * (g7 + OFFSET)
    most = largest_of(x0, x1, x2, x3)
    if KIND == 2:
        most = tl.maximum(most, largest_of(x4, x5, x6, x7))
        most = tl.max(tl.reshape(most, (BJ // 4, 4)), axis=1)
        most = tl.reshape(tl.broadcast_to(most[:, None], (BJ // 4, 4)), (BJ,))
    most = above_zero(most)
    if KIND == 0:
        part = 1.0 / most
        tl.store(out_ptr + j, half_pair(x0 * part, x1 * part, WIDE), mask=real)
        tl.store(out_ptr + WORDS + j, half_pair(x2 * part, x3 * part, WIDE), mask=real)
    else:
        part = 127.0 / most
        most = most / 127.0
        if KIND == 1:
            tl.store(out_ptr + j, bytes4(x0 * part, x1 * part, x2 * part, x3 * part, WIDE), mask=real)
        else:
            tl.store(out_ptr + j, bytes4(x0 * part, x4 * part, x1 * part, x5 * part, WIDE), mask=real)
            tl.store(out_ptr + WORDS + j, bytes4(x2 * part, x6 * part, x3 * part, x7 * part, WIDE), mask=real)
    tl.store(out_ptr + 2 * WORDS + j, most.to(tl.int32, bitcast=True), mask=real)


@triton.jit
def _emit(out_ptr, y, program, N, BN: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr):
    """y [BN] as `_spread_kernel` would write it, of this program's words."""
    word = program * (BN // 4) + tl.arange(0, BN // 4)
    words = N // 4
    real = word < words
    even, odd = tl.split(tl.reshape(y, (BN // 4, 2, 2)))
    y0, y2 = tl.split(even)
    y1, y3 = tl.split(odd)
    most = above_zero(largest_of(y0, y1, y2, y3))
    if KIND == 0:
        part = 1.0 / most
        tl.store(out_ptr + word, half_pair(y0 * part, y1 * part, WIDE), mask=real)
        tl.store(out_ptr + words + word, half_pair(y2 * part, y3 * part, WIDE), mask=real)
    else:
        part = 127.0 / most
        most = most / 127.0
        tl.store(out_ptr + word, bytes4(y0 * part, y1 * part, y2 * part, y3 * part, WIDE), mask=real)
    tl.store(out_ptr + 2 * words + word, most.to(tl.int32, bitcast=True), mask=real)


@triton.jit
def read_words(rows, start, j, WORDS: tl.constexpr, BJ: tl.constexpr):
    """Words [BN or 1, BJ] from word `start` on."""
    if WORDS % BJ == 0:
        return tl.load(rows + start, eviction_policy="evict_first")
    else:
        return tl.load(rows + start, mask=start + j < WORDS, other=0, eviction_policy="evict_first")


@triton.jit
def in_fours(words, R: tl.constexpr, Q: tl.constexpr):
    """[R, 4 Q] -> the first, second, third and fourth of every four, [R, Q] each."""
    even, odd = tl.split(tl.reshape(words, (R, Q, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _of_group(rows, start, LAST: tl.constexpr, GROUP: tl.constexpr, BJ: tl.constexpr):
    """The scales of groups or blocks of 8 bit numbers, [.., BJ / 8]: eight words lie in one group."""
    unit = start // 8 + tl.arange(0, BJ // 8)[None, :]
    return tl.load(rows + tl.minimum(unit * 32, LAST) // GROUP)


@triton.jit
def _each(found, BN: tl.constexpr, BJ: tl.constexpr):
    """found [BN, BJ / 8] -> [BN, BJ]."""
    return tl.reshape(tl.broadcast_to(found[:, :, None], (BN, BJ // 8, 8)), (BN, BJ))


@triton.jit
def _of_blocks(rows, start, LAST: tl.constexpr, GROUP: tl.constexpr, BJ: tl.constexpr):
    """What the groups of a block of 128 columns of 4 bit numbers have, for every four words of it [BN, BJ / 4]: in one
    number where there are up to four groups; of groups of 16 that is nothing yet. rows: pointers [1, BN].

    Read again for each four words, which lie in one thread's registers, and turned: as it would be read otherwise, each
    would be brought to where its words are."""
    block = (start + tl.arange(0, BJ // 4)[:, None] * 4) // 16
    if GROUP >= 128:
        return tl.trans(tl.load(rows + tl.minimum(block * 128, LAST) // GROUP))
    elif GROUP > 16:
        BITS: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth * (128 // GROUP)
        if BITS == 64:
            joined = rows.to(tl.pointer_type(tl.int64))
        elif BITS == 32:
            joined = rows.to(tl.pointer_type(tl.int32))
        else:
            joined = rows.to(tl.pointer_type(tl.int16))
        return tl.trans(tl.load(joined + tl.minimum(block, LAST // 128)))
    else:
        return tl.trans(block)


@triton.jit
def _of_one(joined, rows, start, G: tl.constexpr, LAST: tl.constexpr, GROUP: tl.constexpr, BJ: tl.constexpr):
    """What group G of a block has, for every four words [BN, BJ / 4]; joined: of `_of_blocks`."""
    KIND: tl.constexpr = rows.dtype.element_ty
    BITS: tl.constexpr = KIND.primitive_bitwidth
    if GROUP >= 128:
        return joined
    elif GROUP > 16:
        if BITS == 16:
            one = (joined >> (G * BITS)).to(tl.int16)
        else:
            one = (joined >> (G * BITS)).to(tl.int8)
        return one.to(KIND, bitcast=True)
    else:  # half a plane
        half = (start + tl.arange(0, BJ // 4)[:, None] * 4) // 8
        column = half // 2 * 128 + G * 32 + half % 2 * 16
        return tl.trans(tl.load(rows + tl.minimum(column, LAST) // GROUP))


@triton.jit
def _bytes_of_group(x, G: tl.constexpr, SUMS: tl.constexpr):
    """The bytes of x that belong to group G of SUMS in a word: all, every other, or every other of one half."""
    if SUMS == 1:
        kept = x
    elif G * 2 < SUMS:
        kept = x & 0x00FF00FF
    else:
        kept = x & -16711936
    return kept


@triton.jit
def dots_of_group(
    even, odd, xa, xb, zero, G: tl.constexpr, SUMS: tl.constexpr, TABLE: tl.constexpr,
    R: tl.constexpr, X: tl.constexpr, Q: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of four words' codes, as bytes, those of group G of SUMS times activations, added up: float32 [R, Q].

    xa has the columns of planes 0 and 2 (planes are 32 columns; 0 in bytes 0 and 2), xb those of 1 and 3; zero: zero
    points of INTEGERS. Sums begin at 1.5 * 2^23 as a float32 has it: what comes is the float32 of that plus the sum,
    exactly, and no conversion."""
    ones = tl.full((X, Q), 0x01010101, dtype=tl.int32)
    dots = tl.full((R, Q), 0x4B400000, dtype=tl.int32)
    sums = tl.zeros((X, Q), dtype=tl.int32)
    for i in tl.static_range(4):
        if SUMS < 4 or G % 2 == 0:  # one of four sums is of one plane, even or odd
            a = _bytes_of_group(xa[i], G, SUMS)
            dots = dot4(even[i], a, dots, WIDE)
            if TABLE == 0:
                sums = dot4(a, ones, sums, WIDE)
        if SUMS < 4 or G % 2 == 1:
            b = _bytes_of_group(xb[i], G, SUMS)
            dots = dot4(odd[i], b, dots, WIDE)
            if TABLE == 0:
                sums = dot4(b, ones, sums, WIDE)
    if TABLE == 0:
        dots -= (8 + zero) * sums
    return dots.to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def _unpacked(w, KIND: tl.constexpr, TABLE: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, WIDE: tl.constexpr):
    """Words [BN, BJ] as rows of activations meet them, made once for all rows: bytes of 4 bit numbers, four words at a
    time, or pairs of halves of float8."""
    if KIND == 2:
        w0, w1, w2, w3 = in_fours(w, BN, BJ // 4)
        e0, o0 = bytes_of(w0, TABLE, WIDE)
        e1, o1 = bytes_of(w1, TABLE, WIDE)
        e2, o2 = bytes_of(w2, TABLE, WIDE)
        e3, o3 = bytes_of(w3, TABLE, WIDE)
        return (e0, e1, e2, e3), (o0, o1, o2, o3)
    elif KIND == 0:
        return float8_pairs(w, WIDE)
    else:
        return w, w


@triton.jit
def _nibbles(
    even, odd, xa, xb, most, scales, zeros, rows, zero_rows, start, acc,
    LAST: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, BN: tl.constexpr,
    BJ: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """acc [BN, BJ / 4] + the 4 bit numbers of words [BN, BJ] times activations, four words at a time, which lie in one
    block of columns. Groups narrower than a word's planes are summed one by one."""
    Q: tl.constexpr = BJ // 4
    SUMS: tl.constexpr = 1 if GROUP >= 128 else 128 // GROUP if GROUP >= 32 else 4
    a = in_fours(xa, 1, Q)
    b = in_fours(xb, 1, Q)
    part = tl.zeros((BN, Q), dtype=tl.float32)
    zero = 0
    for g in tl.static_range(SUMS):
        if ZERO:
            zero = _of_one(zeros, zero_rows, start, g, LAST, GROUP, BJ).to(tl.int32)
        dots = dots_of_group(even, odd, a, b, zero, g, SUMS, TABLE, BN, 1, Q, WIDE)
        part += dots * _of_one(scales, rows, start, g, LAST, GROUP, BJ).to(tl.float32)
    return acc + part * most


@triton.jit
def _products(
    w, xa, xb, most, scales, zeros, rows, zero_rows, start, acc,
    KIND: tl.constexpr, LAST: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr,
    TABLE: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """acc + the numbers of each word (`_unpacked`) times activations times what scales there are per group or block."""
    if KIND == 2:
        acc = _nibbles(
            w[0], w[1], xa, xb, most, scales, zeros, rows, zero_rows, start, acc,
            LAST, GROUP, ZERO, TABLE, BN, BJ, WIDE,
        )  # fmt: skip
    else:
        if SPAN > 1:
            most = most * _each(_of_group(rows, start, LAST, GROUP, BJ), 1, BJ)
        if KIND == 0:
            acc = dot_pairs(w[0], w[1], xa, xb, most, acc, WIDE)
        else:
            dots = dot4(w[0], xa, tl.zeros((1, BJ), dtype=tl.int32), WIDE).to(tl.float32) * most
            if GROUP > 0:
                dots = dots * _each(_of_group(rows, start, LAST, GROUP, BJ), BN, BJ).to(tl.float32)
            acc += dots
    return acc


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, out_ptr, emit_ptr, N,
    ROWS: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, EMITS: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """EARLY: lines of 128 bytes that a row's words after the first piece are asked for before the wait (0: none)."""
    begin(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, BJ)[None, :]
    real = n < N
    safe = tl.where(real, n, 0)
    words = w_ptr.to(tl.pointer_type(tl.int32))
    weights = words + safe[:, None].to(tl.int64) * WORDS + j
    partners = words + (safe + N)[:, None].to(tl.int64) * WORDS + j
    w = read_words(weights, 0, j, WORDS, BJ)
    if GATED:
        u = read_words(partners, 0, j, WORDS, BJ)
    if EARLY > 0:
        ahead = tl.minimum(BJ + tl.arange(0, EARLY) * 32, WORDS - 1)[None, :]
        prefetch(words + safe[:, None].to(tl.int64) * WORDS + ahead)
        if GATED:
            prefetch(words + (safe + N)[:, None].to(tl.int64) * WORDS + ahead)
    # Where the scales of a row of groups (filled up as its columns are), or of a row of blocks, begin.
    STORED: tl.constexpr = WORDS * 8 if KIND == 2 else K
    COUNT: tl.constexpr = 1 if GROUP == 0 else (STORED + GROUP - 1) // GROUP
    if SPAN > 1:
        one = tl.zeros((1, 1), dtype=tl.int32)
        rows = scale_ptr + one + tl.program_id(0) * BN // SPAN * COUNT
        rows_u = scale_ptr + one + (N + tl.program_id(0) * BN) // SPAN * COUNT
    elif KIND == 2:
        rows = scale_ptr + safe[None, :] * COUNT
        rows_u = scale_ptr + (safe + N)[None, :] * COUNT
    else:
        rows = scale_ptr + safe[:, None] * COUNT
        rows_u = scale_ptr + (safe + N)[:, None] * COUNT
    zero_rows = zero_ptr + safe[None, :] * COUNT
    zero_rows_u = zero_ptr + (safe + N)[None, :] * COUNT
    # Scales and zeros of 4 bit numbers are read ahead as the words are.
    s = 0
    s_u = 0
    z = 0
    z_u = 0
    if KIND == 2:
        s = _of_blocks(rows, 0, K - 1, GROUP, BJ)
        if ZERO:
            z = _of_blocks(zero_rows, 0, K - 1, GROUP, BJ)
        if GATED:
            s_u = _of_blocks(rows_u, 0, K - 1, GROUP, BJ)
            if ZERO:
                z_u = _of_blocks(zero_rows_u, 0, K - 1, GROUP, BJ)
    wait(PDL)
    WIDTH: tl.constexpr = BJ // 4 if KIND == 2 else BJ
    acc = (tl.zeros((BN, WIDTH), dtype=tl.float32),) * ROWS
    acc_u = (tl.zeros((BN, WIDTH), dtype=tl.float32),) * ROWS
    for start in tl.static_range(0, WORDS, BJ):
        if start + BJ < WORDS:
            w_next = read_words(weights, start + BJ, j, WORDS, BJ)
            if GATED:
                u_next = read_words(partners, start + BJ, j, WORDS, BJ)
        if start + BJ < WORDS and KIND == 2:
            s_next = _of_blocks(rows, start + BJ, K - 1, GROUP, BJ)
            if ZERO:
                z_next = _of_blocks(zero_rows, start + BJ, K - 1, GROUP, BJ)
            if GATED:
                s_u_next = _of_blocks(rows_u, start + BJ, K - 1, GROUP, BJ)
                if ZERO:
                    z_u_next = _of_blocks(zero_rows_u, start + BJ, K - 1, GROUP, BJ)
        codes = _unpacked(w, KIND, TABLE, BN, BJ, WIDE)
        if GATED:
            codes_u = _unpacked(u, KIND, TABLE, BN, BJ, WIDE)
        sums = ()
        sums_u = ()
        for row in tl.static_range(ROWS):
            spread = x_ptr + row * 3 * WORDS
            xa = read_words(spread + j, start, j, WORDS, BJ)
            xb = xa
            if KIND != 1:
                xb = read_words(spread + WORDS + j, start, j, WORDS, BJ)
            if KIND == 2:  # four words share a step
                q = start + tl.arange(0, WIDTH)[:, None] * 4
                most = tl.trans(tl.load(spread + 2 * WORDS + q, mask=q < WORDS, other=0)).to(tl.float32, bitcast=True)
            else:
                most = read_words(spread + 2 * WORDS + j, start, j, WORDS, BJ).to(tl.float32, bitcast=True)
            sums += (_products(
                codes, xa, xb, most, s, z, rows, zero_rows, start, acc[row],
                KIND, K - 1, GROUP, SPAN, ZERO, TABLE, BN, BJ, WIDE,
            ),)  # fmt: skip
            if GATED:
                sums_u += (_products(
                    codes_u, xa, xb, most, s_u, z_u, rows_u, zero_rows_u, start, acc_u[row],
                    KIND, K - 1, GROUP, SPAN, ZERO, TABLE, BN, BJ, WIDE,
                ),)  # fmt: skip
        acc = sums
        acc_u = sums_u
        if start + BJ < WORDS:
            w = w_next
            if GATED:
                u = u_next
        if start + BJ < WORDS and KIND == 2:
            s = s_next
            if ZERO:
                z = z_next
            if GATED:
                s_u = s_u_next
                if ZERO:
                    z_u = z_u_next
    for row in tl.static_range(ROWS):
        y = tl.sum(acc[row], axis=1)
        if GATED:
            y_u = tl.sum(acc_u[row], axis=1)
        if GROUP == 0:
            y = y * tl.load(scale_ptr + safe)
            if GATED:
                y_u = y_u * tl.load(scale_ptr + safe + N)
        if BIAS:
            y += tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)
            if GATED:
                y_u += tl.load(bias_ptr + N + n, mask=real, other=0.0).to(tl.float32)
        if GATED:
            y = gated_act(y, y_u, ACT)
        else:
            y = plain_act(y, ACT)
        if RESIDUAL:
            y += tl.load(residual_ptr + row * N + n, mask=real, other=0.0).to(tl.float32)
        y = y.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * N + n, y, mask=real)
        if EMITS:
            _emit(emit_ptr + row * (N // 4 * 3), y.to(tl.float32), tl.program_id(0), N, BN, KIND, WIDE)


class SpreadRows(Tensor):
    """Rows [M, N] that their product has also left as words of a next matrix of that type meet them. Whatever else is
    done with them gives plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    words: Tensor
    type_of_words: torch.dtype

    @classmethod
    def of(cls, rows: Tensor, words: Tensor, type_of_words: torch.dtype) -> SpreadRows:
        """The rows and their words."""
        made = rows.as_subclass(cls)
        made.words, made.type_of_words = words, type_of_words
        return made


def narrow_gemv(
    x: Tensor, weight: NarrowMatrix, norm: NormSpec | None, act: str | None, residual: Tensor | None,
    *, pdl: bool, config: tuple[int, int, int, int],
) -> Tensor:  # fmt: skip
    """Few rows x [M, K] -> residual + act(norm(x) @ weight.T + bias), as SpreadRows if that was made on the way, too;
    config (BN, words in a piece, warps, early lines).

    K must be a multiple of 4; BN must divide a block of scales, and a gated activation's halves must begin at a block's
    border."""
    rows, inner = x.shape
    activation, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_n, block_j, warps, early = config
    kind = KINDS[weight.data.dtype]
    words = weight.data.shape[1] * weight.data.element_size() // 4
    block_j = min(block_j, max(16, pow2(words)))
    if isinstance(x, SpreadRows) and x.type_of_words == weight.data.dtype and norm is None:
        spread = x.words
    else:
        spread = spread_rows(x, words, kind, norm, pdl=pdl)
    # A program's results are whole words of the next matrix, if that is of the same kind.
    emits = gated and kind < 2 and block_n % 4 == 0 and width % 4 == 0
    emitted = torch.empty((rows, 3 * width // 4), dtype=torch.int32, device=x.device) if emits else None
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    lying = weight.scales if weight.row_scales is None else weight.row_scales
    _gemv_kernel[(triton.cdiv(width, block_n),)](
        spread, weight.data, lying, weight.row_zeros if weight.row_zeros is not None else lying, weight.bias, residual,
        out, emitted, width,
        ROWS=rows, K=inner, WORDS=words, BN=block_n, BJ=block_j, KIND=kind,
        GROUP=weight.group, SPAN=BLOCK if weight.blocks else 1, ZERO=weight.row_zeros is not None, TABLE=weight.table,
        ACT=activation, GATED=gated, BIAS=weight.bias is not None, RESIDUAL=residual is not None,
        EMITS=emits, EARLY=early if pdl and words > block_j else 0, WIDE=INTERPRETED, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out if emitted is None else SpreadRows.of(out, emitted, weight.data.dtype)


def spread_rows(x: Tensor, words: int, kind: int, norm: NormSpec | None, *, pdl: bool) -> Tensor:
    """norm(x) of rows [M, K] as so many words of a weight of this kind meet them: [M, 3 * words]."""
    rows, inner = x.shape
    out = torch.empty((rows, 3 * words), dtype=torch.int32, device=x.device)
    piece = pow2(words) if norm is not None else min(256, pow2(words))
    _spread_kernel[(triton.cdiv(words, piece), rows)](
        x, None if norm is None else norm.weight, out, 0.0 if norm is None else norm.eps,
        K=inner, WORDS=words, BJ=piece, KIND=kind, NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset, WIDE=INTERPRETED, PDL=pdl,
        num_warps=max(1, min(16, piece // 64)), launch_pdl=pdl,
    )  # fmt: skip
    return out
