"""The gated delta rule for many tokens of a row at once. Owns: two kernels that turn a recurrence into products.

Within a chunk of SIZE tokens, with G the running sum of the logarithms of what a head keeps, S the matrix before the
chunk, and u what each token writes:

    u[t] = beta[t] (v[t] - exp(G[t]) k[t] S - sum over i < t of exp(G[t] - G[i]) (k[t] . k[i]) u[i])

which is (1 + A) u = beta v - (beta exp(G) k) S with A strictly lower triangular. The first kernel takes every chunk by
itself: T = 1 / (1 + A), U = T (beta v), W = T (beta exp(G) k), P[t, i] = exp(G[t] - G[i]) (q[t] . k[i]) for i <= t. The
second walks the chunks of a row:

    u = U - W S;  out = exp(G) q S + P u;  S = exp(G[last]) S + sum of exp(G[last] - G[i]) k[i] u[i]

S is computed in float32; products of 16 bit models round what they multiply to 16 bits, those that make T to TF32.
Where each line of S has a decay of its own, G[t] has a number for each line, A and P come from chunks_by_key.py, and
exp(G) scales keys and queries number by number. Must not know: layers, families. recurrent.py says how parts of
sequences are numbered.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import DeltaSpec, ForwardContext
from tokenmill.kernels.triton.common import INTERPRETED, pow2, sigmoid, softplus
from tokenmill.kernels.triton.states.chunks_by_key import SIZE, pairs_by_key
from tokenmill.kernels.triton.states.recurrent import SHORT, find_part, parts_of, product

BASE, WARPS = 4, 4
"""Lines of a chunk that are solved one after the other (products do the rest), and by how many warps."""
EXACT_BASE, EXACT_WARPS = 16, 8
"""The same in float32, whose products are single multiplications, written out: half as many for a thread to make, and
half as many products, as otherwise they compile for minutes."""
BY_KEY_WARPS, WALK_WARPS = 8, 4
"""Warps of the first kernel where each line has a decay of its own, and of the second one there."""
WIDEST = 256
"""Keys and values of more numbers are left to the other kernel."""


@triton.jit
def _careful(a, b, EXACT: tl.constexpr):
    """a @ b of float32 numbers, of which ten bits count at least: more than the result keeps. (Three products for all
    bits would take more registers than there are.)"""
    if EXACT:
        found = tl.dot(a, b, input_precision="ieee")
    else:
        found = tl.dot(a, b, input_precision="tf32")
    return found


@triton.jit
def _inverse(a, SIZE: tl.constexpr, BASE: tl.constexpr, LEVELS: tl.constexpr, EXACT: tl.constexpr):
    """1 / (1 + a), a strictly lower triangular: row by row within blocks of BASE, then of ever larger blocks, by
    1 / (1 + [[p, 0], [m, q]]) = [[P, 0], [-Q m P, Q]]."""
    r = tl.arange(0, SIZE)
    same = (r[:, None] // BASE) == (r[None, :] // BASE)
    inside = tl.where(same, a, 0.0)
    found = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    for i in range(1, BASE):
        mine = (r % BASE == i)[:, None]
        row = tl.sum(tl.where(mine, inside, 0.0), axis=0)
        step = tl.sum(row[:, None] * found, axis=0)
        found = tl.where(mine & same, found - step[None, :], found)
    for level in tl.static_range(LEVELS):
        block = r // (BASE << level)
        below = (block[:, None] % 2 == 1) & (block[:, None] - 1 == block[None, :])
        between = tl.where(below, a, 0.0)
        found -= _careful(_careful(found, between, EXACT), found, EXACT)
    return found


@triton.jit(do_not_specialize=["sequences"])
def _prepare_kernel(
    mixed_ptr, beta_ptr, pace_ptr, rate_ptr, shift_ptr, start_ptr, w_ptr, u_ptr, p_ptr, scales_ptr, sum_ptr, a_ptr,
    sequences, mixed_stride, beta_stride, pace_stride,
    HK: tl.constexpr, HV: tl.constexpr, TILED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, SIZE: tl.constexpr, SHORT: tl.constexpr,
    BASE: tl.constexpr, LEVELS: tl.constexpr, MOST_BETA: tl.constexpr, BY_KEY: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """BY_KEY: sums of logarithms [.., DK], A and P are there already."""
    number, head = tl.program_id(0), tl.program_id(1)
    sequence, part = find_part(start_ptr, number, sequences, SIZE)
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    if (count > SHORT) & (part * SIZE < count):
        kind: tl.constexpr = w_ptr.dtype.element_ty
        r, k, v = tl.arange(0, SIZE), tl.arange(0, BK), tl.arange(0, BV)
        real = part * SIZE + r < count
        token = (first + part * SIZE + r).to(tl.int64)
        key_head = head % HK if TILED else head // (HV // HK)
        keys = mixed_ptr + token[:, None] * mixed_stride + key_head * DK + k[None, :]
        real_k = real[:, None] & (k < DK)[None, :]
        real_v = real[:, None] & (v < DV)[None, :]
        betas = beta_ptr + token * beta_stride + head
        beta = tl.where(real, sigmoid(tl.load(betas, mask=real, other=0.0).to(tl.float32)) * MOST_BETA, 0.0)
        place = (number.to(tl.int64) * HV + head) * SIZE + r
        key = tl.load(keys + HK * DK, mask=real_k, other=0.0).to(tl.float32)
        key_scale = 1.0 / tl.sqrt(tl.sum(key * key, axis=1) + 1e-6)
        key = key * key_scale[:, None]
        query = tl.load(keys, mask=real_k, other=0.0)
        wide = query.to(tl.float32)
        query_scale = 1.0 / (tl.sqrt(tl.sum(wide * wide, axis=1) + 1e-6) * tl.sqrt(DK * 1.0))
        scales = scales_ptr + (number.to(tl.int64) * HV + head) * (3 * SIZE) + r
        if BY_KEY:
            a = tl.load(a_ptr + place[:, None] * SIZE + r[None, :])
            fade = tl.exp(tl.load(sum_ptr + place[:, None] * DK + k[None, :], mask=(k < DK)[None, :], other=0.0))
        else:
            rate, shift = tl.load(rate_ptr + head), tl.load(shift_ptr + head)
            paces = pace_ptr + token * pace_stride + head
            pace = tl.load(paces, mask=real, other=0.0).to(tl.float32) + shift
            sums = tl.cumsum(tl.where(real, -rate * softplus(pace), 0.0), axis=0)
            fade = tl.exp(sums)[:, None]
            low = key.to(kind)
            earlier = r[:, None] >= r[None, :]
            ratio = tl.exp(tl.where(earlier, sums[:, None] - sums[None, :], 0.0))
            ratio = tl.where(earlier, ratio, 0.0)
            a = product(low, tl.trans(low), EXACT) * ratio * beta[:, None]
            p = product(query, tl.trans(low), EXACT) * ratio * query_scale[:, None]
            tl.store(p_ptr + place[:, None] * SIZE + r[None, :], p.to(kind))
            tl.store(scales, sums)
        inverse = _inverse(tl.where(r[:, None] == r[None, :], 0.0, a), SIZE, BASE, LEVELS, EXACT).to(kind)

        w = product(inverse, (key * beta[:, None] * fade).to(kind), EXACT)
        tl.store(w_ptr + place[:, None] * DK + k[None, :], w.to(kind), mask=(k < DK)[None, :])
        value = tl.load(
            mixed_ptr + token[:, None] * mixed_stride + 2 * HK * DK + head * DV + v[None, :], mask=real_v, other=0.0
        )
        u = product(inverse, (value.to(tl.float32) * beta[:, None]).to(kind), EXACT)
        tl.store(u_ptr + place[:, None] * DV + v[None, :], u, mask=(v < DV)[None, :])
        tl.store(scales + SIZE, query_scale)
        tl.store(scales + 2 * SIZE, key_scale)


@triton.jit
def _walk_kernel(
    mixed_ptr, w_ptr, u_ptr, p_ptr, scales_ptr, sum_ptr, state_ptr, out_ptr, start_ptr, row_ptr, position_ptr, left_ptr,
    mixed_stride, LEFT: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, TILED: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIZE: tl.constexpr, SHORT: tl.constexpr,
    BY_KEY: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    if count > SHORT:
        kind: tl.constexpr = w_ptr.dtype.element_ty
        r, k, v = tl.arange(0, SIZE), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
        real_k, real_v = (k < DK)[None, :], (v < DV)[None, :]
        known = tl.load(position_ptr + first) != 0
        row = tl.load(row_ptr + sequence)
        places = state_ptr + (row * HV + head) * (DK * DV) + k[:, None] * DV + v[None, :]
        inside = (k < DK)[:, None] & real_v
        s = tl.load(places, mask=inside & known, other=0.0).to(tl.float32)
        number = first // SIZE + sequence
        for part in tl.range(0, tl.cdiv(count, SIZE), num_stages=STAGES):
            at = (number + part).to(tl.int64) * HV + head
            place = at * SIZE + r
            w = tl.load(w_ptr + place[:, None] * DK + k[None, :], mask=real_k, other=0.0)
            u = tl.load(u_ptr + place[:, None] * DV + v[None, :], mask=real_v, other=0.0)
            p = tl.load(p_ptr + place[:, None] * SIZE + r[None, :])
            scales = scales_ptr + at * (3 * SIZE)
            query_scale, key_scale = tl.load(scales + SIZE + r), tl.load(scales + 2 * SIZE + r)
            real = part * SIZE + r < count
            token = (first + part * SIZE + r).to(tl.int64)
            key_head = head % HK if TILED else head // (HV // HK)
            keys = mixed_ptr + token[:, None] * mixed_stride + key_head * DK + k[None, :]
            query = tl.load(keys, mask=real[:, None] & real_k, other=0.0)
            key = tl.load(keys + HK * DK, mask=real[:, None] & real_k, other=0.0)
            if BY_KEY:
                sums = tl.load(sum_ptr + place[:, None] * DK + k[None, :], mask=real_k, other=0.0)
                last = tl.load(sum_ptr + (at * SIZE + SIZE - 1) * DK + k, mask=k < DK, other=0.0)
                query = (query.to(tl.float32) * tl.exp(sums)).to(kind)
                key = (key.to(tl.float32) * tl.exp(last[None, :] - sums)).to(kind)
                kept = tl.exp(last)[:, None]
            else:
                sums = tl.load(scales + r)
                last = tl.load(scales + SIZE - 1)
                query_scale *= tl.exp(sums)
                key_scale *= tl.exp(last - sums)
                kept = tl.exp(last)
            low = s.to(kind)
            u -= product(w, low, EXACT)
            y = product(query, low, EXACT) * query_scale[:, None]
            y += product(p, u.to(kind), EXACT)
            out = out_ptr + (token[:, None] * HV + head) * DV + v[None, :]
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & real_v)
            s = s * kept + product(tl.trans(key), (u * key_scale[:, None]).to(kind), EXACT)
        if LEFT:
            row = tl.load(left_ptr + first + count - 1)
            places = state_ptr + (row * HV + head) * (DK * DV) + k[:, None] * DV + v[None, :]
        tl.store(places, s, mask=inside)


def can_chunk(spec: DeltaSpec, kind: torch.dtype, *, small: bool) -> bool:
    """Are heads small enough, and of a width that products of 16 bits were seen to be right with?

    On an H200 the results of 40 keys and 24 values were wrong in bfloat16 from the second 16 tokens of a chunk on, and
    right in float32; those of 64, 96, 128 and 192 are right in both. (Triton 3.6 reads shared memory out of bounds
    where loads are not pipelined, as on a small device: `compute-sanitizer` finds it with one stage of 40 and 24, and
    nothing with two. So 96 and 192 want two.)"""
    widths = (spec.key_dim, spec.value_dim)
    if not spec.by_key and spec.floor:
        return False
    known = {64, 128, 256} if small else {64, 96, 128, 192, 256}
    return max(widths) <= WIDEST and (kind == torch.float32 or set(widths) <= known)


def chunked_delta_(
    mixed: Tensor,
    gates: tuple[Tensor, Tensor],
    spec: DeltaSpec,
    state: Tensor,
    ctx: ForwardContext,
    out: Tensor,
    *,
    small: bool,
) -> None:
    """See kernels/states.py; fills `out` for sequences of more than SHORT tokens, and leaves others alone. (Of such a
    sequence the last state alone is left: none of its tokens is a draft.)"""
    assert ctx.rows is not None, "recurrent layers find their states by row"
    sequences, heads = ctx.rows.sequences.shape[0], spec.value_heads
    numbers = parts_of(len(mixed), sequences, SIZE)
    kind, device = mixed.dtype, mixed.device
    w = torch.empty((numbers, heads, SIZE, spec.key_dim), dtype=kind, device=device)
    u = torch.empty((numbers, heads, SIZE, spec.value_dim), dtype=torch.float32, device=device)
    p = torch.empty((numbers, heads, SIZE, SIZE), dtype=kind, device=device)
    scales = torch.empty((numbers, heads, 3, SIZE), dtype=torch.float32, device=device)
    sizes = {"HK": spec.key_heads, "HV": heads, "TILED": spec.tiled, "DK": spec.key_dim, "DV": spec.value_dim}
    sizes |= {"SIZE": SIZE, "SHORT": SHORT}
    exact = INTERPRETED or kind == torch.float32
    base, warps = (EXACT_BASE, EXACT_WARPS) if kind == torch.float32 else (BASE, WARPS)
    rows, columns = max(16, pow2(spec.key_dim)), max(16, pow2(spec.value_dim))
    sums, a = pairs_by_key(mixed, gates, spec, ctx, p, exact=exact) if spec.by_key else (None, None)
    warps = max(warps, BY_KEY_WARPS) if spec.by_key else warps
    _prepare_kernel[(numbers, heads)](
        mixed, *gates, spec.rate, spec.shift, ctx.borders(), w, u, p, scales, sums, a, sequences, mixed.stride(0),
        *(gate.stride(0) for gate in gates), **sizes, BK=rows, BV=columns, BASE=base,
        LEVELS=(SIZE // base).bit_length() - 1, MOST_BETA=spec.most_beta, BY_KEY=spec.by_key, EXACT=exact,
        num_warps=warps,
    )  # fmt: skip
    columns = min(32, columns)
    _walk_kernel[(triton.cdiv(spec.value_dim, columns), heads, sequences)](
        mixed, w, u, p, scales, sums, state, out, ctx.borders(), ctx.rows.sequences, ctx.positions, ctx.rows.left,
        mixed.stride(0), LEFT=ctx.rows.left is not None, **sizes, BK=rows, BV=columns, BY_KEY=spec.by_key,
        EXACT=exact, STAGES=1 if exact or small else 2, num_warps=WALK_WARPS if spec.by_key else 4,
    )  # fmt: skip
