"""How a code of four bits becomes a number, in registers. Owns: tables of sixteen numbers, and the three ways in which
kernels read them: as bytes for integer products, as planes for tensor cores, one by one.

A TABLE is what sixteen codes mean in steps of a matrix's scales: signed bytes, the first code's lowest, as one integer
that a kernel is compiled for. INTEGERS (0) is none: a code is its number plus 8, and groups may have zero points.
A word of 32 bits holds eight codes, those of two neighbours of each of four planes (narrow.py). Bytes are found by
`prmt`, four of eight at a time; of 4 bit floats, bits are moved to where bfloat16 and float16 have them and multiplied
by a power of two, exactly. The interpreter, which knows no machine instructions, takes the long way.
Must not know: matrices, scales, where words lie.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

INTEGERS = tl.constexpr(0)


def table_of(entries: Tensor) -> int:
    """Up to sixteen whole numbers of -127..127 -> the TABLE of them."""
    numbers = [round(float(entry)) for entry in entries.flatten().tolist()]
    assert len(numbers) <= 16 and all(-127 <= number <= 127 for number in numbers)
    return int.from_bytes(struct.pack(f"{len(numbers)}b", *numbers), "little")


def entries_of(table: int) -> list[int]:
    """The sixteen numbers of a TABLE."""
    return list(struct.unpack("16b", table.to_bytes(16, "little")))


FLOATS = tl.constexpr(table_of(torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])))
"""4 bit floats (sign, two bits of exponent, one of mantissa) in steps of a half."""


# What kernels are compiled for is made below, of whole numbers alone: Triton follows whatever these functions name.


@triton.constexpr_function
def _word(table, at):
    """Entries 4 at .. 4 at + 3 as an int32."""
    return ((table >> 32 * at & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


@triton.constexpr_function
def _half(number, fraction, bias):
    """The bits of a whole number of -127..127 as a float16, or as a bfloat16; fraction: its bits of that."""
    size, sign = (256 - number, 0x8000) if number > 127 else (number, 0)
    if size == 0:
        return 0
    exponent = len(bin(size)) - 3
    return sign | (exponent + bias) << fraction | (size << fraction >> exponent) & (1 << fraction) - 1


@triton.constexpr_function
def _halves_of(table, half):
    """The entries' lower bytes, then their upper ones, as eight words in hexadecimal; half: "bf16" or "f16"."""
    fraction, bias = (7, 127) if half == "bf16" else (10, 15)
    halves = [_half(table >> 8 * i & 255, fraction, bias) for i in range(16)]
    return [
        hex(sum((halves[4 * word + i] >> shift & 255) << 8 * i for i in range(4)))
        for shift in (0, 8)
        for word in range(4)
    ]


# Of a word in w: s chooses among eight bytes, k between what eight lower and eight upper entries gave.
_CHOICE = "and.b32 s, w, 0x77777777; shr.u32 k, w, 1; lop3.b32 k, k, 0x44444444, 0x32103210, 0xea;"
_NEXT = "shr.u32 s, s, 16; shr.u32 k, k, 16;"


@triton.constexpr_function
def _lookup(out, words):
    """Four bytes of sixteen."""
    first, second, third, fourth = words
    return f"prmt.b32 {out}, {first}, {second}, s; prmt.b32 t, {third}, {fourth}, s; prmt.b32 {out}, {out}, t, k;"


@triton.constexpr_function
def _bytes_asm(table):
    """A word -> its even codes' and its odd codes' entries as bytes."""
    words = [hex(table >> 32 * i & 0xFFFFFFFF) for i in range(4)]
    return (
        "{ .reg .b32 w, s, k, t, a, b; mov.b32 w, $2;"
        f"{_CHOICE} {_lookup('a', words)} {_NEXT} {_lookup('b', words)}"
        "prmt.b32 $0, a, b, 0x6420; prmt.b32 $1, a, b, 0x7531; }"
    )


@triton.constexpr_function
def _planes_asm(table, half):
    """A word -> the entries of four planes, two halves each."""
    low, high = (words := _halves_of(table, half))[:4], words[4:]
    return (
        "{ .reg .b32 w, s, k, t, a, b, c, d, e; mov.b32 w, $4;"
        f"{_CHOICE} {_lookup('a', low)} {_lookup('b', high)} {_NEXT} {_lookup('c', low)} {_lookup('d', high)}"
        "prmt.b32 e, a, b, 0x5140; prmt.b32 a, a, b, 0x7362; prmt.b32 t, c, d, 0x5140; prmt.b32 c, c, d, 0x7362;"
        "prmt.b32 $0, e, t, 0x5410; prmt.b32 $1, e, t, 0x7632; prmt.b32 $2, a, c, 0x5410; prmt.b32 $3, a, c, 0x7632; }"
    )


@triton.constexpr_function
def float_asm(shift, half):
    """A word of 4 bit floats -> those at `shift` of either half of it, in steps of a half."""
    # Magnitudes move to the lowest bit of the exponent and beyond; what exponents are short of is multiplied.
    lowest, mask, power = (6, "0x01c001c0", "0x7f007f00") if half == "bf16" else (9, "0x0e000e00", "0x78007800")
    way = "shl.b32" if lowest >= shift else "shr.u32"
    return (
        f"{{ .reg .b32 s, t, p, z; shl.b32 s, $1, {12 - shift}; {way} t, $1, {abs(lowest - shift)};"
        f"and.b32 t, t, {mask}; lop3.b32 t, s, 0x80008000, t, 0xea; mov.b32 p, {power}; mov.b32 z, 0x80008000;"
        f"fma.rn.{half}x2 $0, t, p, z; }}"
    )


@triton.constexpr_function
def half_of(like):
    """What instructions call this type of 16 bits."""
    return "bf16" if like == tl.bfloat16 else "f16"


@triton.constexpr_function
def more_than_code(like):
    """What integer_asm's numbers are too much by before zero points: 8, and the least number whose last bit is one."""
    return 136.0 if like == tl.bfloat16 else 1032.0


@triton.constexpr_function
def integer_asm(shift, half):
    """A word -> its nibbles at `shift` in a type of 16 bits, plus $2: 0x4300 | q is 128 + q as bfloat16, 0x6400 | q is
    1024 + q as float16, and $2 is less than nothing by as much and 8 and the zero point (more_than_code)."""
    one, base = ("0x3f803f80", "0x43004300") if half == "bf16" else ("0x3c003c00", "0x64006400")
    return (
        f"{{ .reg .b32 t, one; mov.b32 one, {one}; shr.u32 t, $1, {shift};"
        f"lop3.b32 t, t, 0x000f000f, {base}, 0xea; fma.rn.{half}x2 $0, t, one, $2; }}"
    )


@triton.jit
def entry(code, TABLE: tl.constexpr):
    """The numbers of these codes as int32."""
    code = code.to(tl.int32)
    if TABLE == 0:
        number = code - 8
    else:
        lower = tl.where(code < 4, _word(TABLE, 0), _word(TABLE, 1))
        upper = tl.where(code < 12, _word(TABLE, 2), _word(TABLE, 3))
        word = tl.where(code < 8, lower, upper)
        number = (word << (24 - (code & 3) * 8)) >> 24
    return number


@triton.jit
def bytes_of(w, TABLE: tl.constexpr, WIDE: tl.constexpr):
    """Words -> bytes of the even codes (planes 0 and 2) and of the odd ones: numbers, but codes of INTEGERS."""
    if TABLE == 0:
        even = w & 0x0F0F0F0F
        odd = (w >> 4) & 0x0F0F0F0F
    elif WIDE:
        even = w & 0
        odd = w & 0
        for i in tl.static_range(4):
            even |= (entry((w >> (8 * i)) & 15, TABLE) & 255) << (8 * i)
            odd |= (entry((w >> (8 * i + 4)) & 15, TABLE) & 255) << (8 * i)
    else:
        even, odd = tl.inline_asm_elementwise(
            _bytes_asm(TABLE), "=&r,=&r,r", [w], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    return even, odd


@triton.jit
def plane(w, zero, like: tl.constexpr, SHIFT: tl.constexpr, TABLE: tl.constexpr, WIDE: tl.constexpr):
    """Columns of one nibble [BN, 32] in type `like`; zero [BN] float32: zero points of INTEGERS."""
    if WIDE:
        q = entry((w >> SHIFT) & 15, TABLE).to(tl.float32) - zero[:, None]
    elif TABLE == FLOATS and (like == tl.bfloat16 or like == tl.float16):
        q = tl.inline_asm_elementwise(
            float_asm(SHIFT, half_of(like)), "=r,r", [w], dtype=like.value, is_pure=True, pack=2
        )  # fmt: skip
    elif TABLE == 0 and (like == tl.bfloat16 or like == tl.float16):
        _, less = tl.broadcast(w.to(like, bitcast=True), (-more_than_code(like) - zero).to(like)[:, None])
        q = tl.inline_asm_elementwise(
            integer_asm(SHIFT, half_of(like)), "=r,r,r", [w, less], dtype=like.value, is_pure=True, pack=2
        )  # fmt: skip
    else:
        q = (entry((w >> SHIFT) & 15, TABLE).to(tl.float32) - zero[:, None]).to(like)
    return q


@triton.constexpr_function
def looks_up(table, like, wide):
    """Are all planes of a word found at once (planes), or one by one (plane)?"""
    return not wide and table not in (0, FLOATS.value) and like in (tl.bfloat16, tl.float16)


@triton.jit
def planes(w, like: tl.constexpr, TABLE: tl.constexpr):
    """Columns of all four nibbles, [BN, 32] each, in type `like`."""
    return tl.inline_asm_elementwise(
        _planes_asm(TABLE, half_of(like)), "=&r,=&r,=&r,=&r,r", [w],
        dtype=(like.value, like.value, like.value, like.value), is_pure=True, pack=2,
    )  # fmt: skip
