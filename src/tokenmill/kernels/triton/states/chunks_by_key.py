"""Pairs of a chunk's tokens where each line of a matrix has a decay of its own. Owns: sums of the logarithms of decays,
and two kernels that make of them what chunks.py multiplies.

With G[t, d] the sum of line d's logarithms up to token t, a pair of tokens i <= t is worth the sum over d of
x[t, d] k[i, d] exp(G[t, d] - G[i, d]), x the key or the query. No exponent may be above 0. For the lines of a block
and all earlier tokens it is taken apart at the end R of the block before: x exp(G[t] - R) times k exp(R - G[i]).
Within the block it is taken pair by pair. Must not know: the recurrence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import DeltaSpec, ForwardContext
from tokenmill.kernels.triton.common import pow2, sigmoid
from tokenmill.kernels.triton.states.recurrent import SHORT, find_part, parts_of, product, softplus

SIZE = 64
"""Tokens of a chunk."""
LINES, WARPS = 16, 8
"""Tokens of a block of it, and the warps that take one."""


@triton.jit(do_not_specialize=["sequences"])
def _sums_kernel(
    pace_ptr, rate_ptr, shift_ptr, start_ptr, sum_ptr, sequences, pace_stride,
    HV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr, SHORT: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    sequence, part = find_part(start_ptr, number, sequences, SIZE)
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    if (count > SHORT) & (part * SIZE < count):
        r, k = tl.arange(0, SIZE), tl.arange(0, BK)
        real = (part * SIZE + r < count)[:, None] & (k < DK)[None, :]
        token = (first + part * SIZE + r).to(tl.int64)
        rate = tl.load(rate_ptr + head)
        shift = tl.load(shift_ptr + head * DK + k, mask=k < DK, other=0.0)
        paces = pace_ptr + token[:, None] * pace_stride + (head * DK + k)[None, :]
        pace = tl.load(paces, mask=real, other=0.0).to(tl.float32) + shift[None, :]
        slowed = FLOOR * sigmoid(rate * pace) if FLOOR != 0.0 else -rate * softplus(pace)
        place = (number.to(tl.int64) * HV + head) * SIZE + r
        sums = tl.cumsum(tl.where(real, slowed, 0.0), axis=0)
        tl.store(sum_ptr + place[:, None] * DK + k[None, :], sums, mask=(k < DK)[None, :])


@triton.jit(do_not_specialize=["sequences"])
def _pairs_kernel(
    mixed_ptr, beta_ptr, start_ptr, sum_ptr, a_ptr, p_ptr, sequences, mixed_stride, beta_stride,
    HK: tl.constexpr, HV: tl.constexpr, TILED: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr,
    LINES: tl.constexpr, SHORT: tl.constexpr, MOST_BETA: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = SIZE // LINES
    number, begin, head = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * LINES, tl.program_id(1)
    sequence, part = find_part(start_ptr, number, sequences, SIZE)
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    if (count > SHORT) & (part * SIZE < count):
        kind: tl.constexpr = p_ptr.dtype.element_ty
        t, i, k = begin + tl.arange(0, LINES), tl.arange(0, SIZE), tl.arange(0, BK)
        whole = (k < DK)[None, :]
        left = count - part * SIZE
        token = (first + part * SIZE).to(tl.int64)
        key_head = head % HK if TILED else head // (HV // HK)
        queries = mixed_ptr + token * mixed_stride + key_head * DK + k[None, :]
        keys = queries + HK * DK
        sums = sum_ptr + (number.to(tl.int64) * HV + head) * SIZE * DK + k[None, :]

        query = tl.load(queries + t[:, None] * mixed_stride, mask=(t < left)[:, None] & whole, other=0.0).to(tl.float32)
        query /= (tl.sqrt(tl.sum(query * query, axis=1) + 1e-6) * tl.sqrt(DK * 1.0))[:, None]
        key = tl.load(keys + t[:, None] * mixed_stride, mask=(t < left)[:, None] & whole, other=0.0).to(tl.float32)
        key /= tl.sqrt(tl.sum(key * key, axis=1) + 1e-6)[:, None]
        mine = tl.load(sums + t[:, None] * DK, mask=whole, other=0.0)

        a = tl.zeros((LINES, SIZE), dtype=tl.float32)
        p = tl.zeros((LINES, SIZE), dtype=tl.float32)
        if begin > 0:
            border = tl.load(sums + (begin - 1) * DK, mask=whole, other=0.0)
            before = (i < begin)[:, None] & whole
            other = tl.load(keys + i[:, None] * mixed_stride, mask=before & (i < left)[:, None], other=0.0)
            other = other.to(tl.float32)
            other /= tl.sqrt(tl.sum(other * other, axis=1) + 1e-6)[:, None]
            theirs = tl.load(sums + i[:, None] * DK, mask=before, other=0.0)
            other = tl.trans((other * tl.exp(tl.where(before, border - theirs, 0.0))).to(kind))
            fade = tl.exp(mine - border)
            a = product((key * fade).to(kind), other, EXACT)
            p = product((query * fade).to(kind), other, EXACT)
        for at in range(begin, begin + LINES):
            one = tl.load(keys + at * mixed_stride, mask=whole & (at < left), other=0.0).to(tl.float32)
            one /= tl.sqrt(tl.sum(one * one, axis=1) + 1e-6)[:, None]
            theirs = tl.load(sums + at * DK, mask=whole, other=0.0)
            one = one * tl.exp(tl.where((t >= at)[:, None], mine - theirs, 0.0))
            here = (i == at)[None, :]
            a = tl.where(here & (t > at)[:, None], tl.sum(key * one, axis=1)[:, None], a)
            p = tl.where(here & (t >= at)[:, None], tl.sum(query * one, axis=1)[:, None], p)

        betas = beta_ptr + (token + t) * beta_stride + head
        beta = sigmoid(tl.load(betas, mask=t < left, other=0.0).to(tl.float32)) * MOST_BETA
        place = ((number.to(tl.int64) * HV + head) * SIZE + t)[:, None] * SIZE + i[None, :]
        tl.store(a_ptr + place, a * tl.where(t < left, beta, 0.0)[:, None])
        tl.store(p_ptr + place, p.to(kind))


def pairs_by_key(
    mixed: Tensor, gates: tuple[Tensor, Tensor], spec: DeltaSpec, ctx: ForwardContext, p: Tensor, *, exact: bool
) -> tuple[Tensor, Tensor]:
    """-> sums of logarithms [N, Hv, SIZE, Dk] of N chunks, and A [N, Hv, SIZE, SIZE]; fills P, as large as A."""
    assert ctx.rows is not None, "recurrent layers find their states by row"
    (beta, pace), sequences = gates, ctx.rows.sequences.shape[0]
    heads, dim = spec.value_heads, spec.key_dim
    numbers, device, rows = parts_of(len(mixed), sequences, SIZE), mixed.device, max(16, pow2(dim))
    sums = torch.empty((numbers, heads, SIZE, dim), dtype=torch.float32, device=device)
    a = torch.empty((numbers, heads, SIZE, SIZE), dtype=torch.float32, device=device)
    _sums_kernel[(numbers, heads)](
        pace, spec.rate, spec.shift, ctx.borders(), sums, sequences, pace.stride(0),
        HV=heads, DK=dim, BK=rows, SIZE=SIZE, SHORT=SHORT, FLOOR=spec.floor, num_warps=4,
    )  # fmt: skip
    _pairs_kernel[(numbers * (SIZE // LINES), heads)](
        mixed, beta, ctx.borders(), sums, a, p, sequences, mixed.stride(0), beta.stride(0),
        HK=spec.key_heads, HV=heads, TILED=spec.tiled, DK=dim, BK=rows, SIZE=SIZE, LINES=LINES, SHORT=SHORT,
        MOST_BETA=spec.most_beta, EXACT=exact, num_warps=WARPS,
    )  # fmt: skip
    return sums, a
