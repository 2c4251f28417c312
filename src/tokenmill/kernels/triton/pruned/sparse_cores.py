"""Multiplications of 2:4 numbers on sparse tensor cores (mma.sp), as a warp makes them. Owns: which thread holds what.

A block is 16 rows of the weight times 64 columns of 16 bits, and two multiplications; of 8 bits it is 128 columns, and
four, after they are widened to float16. Of thread 4 g + t:

    w, v     four words each, of the rows g and g + 8: the kept numbers of the fours 4 t to 4 t + 3 (8 bits: 8 t to 8 t
             + 7), 16 bytes as they lie in memory. A multiplication takes two words, or what two fours become
    e        where they belong (layout.py), a word for every two multiplications
    b        eight words of eight tokens' activations for every two multiplications (activations.py lays them out)
    c        sums of the rows g (0, 1) and g + 8 (2, 3), and of the tokens 2 t and 2 t + 1

The interpreter, which knows no machine instructions, takes the long way. Must not know: where words come from.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.kernels.triton.quantised.narrow_words import float8_of, half_pair


@triton.jit
def multiply_block(c, w, v, e, b, TYPE: tl.constexpr, WIDE: tl.constexpr):
    """c + what a block adds; TYPE: the numbers' type, "bf16", "f16" or "e4m3"."""
    if TYPE == "e4m3":
        w0, w1 = _halves(w[0], WIDE)
        w2, w3 = _halves(w[1], WIDE)
        v0, v1 = _halves(v[0], WIDE)
        v2, v3 = _halves(v[1], WIDE)
        first = (b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7])
        c = _multiply_two(c, (w0, w1, w2, w3), (v0, v1, v2, v3), e[0], first, "f16", WIDE)
        w0, w1 = _halves(w[2], WIDE)
        w2, w3 = _halves(w[3], WIDE)
        v0, v1 = _halves(v[2], WIDE)
        v2, v3 = _halves(v[3], WIDE)
        second = (b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15])
        c = _multiply_two(c, (w0, w1, w2, w3), (v0, v1, v2, v3), e[1], second, "f16", WIDE)
    else:
        c = _multiply_two(c, w, v, e[0], b, TYPE, WIDE)
    return c


@triton.jit
def _halves(word, WIDE: tl.constexpr):
    """Four float8 -> two words of two float16."""
    if WIDE:
        low = half_pair(float8_of(word, 0), float8_of(word, 1), True)
        return low, half_pair(float8_of(word, 2), float8_of(word, 3), True)
    return tl.inline_asm_elementwise(
        "{ .reg .b16 s, t; mov.b32 {s, t}, $2; cvt.rn.f16x2.e4m3x2 $0, s; cvt.rn.f16x2.e4m3x2 $1, t; }",
        "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _multiply_two(c, w, v, e, b, TYPE: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:
        return _long_way(_long_way(c, w, v, e, b, 0, TYPE), w, v, e, b, 1, TYPE)
    words = [w[0], w[1], w[2], w[3], v[0], v[1], v[2], v[3], b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], e]
    sums = [c[0], c[1], c[2], c[3]]
    if TYPE == "bf16":
        found = tl.inline_asm_elementwise(
            """{
            mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32
                {$0, $1, $2, $3}, {$4, $8, $5, $9}, {$12, $13, $14, $15}, {$21, $22, $23, $24}, $20, 0x0;
            mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32
                {$0, $1, $2, $3}, {$6, $10, $7, $11}, {$16, $17, $18, $19}, {$0, $1, $2, $3}, $20, 0x1; }""",
            "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f", words + sums,
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = tl.inline_asm_elementwise(
            """{
            mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32
                {$0, $1, $2, $3}, {$4, $8, $5, $9}, {$12, $13, $14, $15}, {$21, $22, $23, $24}, $20, 0x0;
            mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32
                {$0, $1, $2, $3}, {$6, $10, $7, $11}, {$16, $17, $18, $19}, {$0, $1, $2, $3}, $20, 0x1; }""",
            "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f", words + sums,
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return found


@triton.jit
def _number(word, place, TYPE: tl.constexpr):
    """The number at this place of each word, in float32."""
    half = (word >> (16 * place)) & 65535
    if TYPE == "bf16":
        return (half << 16).to(tl.float32, bitcast=True)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _long_way(c, w, v, e, b, M: tl.constexpr, TYPE: tl.constexpr):
    """One of the two multiplications, a kept number at a time."""
    thread = tl.arange(0, e.shape[0])
    first, t = thread // 4 * 4, thread % 4  # the group's first thread
    warp = thread // 32 * 32
    new = ()
    for i in tl.static_range(4):
        low: tl.constexpr = i // 2  # rows g, or g + 8
        token = 2 * t + i % 2
        y = c[i]
        for four in tl.static_range(8):
            word = v[2 * M + four // 4] if low else w[2 * M + four // 4]
            kept = tl.gather(word, first + four % 4, axis=0)
            code = tl.gather(e, first + 2 * M + four // 4, axis=0) >> (4 * (four % 4 + 4 * low))
            for s in tl.static_range(2):
                column = (code >> (2 * s)) & 3
                x = tl.gather(b[4 * M + four // 2], warp + 4 * token + 2 * (four % 2) + column // 2, axis=0)
                y += _number(kept, s, TYPE) * _number(x, column % 2, TYPE)
        new = new + (y,)
    return new
