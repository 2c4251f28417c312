"""State spaces, token by token. Owns: one launch for Mamba-2 (a decay for each head) and one for Mamba-1 (a decay for
each number).

A sequence is found by its place in the step, its state by its row; recurrent.py has the layers with keys.
Must not know: layers, families.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, ScanSpec, SpaceSpec
from tokenmill.kernels.triton.common import begin, least_of, most_of, pow2, softplus, wait
from tokenmill.kernels.triton.states.recurrent import columns_of, find_state

HIGHEST = 3.0e38
"""A bound that is none."""


@triton.jit
def _space_token(s, keys, values, paces, rate, factor, shift, low, high, real_n, real_p, KEYS: tl.constexpr):
    """A head's matrix behind one more token, and what reads it: c and x."""
    b = tl.load(keys, mask=real_n, other=0.0).to(tl.float32)
    c = tl.load(keys + KEYS, mask=real_n, other=0.0).to(tl.float32)
    x = tl.load(values, mask=real_p, other=0.0).to(tl.float32)
    pace = softplus(tl.load(paces).to(tl.float32) * factor + shift)
    pace = least_of(most_of(pace, low), high)
    return s * tl.exp(-rate * pace) + b[:, None] * (x * pace)[None, :], c, x


@triton.jit
def _space_kernel(
    mixed_ptr, pace_ptr, rate_ptr, shift_ptr, skip_ptr, state_ptr, out_ptr, start_ptr, row_ptr, position_ptr, left_ptr,
    mixed_stride, pace_stride, factor, low, high, gain, LEFT: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    head, sequence = tl.program_id(1), tl.program_id(2)
    n, p = tl.arange(0, BN), tl.program_id(0) * BP + tl.arange(0, BP)
    real_n, real_p = n < N, p < P
    rate, shift, skip = tl.load(rate_ptr + head), tl.load(shift_ptr + head), tl.load(skip_ptr + head)
    first, count, row, known = find_state(start_ptr, row_ptr, position_ptr, sequence, MOST)
    places = state_ptr + head * (N * P) + n[:, None] * P + p[None, :]
    size = H * N * P
    inside = real_n[:, None] & real_p[None, :]
    s = tl.load(places + row * size, mask=inside & (count > 0), other=0.0).to(tl.float32)
    s = tl.where(known, s, 0.0)
    wait(PDL)
    if count > 0:
        values = mixed_ptr + first.to(tl.int64) * mixed_stride + head * P + p
        keys = mixed_ptr + first.to(tl.int64) * mixed_stride + H * P + head // (H // G) * N + n
        paces = pace_ptr + first.to(tl.int64) * pace_stride + head
        out = out_ptr + (first.to(tl.int64) * H + head) * P + p
        if MOST == 1 and not LEFT:  # the matrix goes out before it is read
            s, c, x = _space_token(s, keys, values, paces, rate, factor, shift, low, high, real_n, real_p, G * N)
            tl.store(places + row * size, s, mask=inside)
            y = tl.sum(s * c[:, None], axis=0) + skip * x
            tl.store(out, (y * gain).to(out_ptr.dtype.element_ty), mask=real_p)
        else:
            for t in range(count):
                s, c, x = _space_token(s, keys, values, paces, rate, factor, shift, low, high, real_n, real_p, G * N)
                y = tl.sum(s * c[:, None], axis=0) + skip * x
                tl.store(out, (y * gain).to(out_ptr.dtype.element_ty), mask=real_p)
                keys, values, paces, out = keys + mixed_stride, values + mixed_stride, paces + pace_stride, out + H * P
                if LEFT:
                    left = tl.load(left_ptr + first + t)
                    tl.store(places + left * size, s, mask=inside & (left >= 0))
            if not LEFT:
                tl.store(places + row * size, s, mask=inside)


def state_space_(
    mixed: Tensor,
    rates: Tensor,
    spec: SpaceSpec,
    state: Tensor,
    ctx: ForwardContext,
    out: Tensor,
    *,
    most: int,
    steady: bool,
    pdl: bool,
) -> None:
    """See kernels/states.py; fills `out` for sequences of `most` tokens or fewer, and leaves others alone. steady: by
    one kernel, whatever the step."""
    assert ctx.rows is not None, "recurrent layers find their states by row"
    sequences, one = ctx.rows.sequences.shape[0], ctx.max_query == 1 and not steady
    columns = columns_of(sequences, spec.keys, spec.head_dim, one=one)
    grid = (triton.cdiv(spec.head_dim, columns), spec.heads, sequences)
    _space_kernel[grid](
        mixed, rates, spec.rate, spec.shift, spec.skip, state, out, ctx.borders(), ctx.rows.sequences, ctx.positions,
        ctx.rows.left, mixed.stride(0), rates.stride(0), float(spec.factor), float(spec.low),
        min(float(spec.high), HIGHEST), float(spec.gain), LEFT=ctx.rows.left is not None, H=spec.heads,
        P=spec.head_dim, G=spec.groups, N=spec.keys, BN=pow2(spec.keys), BP=columns, MOST=1 if one else most, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _scan_kernel(
    x_ptr, pace_ptr, mixed_ptr, rate_ptr, skip_ptr, norm_b_ptr, norm_c_ptr, state_ptr, out_ptr, start_ptr, row_ptr,
    position_ptr, left_ptr, C, x_stride, pace_stride, mixed_stride, eps_b, eps_c, LEFT: tl.constexpr,
    NORMS: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    sequence = tl.program_id(1)
    n, c = tl.arange(0, BN), tl.program_id(0) * BC + tl.arange(0, BC)
    real_n, real_c = n < N, c < C
    inside = real_n[:, None] & real_c[None, :]
    rate = tl.load(rate_ptr + n[:, None] * C + c[None, :], mask=inside, other=0.0)
    skip = tl.load(skip_ptr + c, mask=real_c, other=0.0)
    gain_b, gain_c = 1.0, 1.0
    if NORMS:
        gain_b = tl.load(norm_b_ptr + n, mask=real_n, other=0.0).to(tl.float32)
        gain_c = tl.load(norm_c_ptr + n, mask=real_n, other=0.0).to(tl.float32)
    first, count, row, known = find_state(start_ptr, row_ptr, position_ptr, sequence, 1 << 30)
    places = state_ptr + n[:, None] * C + c[None, :]
    size = N * C
    s = tl.load(places + row * size, mask=inside & (count > 0), other=0.0).to(tl.float32)
    s = tl.where(known, s, 0.0)
    wait(PDL)
    if count > 0:
        values = x_ptr + first.to(tl.int64) * x_stride + c
        paces = pace_ptr + first.to(tl.int64) * pace_stride + c
        keys = mixed_ptr + first.to(tl.int64) * mixed_stride + n
        out = out_ptr + first.to(tl.int64) * C + c
        for t in range(count):
            x = tl.load(values, mask=real_c, other=0.0).to(tl.float32)
            pace = softplus(tl.load(paces, mask=real_c, other=0.0).to(tl.float32))
            b = tl.load(keys, mask=real_n, other=0.0).to(tl.float32)
            read = tl.load(keys + N, mask=real_n, other=0.0).to(tl.float32)
            if NORMS:
                b = b / tl.sqrt(tl.sum(b * b, axis=0) / N + eps_b) * gain_b
                read = read / tl.sqrt(tl.sum(read * read, axis=0) / N + eps_c) * gain_c
            s = s * tl.exp(-rate * pace[None, :]) + b[:, None] * (pace * x)[None, :]
            y = tl.sum(s * read[:, None], axis=0) + skip * x
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask=real_c)
            values, paces, keys, out = values + x_stride, paces + pace_stride, keys + mixed_stride, out + C
            if LEFT:
                left = tl.load(left_ptr + first + t)
                tl.store(places + left * size, s, mask=inside & (left >= 0))
        if not LEFT:
            tl.store(places + row * size, s, mask=inside)


def selective_scan_(
    x: Tensor,
    rates: Tensor,
    mixed: Tensor,
    spec: ScanSpec,
    state: Tensor,
    ctx: ForwardContext,
    *,
    pdl: bool,
) -> Tensor:
    """See kernels/states.py."""
    assert ctx.rows is not None, "recurrent layers find their states by row"
    (tokens, channels), keys = x.shape, state.shape[1]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    columns = min(64, pow2(channels))
    b, c = spec.norms or (None, None)
    _scan_kernel[(triton.cdiv(channels, columns), ctx.rows.sequences.shape[0])](
        x, rates, mixed, spec.rate, spec.skip, None if b is None else b.weight, None if c is None else c.weight, state,
        out, ctx.borders(), ctx.rows.sequences, ctx.positions, ctx.rows.left, channels, x.stride(0), rates.stride(0),
        mixed.stride(0), 0.0 if b is None else b.eps, 0.0 if c is None else c.eps, LEFT=ctx.rows.left is not None,
        NORMS=b is not None, N=keys, BN=pow2(keys), BC=columns, PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return out
