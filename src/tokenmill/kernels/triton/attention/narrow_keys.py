"""Keys and values of 8 bits in registers. Owns: pairs of stored numbers as float16, their scales, and the softmax step
that takes them.

Two neighbouring numbers lie in one int16, because tensor cores are fed (and shared memory is transposed) in 16 bits:
the lower and the upper ones become operands of their own, so heads are split into even and odd columns. float16 holds
every float8 and every int8 exactly. Queries are divided by their largest magnitude first. A value's scale is taken into
the exponent of its probability, so that float16 holds their product whatever the scales are.
Must not know: tables, splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.core.forward import KVView
from tokenmill.kernels.triton.attention.paging import bend, product
from tokenmill.kernels.triton.quantised.narrow_words import float8_of


@triton.jit
def halves_of(pairs, KIND: tl.constexpr, WIDE: tl.constexpr):
    """int16 pairs of 8-bit numbers -> the lower and the upper numbers in float16."""
    if WIDE:
        if tl.int8 == KIND:
            low = (pairs << 8 >> 8).to(tl.float16)
            high = (pairs >> 8).to(tl.float16)
        else:
            low = float8_of(pairs.to(tl.int32), 0).to(tl.float16)
            high = float8_of(pairs.to(tl.int32), 1).to(tl.float16)
    elif tl.int8 == KIND:
        # 0x6400 | u is 1024 + u; u is the number + 128.
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, less; xor.b32 t, $2, 0x80808080; mov.b32 less, 0x64806480;
            prmt.b32 u, t, 0x64646464, 0x4240; sub.rn.f16x2 $0, u, less;
            prmt.b32 u, t, 0x64646464, 0x4341; sub.rn.f16x2 $1, u, less; }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return low, high


@triton.jit
def split_query(q, R: tl.constexpr, BD: tl.constexpr):
    """q [R, BD] -> its even and odd columns in float16, divided by the rows' largest magnitudes, and these [R]."""
    wide = q.to(tl.float32)
    most = tl.max(tl.abs(wide), axis=1)
    part = 1.0 / tl.where(most > 0.0, most, 1.0)
    even, odd = tl.split(tl.reshape((wide * part[:, None]).to(tl.float16), (R, BD // 2, 2)))
    return even, odd, most


@triton.jit
def fold_pairs(
    even, odd, top, total, q_even, q_odd, most, k, val, k_scale, v_scale, position, seen, query_position, slope,
    scale, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Take key pairs [BD / 2, N] and value pairs [N, BV / 2] into the running sums of even and odd columns."""
    k_even, k_odd = halves_of(k, KIND, WIDE)
    scores = product(q_even, k_even, tl.zeros((q_even.shape[0], k.shape[1]), dtype=tl.float32), WIDE)
    scores = product(q_odd, k_odd, scores, WIDE)
    scores = scores * k_scale[None, :] * most[:, None]
    scores = bend(scores, query_position, position[None, :], slope, scale, softcap, SOFTCAP, ALIBI)
    v_scale = tl.where(v_scale < 8.7e-19, 8.7e-19, v_scale)  # of zeros; NaN stays
    scores = tl.where(seen[None, :], scores + tl.log2(v_scale)[None, :], float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    total = total * shrink + tl.sum(p / v_scale[None, :], axis=1)
    p = p.to(tl.float16)
    v_even, v_odd = halves_of(val, KIND, WIDE)
    even = product(p, v_even, even * shrink[:, None], WIDE)
    odd = product(p, v_odd, odd * shrink[:, None], WIDE)
    return even, odd, new_top, total


@triton.jit
def joined(even, odd, R: tl.constexpr, BV: tl.constexpr):
    """Even and odd columns [R, BV / 2] -> [R, BV]."""
    return tl.reshape(tl.join(even, odd), (R, BV))


def in_pairs(stored: Tensor) -> Tensor:
    """8-bit numbers [..., D] as int16 [..., D / 2]."""
    return stored.view(torch.int16)


def kind_of(kv: KVView) -> tl.dtype | None:
    """What kernels call the type of scaled numbers; None: these are stored plainly."""
    if kv.key_scale is None:
        return None
    return tl.int8 if kv.key.dtype == torch.int8 else tl.float8e4nv
