"""Keys and values of 8 or 4 bits in registers. Owns: words of stored numbers as float16, their scales, and the softmax
step that takes them.

Two neighbouring bytes lie in one int16, because tensor cores are fed (and shared memory is transposed) in 16 bits: what
lies in it becomes operands of their own. So heads are split into even and odd columns, in 4 bits (whose bytes hold a
number of the lower half of a head and one of the upper half) those of each half. float16 holds every float8, every int8
and every number of 4 bits exactly. Queries are divided by their largest magnitude first. A value's scale is taken into
the exponent of its probability, so that float16 holds their product whatever the scales are; least values are added
outside of products. Must not know: tables, splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.attention.paging import bend
from tokenmill.kernels.triton.common import product
from tokenmill.kernels.triton.quantised.narrow_words import bfloat_at, float8_of, halves

LEAST_SCALE = tl.constexpr(8.7e-19)
"""What smaller scales of values count as: those of zeros, mostly."""


@triton.jit
def halves_of(words, TYPE: tl.constexpr, WIDE: tl.constexpr):
    """int16 pairs of 8-bit numbers -> the lower and the upper numbers in float16."""
    if WIDE:
        if tl.int8 == TYPE:
            low = (words << 8 >> 8).to(tl.float16)
            high = (words >> 8).to(tl.float16)
        else:
            low = float8_of(words.to(tl.int32), 0).to(tl.float16)
            high = float8_of(words.to(tl.int32), 1).to(tl.float16)
    elif tl.int8 == TYPE:
        # 0x6400 | u is 1024 + u; u is the number + 128.
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, less; xor.b32 t, $2, 0x80808080; mov.b32 less, 0x64806480;
            prmt.b32 u, t, 0x64646464, 0x4240; sub.rn.f16x2 $0, u, less;
            prmt.b32 u, t, 0x64646464, 0x4341; sub.rn.f16x2 $1, u, less; }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return low, high


@triton.jit
def quarters_of(words, WIDE: tl.constexpr):
    """int16 of four 4-bit numbers -> each less 8, in float16: even and odd ones of the lower half of a head, even and
    odd ones of the upper half."""
    if WIDE:
        even = ((words & 15) - 8).to(tl.float16)
        odd = (((words >> 8) & 15) - 8).to(tl.float16)
        upper_even = (((words >> 4) & 15) - 8).to(tl.float16)
        upper_odd = (((words >> 12) & 15) - 8).to(tl.float16)
    else:
        # 0x6400 | n is 1024 + n, and 0x6400 | n << 4 is 1024 + 16 n.
        even, odd, upper_even, upper_odd = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, bias, less, part, lesser;
            mov.b32 bias, 0x64006400; mov.b32 less, 0x64086408; mov.b32 part, 0x2C002C00; mov.b32 lesser, 0xD480D480;
            shr.u32 t, $4, 8;
            lop3.b32 u, $4, 0x000F000F, bias, 0xEA; sub.rn.f16x2 $0, u, less;
            lop3.b32 u, t, 0x000F000F, bias, 0xEA; sub.rn.f16x2 $1, u, less;
            lop3.b32 u, $4, 0x00F000F0, bias, 0xEA; fma.rn.f16x2 $2, u, part, lesser;
            lop3.b32 u, t, 0x00F000F0, bias, 0xEA; fma.rn.f16x2 $3, u, part, lesser; }""",
            "=r,=r,=r,=r,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd, upper_even, upper_odd


@triton.jit
def scales_at(scales, spot, seen, KIND: tl.constexpr):
    """Of heads whose scales begin at these spots [N], in float32: the scale; in 4 bits those of the lower and the upper
    half, and what their numbers that are 0 without 8 stand for."""
    if KIND.PER == 4:
        word = tl.load(scales.to(tl.pointer_type(tl.int64)) + (spot >> 2), mask=seen, other=0)
        lower, upper = halves(word.to(tl.int32))
        least, upper_least = halves((word >> 32).to(tl.int32))
        found = (lower, upper, least + 8.0 * lower, upper_least + 8.0 * upper)
    elif KIND.PER == 2:
        found = (bfloat_at(scales, spot, seen),)
    else:
        found = (0,)
    return found


@triton.jit
def _halved(x, R: tl.constexpr, BD: tl.constexpr):
    """x [R, BD] -> its left and its right half."""
    return tl.split(tl.permute(tl.reshape(x, (R, 2, BD // 2)), (0, 2, 1)))


@triton.jit
def split_query(q, R: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr):
    """q [R, BD] -> its parts as keys are unpacked, in float16, divided by the rows' largest magnitudes, and these [R];
    in 4 bits also the sums of both halves [R]."""
    if KIND.PER == 1:
        found = (0, 0, 0)
    else:
        wide = q.to(tl.float32)
        most = tl.max(tl.abs(wide), axis=1)
        part = 1.0 / tl.where(most > 0.0, most, 1.0)
        x = (wide * part[:, None]).to(tl.float16)
        if KIND.PER == 2:
            even, odd = tl.split(tl.reshape(x, (R, BD // 2, 2)))
            found = (even, odd, most)
        else:
            lower, upper = _halved(x, R, BD)
            even, odd = tl.split(tl.reshape(lower, (R, BD // 4, 2)))
            upper_even, upper_odd = tl.split(tl.reshape(upper, (R, BD // 4, 2)))
            sums = tl.sum(lower.to(tl.float32), axis=1)
            upper_sums = tl.sum(upper.to(tl.float32), axis=1)
            found = (even, odd, upper_even, upper_odd, most, sums, upper_sums)
    return found


@triton.jit
def _scores(asked, words, scales, KIND: tl.constexpr, WIDE: tl.constexpr):
    """A query's parts against words of keys [BD / PER, N] -> raw dots [R, N], and what rows are to be multiplied by."""
    zeros = tl.zeros((asked[0].shape[0], words.shape[1]), dtype=tl.float32)
    if KIND.PER == 2:
        even, odd = halves_of(words, KIND.TYPE, WIDE)
        found = product(asked[1], odd, product(asked[0], even, zeros, WIDE), WIDE)
        found = found * scales[0][None, :]
        most = asked[2]
    else:
        even, odd, upper_even, upper_odd = quarters_of(words, WIDE)
        lower = product(asked[1], odd, product(asked[0], even, zeros, WIDE), WIDE)
        upper = product(asked[3], upper_odd, product(asked[2], upper_even, zeros, WIDE), WIDE)
        found = lower * scales[0][None, :] + upper * scales[1][None, :]
        found += asked[5][:, None] * scales[2][None, :] + asked[6][:, None] * scales[3][None, :]
        most = asked[4]
    return found, most


@triton.jit
def no_values(R: tl.constexpr, BV: tl.constexpr, KIND: tl.constexpr):
    """Sums of no values: of the parts that they are unpacked to [R, BV / PER], in 4 bits also of both halves' least
    values [R]."""
    if KIND.PER == 1:
        found = (tl.zeros((R, BV), dtype=tl.float32),)
    elif KIND.PER == 2:
        found = (tl.zeros((R, BV // 2), dtype=tl.float32), tl.zeros((R, BV // 2), dtype=tl.float32))
    else:
        found = (
            tl.zeros((R, BV // 4), dtype=tl.float32), tl.zeros((R, BV // 4), dtype=tl.float32),
            tl.zeros((R, BV // 4), dtype=tl.float32), tl.zeros((R, BV // 4), dtype=tl.float32),
            tl.zeros((R,), dtype=tl.float32), tl.zeros((R,), dtype=tl.float32),
        )  # fmt: skip
    return found


@triton.jit
def fold_words(
    sums, top, total, asked, k, val, k_scales, v_scales, position, seen, query_position, slope, scale, softcap,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Take words of keys [BD / PER, N] and of values [N, BV / PER] into the running sums."""
    scores, most = _scores(asked, k, k_scales, K_KIND, WIDE)
    scores = bend(
        scores, query_position, position[None, :], slope, scale * most[:, None], softcap, SOFTCAP, ALIBI
    )  # fmt: skip
    size = v_scales[0]
    if V_KIND.PER == 4:
        size = v_scales[0] + v_scales[1]
    size = tl.where(size < LEAST_SCALE, LEAST_SCALE, size)  # NaN stays
    part = 1.0 / size
    scores = tl.where(seen[None, :], scores + tl.log2(size)[None, :], float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    total = total * shrink + tl.sum(p * part[None, :], axis=1)
    if V_KIND.PER == 2:
        v_even, v_odd = halves_of(val, V_KIND.TYPE, WIDE)
        p = p.to(tl.float16)
        even = product(p, v_even, sums[0] * shrink[:, None], WIDE)
        odd = product(p, v_odd, sums[1] * shrink[:, None], WIDE)
        found = (even, odd)
    else:
        v_even, v_odd, upper_even, upper_odd = quarters_of(val, WIDE)
        # Parts of one are taken, and sums of least values kept apart: float16 holds both factors.
        lower_p = (p * (v_scales[0] * part)[None, :]).to(tl.float16)
        upper_p = (p * (v_scales[1] * part)[None, :]).to(tl.float16)
        even = product(lower_p, v_even, sums[0] * shrink[:, None], WIDE)
        odd = product(lower_p, v_odd, sums[1] * shrink[:, None], WIDE)
        upper_even = product(upper_p, upper_even, sums[2] * shrink[:, None], WIDE)
        upper_odd = product(upper_p, upper_odd, sums[3] * shrink[:, None], WIDE)
        least = sums[4] * shrink + tl.sum(p * (v_scales[2] * part)[None, :], axis=1)
        upper_least = sums[5] * shrink + tl.sum(p * (v_scales[3] * part)[None, :], axis=1)
        found = (even, odd, upper_even, upper_odd, least, upper_least)
    return found, new_top, total


@triton.jit
def joined(sums, R: tl.constexpr, BV: tl.constexpr, KIND: tl.constexpr):
    """Sums of parts -> [R, BV]: as they are, even and odd columns, or those of both halves."""
    if KIND.PER == 1:
        found = sums[0]
    elif KIND.PER == 2:
        found = tl.reshape(tl.join(sums[0], sums[1]), (R, BV))
    else:
        lower = tl.reshape(tl.join(sums[0], sums[1]), (R, BV // 2)) + sums[4][:, None]
        upper = tl.reshape(tl.join(sums[2], sums[3]), (R, BV // 2)) + sums[5][:, None]
        found = tl.reshape(tl.permute(tl.join(lower, upper), (0, 2, 1)), (R, BV))
    return found


def in_words(stored: Tensor) -> Tensor:
    """Narrow numbers as int16, two bytes in each; others as they are."""
    return stored.view(torch.int16) if stored.element_size() == 1 else stored
