"""Recurrent layers, token by token: short convolutions, the gated delta rule, gated norms. Owns: one launch for each.

A sequence is found by its place in the step and its state by its row, so a recording serves any rows. Grids follow from
the numbers of tokens and sequences alone: where tokens are cut into parts of SIZE, the part j of sequence s that begins
at token b is number b // SIZE + s + j, which no two parts share. Where a sequence lies and its state are older than the
step's embedding, an ordinary launch: kernels read them before they wait for the launch before them.
Must not know: layers, families.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import ConvSpec, DeltaSpec, ForwardContext, NormSpec
from tokenmill.kernels.triton.common import begin, pow2, sigmoid, softplus, wait

SHORT = 17
"""Of so many tokens or fewer, a sequence is computed token by token where chunks.py may take others: a token and the
most drafts that may follow it, as the state behind each of them is left."""
ALL = 1 << 30
MANY = 16
"""Sequences of one token from which programs take twice as many columns of a matrix: enough of them fill the device."""
CONV_ROWS, CONV_COLUMNS = 16, 128
"""Tokens and channels of a program, where sequences have several tokens."""


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """a @ b in float32; EXACT: of float32 numbers, as they are."""
    if EXACT:
        found = tl.dot(a, b, input_precision="ieee")
    else:
        found = tl.dot(a, b)
    return found


@triton.jit
def find_part(start_ptr, part, sequences, SIZE: tl.constexpr):
    """The sequence of this part, and which of its parts it is; there may be no such tokens. (A loop: were the number of
    sequences a constant, a step with more of them than any before it would wait for a compiler.)"""
    begun = 0
    for block in range(0, sequences, 64):
        s = block + tl.arange(0, 64)
        begins = tl.load(start_ptr + s, mask=s < sequences, other=1 << 30)
        begun += tl.sum((begins // SIZE + s <= part).to(tl.int32), axis=0)
    sequence = begun - 1
    return sequence, part - tl.load(start_ptr + sequence) // SIZE - sequence


def parts_of(tokens: int, sequences: int, size: int) -> int:
    """How many numbers parts of this size may have."""
    return tokens // size + sequences


@triton.jit
def find_state(start_ptr, row_ptr, position_ptr, sequence, MOST: tl.constexpr):
    """A sequence's first token, how many it has (0 if more than MOST, which are left to others), its row, and whether
    there is a state before these tokens."""
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    count = tl.where(count <= MOST, count, 0)
    known = tl.load(position_ptr + first, mask=count > 0, other=0) != 0
    return first, count, tl.load(row_ptr + sequence), known


# ------------------------------------------------------------ short convolutions


@triton.jit
def _entering(x_ptr, in_ptr, offset, mask, GATED: tl.constexpr):
    """What goes into the convolution, and is kept: x, or x times its gate."""
    x = tl.load(x_ptr + offset, mask=mask, other=0.0)
    if GATED:
        x = (x.to(tl.float32) * tl.load(in_ptr + offset, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _conv_one(
    x_ptr, in_ptr, through_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, start_ptr, row_ptr, position_ptr, left_ptr, C,
    x_stride, c, real_c, TAPS: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    LEFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A sequence of one token: all but the token is there before the wait."""
    first, count, row, known = find_state(start_ptr, row_ptr, position_ptr, tl.program_id(0), 1)
    last = row
    if LEFT:
        last = tl.load(left_ptr + first, mask=count > 0, other=0).to(row.dtype)
    y = tl.zeros(c.shape, dtype=tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + c, mask=real_c, other=0.0)
    olds = ()
    for k in tl.static_range(TAPS - 1):
        old = tl.load(state_ptr + (row * (TAPS - 1) + k) * C + c, mask=real_c & known, other=0.0)
        olds = olds + (old,)
        y += old.to(tl.float32) * tl.load(weight_ptr + k * C + c, mask=real_c, other=0.0)
    weight = tl.load(weight_ptr + (TAPS - 1) * C + c, mask=real_c, other=0.0)
    wait(PDL)
    if count > 0:
        here = first.to(tl.int64) * x_stride + c
        x = _entering(x_ptr, in_ptr, here, real_c, GATED)
        y += x.to(tl.float32) * weight
        if ACT:
            y = y * sigmoid(y)
        if GATED:
            y *= tl.load(through_ptr + here, mask=real_c, other=0.0).to(tl.float32)
        tl.store(out_ptr + first.to(tl.int64) * C + c, y.to(out_ptr.dtype.element_ty), mask=real_c)
        place = state_ptr + last * (TAPS - 1) * C + c
        for k in tl.static_range(TAPS - 2):
            tl.store(place + k * C, olds[k + 1], mask=real_c)
        if TAPS > 1:
            tl.store(place + (TAPS - 2) * C, x, mask=real_c)


@triton.jit(do_not_specialize=["sequences"])
def _conv_kernel(
    x_ptr, in_ptr, through_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, start_ptr, row_ptr, position_ptr, left_ptr,
    sequences, C, x_stride, TAPS: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    ONE: tl.constexpr, LEFT: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    real_c = c < C
    if ONE:
        _conv_one(x_ptr, in_ptr, through_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, start_ptr, row_ptr,
                  position_ptr, left_ptr, C, x_stride, c, real_c, TAPS, BIAS, ACT, GATED, LEFT, PDL)  # fmt: skip
        return
    wait(PDL)
    sequence, part = find_part(start_ptr, tl.program_id(0), sequences, BT)
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    if part * BT < count:
        known = tl.load(position_ptr + first) != 0
        begins = first.to(tl.int64) * x_stride
        row = tl.load(row_ptr + sequence)
        if LEFT:
            left_ptr += first
            last_ptr = state_ptr + tl.load(left_ptr + count - 1) * (TAPS - 1) * C
            places = state_ptr
        else:
            last_ptr = state_ptr + row * (TAPS - 1) * C
        state_ptr += row * (TAPS - 1) * C
        t = part * BT + tl.arange(0, BT)
        real = (t < count)[:, None] & real_c[None, :]
        y = tl.zeros((BT, BC), dtype=tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + c, mask=real_c, other=0.0)[None, :]
        places_x = begins + t.to(tl.int64)[:, None] * x_stride + c[None, :]
        if part > 0:  # BT is TAPS at least: none of these reads the state
            for k in tl.static_range(TAPS):
                value = _entering(x_ptr, in_ptr, places_x + (k - (TAPS - 1)) * x_stride, real, GATED)
                y += value.to(tl.float32) * tl.load(weight_ptr + k * C + c, mask=real_c, other=0.0)[None, :]
        else:
            for k in tl.static_range(TAPS):
                at = t + k - (TAPS - 1)
                here = real & (at >= 0)[:, None]
                before = real & (at < 0)[:, None] & known
                value = _entering(x_ptr, in_ptr, places_x + (k - (TAPS - 1)) * x_stride, here, GATED)
                value += tl.load(state_ptr + (at + TAPS - 1)[:, None] * C + c[None, :], mask=before, other=0.0)
                y += value.to(tl.float32) * tl.load(weight_ptr + k * C + c, mask=real_c, other=0.0)[None, :]
        if ACT:
            y = y * sigmoid(y)
        if GATED:
            y *= tl.load(through_ptr + places_x, mask=real, other=0.0).to(tl.float32)
        place = (first + t).to(tl.int64)[:, None] * C + c[None, :]
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=real)
        if LEFT:  # behind the last token, see below
            left = tl.load(left_ptr + t, mask=t + 1 < count, other=-1)
            leaves = real & (left >= 0)[:, None]
            for k in tl.static_range(TAPS - 1):
                at = t + 1 + k - (TAPS - 1)
                here, before = leaves & (at >= 0)[:, None], leaves & (at < 0)[:, None] & known
                value = _entering(x_ptr, in_ptr, begins + at.to(tl.int64)[:, None] * x_stride + c[None, :], here, GATED)
                value += tl.load(state_ptr + (at + TAPS - 1)[:, None] * C + c[None, :], mask=before, other=0.0)
                tl.store(places + (left[:, None] * (TAPS - 1) + k) * C + c[None, :], value, mask=leaves)
        if part == 0:  # the only part that reads the state leaves the new one
            for k in tl.static_range(TAPS - 1):
                source = count + k - (TAPS - 1)
                place_x = begins + source.to(tl.int64) * x_stride + c
                newest = _entering(x_ptr, in_ptr, place_x, real_c & (source >= 0), GATED)
                kept = real_c & (source < 0) & known
                newest += tl.load(state_ptr + (source + TAPS - 1) * C + c, mask=kept, other=0.0)
                tl.debug_barrier()
                tl.store(last_ptr + k * C + c, newest, mask=real_c)


def short_conv_(inputs: Sequence[Tensor], spec: ConvSpec, state: Tensor, ctx: ForwardContext, *, pdl: bool) -> Tensor:
    """See kernels/states.py."""
    (x, *gates), weight, bias = inputs, spec.weight, spec.bias
    assert ctx.rows is not None, "recurrent layers find their states by row"
    (tokens, channels), sequences, taps = x.shape, ctx.rows.sequences.shape[0], weight.shape[0]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    one = ctx.max_query == 1
    rows = 1 if one else max(CONV_ROWS, pow2(taps))
    columns = min(pow2(channels), 256 if one else CONV_COLUMNS)
    grid = (sequences if one else parts_of(tokens, sequences, rows), triton.cdiv(channels, columns))
    _conv_kernel[grid](
        x, *(gates or (None, None)), weight, bias, state, out, ctx.borders(), ctx.rows.sequences, ctx.positions,
        ctx.rows.left, sequences, channels, x.stride(0), LEFT=ctx.rows.left is not None, TAPS=taps,
        BIAS=bias is not None, ACT=spec.silu, GATED=bool(gates), ONE=one,
        BT=rows, BC=columns, PDL=pdl, num_warps=2 if one else 4, launch_pdl=pdl,
    )  # fmt: skip
    return out


# ------------------------------------------------------------ the gated delta rule


@triton.jit
def _delta_token(
    s, keys, values, betas, paces, rate, shift, real_k, real_v, HK: tl.constexpr, DK: tl.constexpr,
    MOST_BETA: tl.constexpr, BY_KEY: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """A head's matrix behind one more token, and its query over the root of its size."""
    q = tl.load(keys, mask=real_k, other=0.0).to(tl.float32)
    key = tl.load(keys + HK * DK, mask=real_k, other=0.0).to(tl.float32)
    value = tl.load(values, mask=real_v, other=0.0).to(tl.float32)
    beta = sigmoid(tl.load(betas).to(tl.float32)) * MOST_BETA
    pace = tl.load(paces, mask=real_k, other=0.0) if BY_KEY else tl.load(paces)
    pace = pace.to(tl.float32) + shift
    decay = tl.exp(FLOOR * sigmoid(rate * pace)) if FLOOR != 0.0 else tl.exp(-rate * softplus(pace))
    q = q / (tl.sqrt(tl.sum(q * q, axis=0) + 1e-6) * tl.sqrt(DK * 1.0))
    key = key / tl.sqrt(tl.sum(key * key, axis=0) + 1e-6)
    s *= decay[:, None] if BY_KEY else decay
    delta = (value - tl.sum(s * key[:, None], axis=0)) * beta
    return s + key[:, None] * delta[None, :], q


@triton.jit
def _delta_kernel(
    mixed_ptr, beta_ptr, pace_ptr, rate_ptr, shift_ptr, state_ptr, out_ptr, start_ptr, row_ptr, position_ptr, left_ptr,
    mixed_stride, beta_stride, pace_stride, LEFT: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, TILED: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MOST: tl.constexpr,
    MOST_BETA: tl.constexpr, BY_KEY: tl.constexpr, FLOOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    head, sequence = tl.program_id(1), tl.program_id(2)
    k, v = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    real_k, real_v = k < DK, v < DV
    rate = tl.load(rate_ptr + head)
    if BY_KEY:
        shift = tl.load(shift_ptr + head * DK + k, mask=real_k, other=0.0)
        paces = pace_ptr + head * DK + k
    else:
        shift = tl.load(shift_ptr + head)
        paces = pace_ptr + head
    first, count, row, known = find_state(start_ptr, row_ptr, position_ptr, sequence, MOST)
    places = state_ptr + head * (DK * DV) + k[:, None] * DV + v[None, :]
    size = HV * DK * DV
    inside = real_k[:, None] & real_v[None, :]
    # Read before it is known whether a state is there: what another load would have to wait for.
    s = tl.load(places + row * size, mask=inside & (count > 0), other=0.0).to(tl.float32)
    s = tl.where(known, s, 0.0)
    wait(PDL)
    if count > 0:
        key_head = head % HK if TILED else head // (HV // HK)
        keys = mixed_ptr + first.to(tl.int64) * mixed_stride + key_head * DK + k
        values = mixed_ptr + first.to(tl.int64) * mixed_stride + 2 * HK * DK + head * DV + v
        betas = beta_ptr + first.to(tl.int64) * beta_stride + head
        paces += first.to(tl.int64) * pace_stride
        out = out_ptr + (first.to(tl.int64) * HV + head) * DV + v
        if MOST == 1 and not LEFT:  # the matrix goes out before its query is answered
            s, q = _delta_token(
                s, keys, values, betas, paces, rate, shift, real_k, real_v, HK, DK, MOST_BETA, BY_KEY, FLOOR
            )
            tl.store(places + row * size, s, mask=inside)
            tl.store(out, tl.sum(s * q[:, None], axis=0).to(out_ptr.dtype.element_ty), mask=real_v)
        else:
            for t in range(count):
                s, q = _delta_token(
                    s, keys, values, betas, paces, rate, shift, real_k, real_v, HK, DK, MOST_BETA, BY_KEY, FLOOR
                )
                tl.store(out, tl.sum(s * q[:, None], axis=0).to(out_ptr.dtype.element_ty), mask=real_v)
                keys, values, out = keys + mixed_stride, values + mixed_stride, out + HV * DV
                betas, paces = betas + beta_stride, paces + pace_stride
                if LEFT:
                    left = tl.load(left_ptr + first + t)
                    tl.store(places + left * size, s, mask=inside & (left >= 0))
            if not LEFT:
                tl.store(places + row * size, s, mask=inside)


def columns_of(sequences: int, lines: int, width: int, *, one: bool) -> int:
    """Columns of a matrix [lines, width] that a program takes; one: of a token of each sequence."""
    return min(64 if one and sequences >= MANY and lines <= 128 else 32, pow2(width))


def delta_rule_(
    mixed: Tensor,
    gates: tuple[Tensor, Tensor],
    spec: DeltaSpec,
    state: Tensor,
    ctx: ForwardContext,
    out: Tensor,
    *,
    most: int,
    steady: bool,
    pdl: bool,
) -> None:
    """See kernels/states.py; gates: beta and pace. Fills `out` for sequences of at most `most` tokens, and leaves
    others alone. steady: by one kernel, whatever the step."""
    assert ctx.rows is not None, "recurrent layers find their states by row"
    sequences, one = ctx.rows.sequences.shape[0], ctx.max_query == 1 and not steady
    columns = columns_of(sequences, spec.key_dim, spec.value_dim, one=one)
    grid = (triton.cdiv(spec.value_dim, columns), spec.value_heads, sequences)
    _delta_kernel[grid](
        mixed, *gates, spec.rate, spec.shift, state, out, ctx.borders(), ctx.rows.sequences, ctx.positions,
        ctx.rows.left, mixed.stride(0), *(gate.stride(0) for gate in gates), LEFT=ctx.rows.left is not None,
        HK=spec.key_heads, HV=spec.value_heads, TILED=spec.tiled, DK=spec.key_dim, DV=spec.value_dim,
        BK=pow2(spec.key_dim), BV=columns, MOST=1 if one else most, MOST_BETA=spec.most_beta, BY_KEY=spec.by_key,
        FLOOR=spec.floor, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


# ------------------------------------------------------------ gated norms


@triton.jit
def _gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, x_stride, gate_stride, pieces, eps, D: tl.constexpr, BP: tl.constexpr,
    BD: tl.constexpr, WIDE: tl.constexpr, FIRST: tl.constexpr, ACT: tl.constexpr,
    OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    p, d = tl.program_id(1) * BP + tl.arange(0, BP), tl.arange(0, BD)
    real = (p < pieces)[:, None] & (d < D)[None, :]
    place = p[:, None] * D + d[None, :]
    weight_place = place if WIDE else place * 0 + d[None, :]
    weight = tl.load(weight_ptr + weight_place, mask=real, other=0.0).to(tl.float32) + OFFSET
    wait(PDL)
    x = tl.load(x_ptr + token * x_stride + place, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + place, mask=real, other=0.0).to(tl.float32)
    if ACT == "softplus":
        gate = softplus(gate)
    else:
        gate = gate * sigmoid(gate) if ACT == "silu" else sigmoid(gate)
    if FIRST:
        x *= gate
    y = x / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)[:, None] * weight
    if not FIRST:
        y *= gate
    tl.store(out_ptr + token * pieces * D + place, y.to(out_ptr.dtype.element_ty), mask=real)


def gated_norm(x: Tensor, gate: Tensor, spec: NormSpec, size: int, *, first: bool, act: str, pdl: bool) -> Tensor:
    """See ReferenceKernels.gated_norm."""
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    pieces, block = width // size, pow2(size)
    together = max(1, min(pow2(pieces), 2048 // block))
    _gated_norm_kernel[(tokens, triton.cdiv(pieces, together))](
        x, gate, spec.weight, out, x.stride(0), gate.stride(0), pieces, spec.eps, D=size, BP=together, BD=block,
        WIDE=spec.weight.shape[0] != size, FIRST=first, ACT=act, OFFSET=spec.offset, PDL=pdl,
        num_warps=max(1, min(16, together * block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out
