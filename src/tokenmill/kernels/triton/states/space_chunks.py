"""Mamba-2 for many tokens of a row at once. Owns: one kernel that walks a row's chunks as products.

Within a chunk of SIZE tokens, with G the running sum of the logarithms of what a head keeps, S its matrix before the
chunk, and u what each token writes (its values times its pace):

    out[t] = exp(G[t]) c[t] S + sum over i <= t of exp(G[t] - G[i]) (c[t] . b[i]) u[i] + skip x[t]
    S = exp(G[last]) S + sum of exp(G[last] - G[i]) b[i] u[i]

S is computed in float32; products of 16 bit models round what they multiply to 16 bits. Chunks begin with a row's
tokens of a step, so where bytes must not depend on how a sequence is cut, space.py goes token by token.
Must not know: layers, families.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, SpaceSpec
from tokenmill.kernels.triton.common import INTERPRETED, least_of, most_of, pow2, softplus
from tokenmill.kernels.triton.states.recurrent import SHORT, product
from tokenmill.kernels.triton.states.space import HIGHEST

SIZE = 64


@triton.jit
def _chunked_space_kernel(
    mixed_ptr, pace_ptr, rate_ptr, shift_ptr, skip_ptr, state_ptr, out_ptr, start_ptr, row_ptr, position_ptr, left_ptr,
    mixed_stride, pace_stride, factor, low, high, gain, LEFT: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, SIZE: tl.constexpr, SHORT: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    if count > SHORT:
        kind: tl.constexpr = mixed_ptr.dtype.element_ty
        r, n, p = tl.arange(0, SIZE), tl.arange(0, BN), tl.program_id(0) * BP + tl.arange(0, BP)
        real_n, real_p = n < N, p < P
        rate, shift, skip = tl.load(rate_ptr + head), tl.load(shift_ptr + head), tl.load(skip_ptr + head)
        earlier = r[:, None] >= r[None, :]
        known = tl.load(position_ptr + first) != 0
        row = tl.load(row_ptr + sequence)
        places = state_ptr + (row * H + head) * (N * P) + n[:, None] * P + p[None, :]
        inside = real_n[:, None] & real_p[None, :]
        s = tl.load(places, mask=inside & known, other=0.0).to(tl.float32)
        for part in range(0, tl.cdiv(count, SIZE)):
            real = part * SIZE + r < count
            token = (first + part * SIZE + r).to(tl.int64)
            pace = tl.load(pace_ptr + token * pace_stride + head, mask=real, other=0.0).to(tl.float32)
            pace = softplus(pace * factor + shift)
            pace = tl.where(real, least_of(most_of(pace, low), high), 0.0)
            sums, last = tl.cumsum(-rate * pace, axis=0), tl.sum(-rate * pace, axis=0)
            lines = mixed_ptr + token[:, None] * mixed_stride
            values = lines + head * P + p[None, :]
            x = tl.load(values, mask=real[:, None] & real_p[None, :], other=0.0).to(tl.float32)
            keys = lines + H * P + head // (H // G) * N + n[None, :]
            b = tl.load(keys, mask=real[:, None] & real_n[None, :], other=0.0)
            c = tl.load(keys + G * N, mask=real[:, None] & real_n[None, :], other=0.0)
            ratio = tl.exp(tl.where(earlier, sums[:, None] - sums[None, :], 0.0))
            shares = product(c, tl.trans(b), EXACT) * tl.where(earlier, ratio, 0.0)
            written = x * pace[:, None]
            y = product(c, s.to(kind), EXACT) * tl.exp(sums)[:, None]
            y += product(shares.to(kind), written.to(kind), EXACT) + skip * x
            out = out_ptr + (token[:, None] * H + head) * P + p[None, :]
            tl.store(out, (y * gain).to(out_ptr.dtype.element_ty), mask=real[:, None] & real_p[None, :])
            kept = (written * tl.exp(last - sums)[:, None]).to(kind)
            s = s * tl.exp(last) + product(tl.trans(b), kept, EXACT)
        if LEFT:
            row = tl.load(left_ptr + first + count - 1)
            places = state_ptr + (row * H + head) * (N * P) + n[:, None] * P + p[None, :]
        tl.store(places, s, mask=inside)


def can_chunk_space(spec: SpaceSpec, kind: torch.dtype) -> bool:
    """Are heads of widths that products of 16 bits were seen to be right with (see chunks.py)? Those of float32 take
    more registers than there are; the interpreter has no others."""
    widths = {spec.keys, spec.head_dim}
    return INTERPRETED and max(widths) <= 128 if kind == torch.float32 else widths <= {64, 128, 256}


def chunked_space_(
    mixed: Tensor, rates: Tensor, spec: SpaceSpec, state: Tensor, ctx: ForwardContext, out: Tensor
) -> None:
    """See kernels/states.py; fills `out` for sequences of more than SHORT tokens, and leaves others alone. (Of such a
    sequence the last state alone is left: none of its tokens is a draft.)"""
    assert ctx.rows is not None, "recurrent layers find their states by row"
    rows, columns = max(16, pow2(spec.keys)), min(32, max(16, pow2(spec.head_dim)))
    grid = (triton.cdiv(spec.head_dim, columns), spec.heads, ctx.rows.sequences.shape[0])
    _chunked_space_kernel[grid](
        mixed, rates, spec.rate, spec.shift, spec.skip, state, out, ctx.borders(), ctx.rows.sequences, ctx.positions,
        ctx.rows.left, mixed.stride(0), rates.stride(0), float(spec.factor), float(spec.low),
        min(float(spec.high), HIGHEST), float(spec.gain), LEFT=ctx.rows.left is not None, H=spec.heads,
        P=spec.head_dim, G=spec.groups, N=spec.keys, BN=rows, BP=columns,
        SIZE=SIZE, SHORT=SHORT, EXACT=INTERPRETED or mixed.dtype == torch.float32, num_warps=8 if rows > 128 else 4,
        num_stages=2,
    )  # fmt: skip
