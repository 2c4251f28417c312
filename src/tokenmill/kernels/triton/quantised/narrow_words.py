"""Numbers in 32 bit words, in registers. Owns: four or eight weights of a word times activations in few instructions.

Activations of a word are divided by their largest magnitude first: then float8 weights multiply them in pairs of half
precision without overflow, and integers multiply them as 8 bit integers. Such a scale for every 4 to 8 columns costs
less accuracy than bfloat16 does. The interpreter, which knows no machine instructions, takes the long way.
Must not know: matrices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.kernels.triton.common import size_bits


@triton.jit
def largest_of(a, b, c, d):
    """The largest of four magnitudes, as `size_bits`."""
    return tl.maximum(tl.maximum(size_bits(a), size_bits(b)), tl.maximum(size_bits(c), size_bits(d)))


@triton.jit
def above_zero(bits):
    """A magnitude from its bits, at least 1e-30."""
    return tl.maximum(bits, 0x0DA24260).to(tl.float32, bitcast=True)


@triton.jit
def halves(pair):
    """Two bfloat16 in an int32 -> float32, float32."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def bfloat_at(pointer, spot, mask):
    """bfloat16 numbers [N] at these places as float32, read as words of 32 bits: smaller ones are not copied ahead.

    pointer: to a multiple of 4 bytes."""
    word = tl.load(pointer.to(tl.pointer_type(tl.int32)) + (spot >> 1), mask=mask, other=0)
    return tl.where((spot & 1) == 1, word & -65536, word << 16).to(tl.float32, bitcast=True)


@triton.jit
def half_pair(a, b, WIDE: tl.constexpr):
    """Two float32 -> float16 pair in an int32, a lowest."""
    if WIDE:
        low = a.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        return low | (b.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def bytes4(a, b, c, d, WIDE: tl.constexpr):
    """Four float32 within -127..127 -> their nearest integers as bytes of an int32, a lowest."""
    # Adding 1.5 * 2^23 leaves the integer in the lowest bits.
    a = (a + 12582912.0).to(tl.int32, bitcast=True)
    b = (b + 12582912.0).to(tl.int32, bitcast=True)
    c = (c + 12582912.0).to(tl.int32, bitcast=True)
    d = (d + 12582912.0).to(tl.int32, bitcast=True)
    if WIDE:
        return (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 s, t; prmt.b32 s, $1, $2, 0x0040; prmt.b32 t, $3, $4, 0x0040; prmt.b32 $0, s, t, 0x5410; }",
            "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _signed(w, I: tl.constexpr):
    return (w << (24 - 8 * I)) >> 24


@triton.jit
def dot4(w, x, acc, WIDE: tl.constexpr):
    """acc + the four signed bytes of w times those of x."""
    if WIDE:
        for i in tl.static_range(4):
            acc += _signed(w, i) * _signed(x, i)
        return acc
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [w, x, acc], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def float8_of(w, I: tl.constexpr):
    """Byte I of each word as float8, in float32."""
    b = (w >> (8 * I)) & 255
    exponent = (b >> 3) & 15
    fraction = (b & 7).to(tl.float32)
    size = tl.where(exponent == 0, fraction, (fraction + 8.0) * tl.exp2((exponent - 1).to(tl.float32))) / 512.0
    return tl.where(b > 127, -size, size)


@triton.jit
def float8_pairs(w, WIDE: tl.constexpr):
    """The four float8 of each word as float16 pairs, in two int32."""
    if WIDE:
        return (
            half_pair(float8_of(w, 0), float8_of(w, 1), WIDE),
            half_pair(float8_of(w, 2), float8_of(w, 3), WIDE),
        )
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 s, t;
            mov.b32 {s, t}, $2;
            cvt.rn.f16x2.e4m3x2 $0, s;
            cvt.rn.f16x2.e4m3x2 $1, t; }""",
            "=r,=r,r", [w], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _halves16(pair):
    """Two float16 in an int32 -> float32, float32."""
    low = (pair << 16 >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def dot_pairs(wa, wb, xa, xb, scale, acc, WIDE: tl.constexpr):
    """acc + scale * the float16 pairs wa and wb times xa and xb."""
    if WIDE:
        w0, w1 = _halves16(wa)
        w2, w3 = _halves16(wb)
        a0, a1 = _halves16(xa)
        b0, b1 = _halves16(xb)
        return acc + (w0 * a0 + w1 * a1 + w2 * b0 + w3 * b1) * scale
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 s, t; .reg .b32 a; .reg .f32 f, g;
            mul.rn.f16x2 a, $1, $3;
            fma.rn.f16x2 a, $2, $4, a;
            mov.b32 {s, t}, a;
            cvt.f32.f16 f, s;
            cvt.f32.f16 g, t;
            add.f32 f, f, g;
            fma.rn.f32 $0, f, $5, $6; }""",
            "=f,r,r,r,r,f,f", [wa, wb, xa, xb, scale, acc], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
