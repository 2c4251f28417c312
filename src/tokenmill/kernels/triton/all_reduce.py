"""A small sum over GPUs that see each other's memory. Owns: pushing parts into the other ranks' buffers, and adding up
the parts that have arrived in one's own, with a residual.

No rank waits for a signal: a part has arrived when its elements have, because an empty element holds a bit pattern that
no part contains (-0.0, which is sent as 0.0). Three slots are used in rotation. Each call empties the slot of the call
before; other ranks write to it again only when they have seen this rank's parts of the call in between. The number of
the current slot lies in device memory, block by block, so recorded steps continue where the last one stopped; calls are
not counted, because a large model makes 2^31 of them in two days. Every rank adds in rank order, so all get the same
bytes. Must not know: groups, layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import begin, pow2, wait
from tokenmill.kernels.triton.pointwise import add_row, norm_stored, stored_norm

SLOTS = 3
BLOCK = 1024
EMPTY = -(1 << 15)
"""The bits of -0.0 in 16-bit floats."""


@triton.jit
def _push_kernel(
    x_ptr, residual_ptr, out_ptr, buffers_ptr, turns_ptr, n, slot_size,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, EMPTY: tl.constexpr, SLOTS: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    real = at < n
    wait(PDL)
    slot = tl.load(turns_ptr + block)
    x = tl.load(x_ptr + at, mask=real, other=0.0)
    bits = x.to(tl.int16, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits).to(tl.int16)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.multiple_of(tl.load(buffers_ptr + peer).to(tl.pointer_type(tl.int16)), 16)
            tl.store(theirs + (slot * RANKS + RANK) * slot_size + at, bits, mask=real)
    own = tl.multiple_of(tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.int16)), 16)
    before = (slot + SLOTS - 1) % SLOTS
    empty = tl.full([BLOCK], EMPTY, dtype=tl.int16)
    for peer in tl.static_range(RANKS):
        tl.store(own + (before * RANKS + peer) * slot_size + at, empty)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += bits.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        else:
            place = own + (slot * RANKS + peer) * slot_size + at
            part = tl.load(place, mask=real, other=0, volatile=True)
            while tl.max((part == EMPTY).to(tl.int32), axis=0) != 0:
                part = tl.load(place, mask=real, other=0, volatile=True)
            total += part.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=real)
    tl.store(turns_ptr + block, (slot + 1) % SLOTS)


@triton.jit
def _push_norm_kernel(
    x_ptr, residual_ptr, out_ptr, normed_ptr, buffers_ptr, turns_ptr, D, slot_size, scale,
    within_ptr, within_bias_ptr, within_eps, norm_ptr, norm_bias_ptr, norm_eps,
    WITHIN: tl.constexpr, WITHIN_BIAS: tl.constexpr, WITHIN_OFFSET: tl.constexpr,
    NORM: tl.constexpr, NORM_BIAS: tl.constexpr, NORM_OFFSET: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EMPTY: tl.constexpr,
    SLOTS: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row a program, which has several blocks of the buffers for itself: each has a turn of its own."""
    begin(PDL)
    row = tl.program_id(0)
    number = tl.arange(0, BLOCKS)[:, None]
    d = number * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = d < D
    own_blocks = tl.cdiv(D, BLOCK)
    used = number < own_blocks
    at = row * own_blocks * BLOCK + d
    wait(PDL)
    slot = tl.load(turns_ptr + row * own_blocks + number, mask=used, other=0)
    x = tl.load(x_ptr + row * D + d, mask=real, other=0.0)
    bits = x.to(tl.int16, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits).to(tl.int16)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.multiple_of(tl.load(buffers_ptr + peer).to(tl.pointer_type(tl.int16)), 16)
            tl.store(theirs + ((slot * RANKS + RANK) * slot_size + at), bits, mask=real)
    own = tl.multiple_of(tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.int16)), 16)
    before = (slot + SLOTS - 1) % SLOTS
    empty = tl.full([BLOCKS, BLOCK], EMPTY, dtype=tl.int16)
    for peer in tl.static_range(RANKS):
        tl.store(own + ((before * RANKS + peer) * slot_size + at), empty, mask=used & (d >= 0))
    total = tl.zeros([BLOCKS, BLOCK], dtype=tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += bits.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        else:
            place = own + ((slot * RANKS + peer) * slot_size + at)
            part = tl.load(place, mask=real, other=0, volatile=True)
            while tl.max((part == EMPTY).to(tl.int32)) != 0:
                part = tl.load(place, mask=real, other=0, volatile=True)
            total += part.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    tl.store(turns_ptr + row * own_blocks + number, (slot + 1) % SLOTS, mask=used)
    residual = tl.load(residual_ptr + row * D + d, mask=real, other=0.0).to(tl.float32)
    if PLAIN:
        y = (total + residual).to(out_ptr.dtype.element_ty)
    else:
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        y = add_row(residual, total, scale, within_ptr, within_bias_ptr, d, real, D, within_eps,
                    WITHIN, WITHIN_BIAS, WITHIN_OFFSET, out_ptr.dtype.element_ty)  # fmt: skip
    tl.store(out_ptr + row * D + d, y, mask=real)
    y = norm_stored(y.to(tl.float32), norm_ptr, norm_bias_ptr, d, real, D, norm_eps, NORM, NORM_BIAS, NORM_OFFSET)
    tl.store(normed_ptr + row * D + d, y.to(normed_ptr.dtype.element_ty), mask=real)


def push_norm(
    x: Tensor,
    residual: Tensor,
    norm: NormSpec,
    scale: float,
    within: NormSpec | None,
    buffers: Tensor,
    turns: Tensor,
    rank: int,
    slot_size: int,
    *,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """residual + scale * within(the sum of every rank's x), rows [T, D] in 16-bit floats, and what a norm makes of it.

    See push_sum; rows begin with blocks: D rounded up to BLOCK, times T, is no more than slot_size."""
    out, normed = torch.empty_like(x), torch.empty_like(x)
    rows, width = x.shape
    blocks = pow2(triton.cdiv(width, BLOCK))
    _push_norm_kernel[(rows,)](
        x, residual, out, normed, buffers, turns, width, slot_size, float(scale),
        **stored_norm(within, "within"), **stored_norm(norm, "norm"),
        RANK=rank, RANKS=buffers.numel(), BLOCK=BLOCK, BLOCKS=blocks, EMPTY=EMPTY, SLOTS=SLOTS,
        PLAIN=within is None and scale == 1.0, PDL=pdl, num_warps=min(16, 4 * blocks), launch_pdl=pdl,
    )  # fmt: skip
    return out, normed


def push_sum(
    x: Tensor, residual: Tensor | None, buffers: Tensor, turns: Tensor, rank: int, slot_size: int, *, pdl: bool
) -> Tensor:
    """residual + the sum of every rank's x, in 16-bit floats, rounded once.

    buffers [ranks] int64: addresses of int16 [SLOTS, ranks, slot_size] on each device, EMPTY at first; turns int32
    [slot_size / BLOCK], the slot of each block's next call, zeros at first; slot_size: a multiple of BLOCK, not less
    than x has elements.
    """
    out = torch.empty_like(x)
    count = x.numel()
    _push_kernel[(triton.cdiv(count, BLOCK),)](
        x, residual, out, buffers, turns, count, slot_size,
        RANK=rank, RANKS=buffers.numel(), BLOCK=BLOCK, EMPTY=EMPTY, SLOTS=SLOTS,
        RESIDUAL=residual is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
