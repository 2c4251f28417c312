"""A sum over GPUs that see each other's memory. Owns: pushing parts into the other ranks' buffers, and adding up the
parts that have arrived in one's own, with a residual. Sums that are longer than a slot take several launches.

No rank waits for a signal: a part has arrived when its elements have, because an empty element holds a bit pattern that
no part contains (-0.0, which is sent as 0.0). Three slots are used in rotation. Each call empties the slot of the call
before; other ranks write to it again only when they have seen this rank's parts of the call in between. The number of
the current slot lies in device memory, block by block, so recorded steps continue where the last one stopped; calls are
not counted, because a large model makes 2^31 of them in two days. Every rank adds in rank order, so all get the same
bytes. Must not know: groups, layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import begin, pow2, wait
from tokenmill.kernels.triton.pointwise import add_sum, norm_row, stored_norm

SLOTS = 3
BLOCK = 1024
EMPTY = -(1 << 15)
"""The bits of -0.0 in 16-bit floats."""
RESIDENT_WARPS = 132 * 32
"""Warps that a Hopper holds at once with so many REGISTERS each. More rows than fit share programs."""
REGISTERS = 64
ALONE, BESIDE = RESIDENT_WARPS // 32, 80
"""Programs that have a multiprocessor each may have so many registers beside one that multiplies few rows (stream.py):
the next product's are there by then, and ask for its weight."""


@triton.jit
def _buffers(buffers_ptr, RANKS: tl.constexpr):
    """Where each rank's buffers lie. They stay there, so no need to wait."""
    found = ()
    for rank in tl.static_range(RANKS):
        found += (tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.int16)), 16),)
    return found


@triton.constexpr_function
def _from(peer, rank):
    """Which place within a slot of rank's is for what peer sends."""
    return peer - (peer > rank)


@triton.jit
def _send(x, real, buffers, slot, slot_size, at, RANK: tl.constexpr, RANKS: tl.constexpr, EMPTY: tl.constexpr):
    """The bits of this rank's part, pushed to all others."""
    bits = x.to(tl.int16, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits).to(tl.int16)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(buffers[peer] + (slot * (RANKS - 1) + _from(RANK, peer)) * slot_size + at, bits, mask=real)
    return bits


@triton.jit
def _own_part(x_ptr, row, rows, d, real, D, PARTS: tl.constexpr, TYPE: tl.constexpr):
    """A row of this rank's part; PARTS: it lies in so many parts of a sum, 0: it is whole."""
    x = tl.load(x_ptr + row * D + d, mask=real, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + (part * rows + row) * D + d, mask=real, other=0.0)
    return x.to(TYPE)


@triton.jit
def _add_up(bits, own, slot, slot_size, at, real, used, TYPE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
            EMPTY: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """The sum of all parts as they arrive, in rank order, in float32. Empties the slot of the call before."""
    before = (slot + SLOTS - 1) % SLOTS
    empty = tl.full(bits.shape, EMPTY, dtype=tl.int16)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(own + (before * (RANKS - 1) + _from(peer, RANK)) * slot_size + at, empty, mask=used)
    total = tl.zeros(bits.shape, dtype=tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += bits.to(TYPE, bitcast=True).to(tl.float32)
        else:
            place = own + (slot * (RANKS - 1) + _from(peer, RANK)) * slot_size + at
            part = tl.load(place, mask=real, other=0, volatile=True)
            while tl.max((part == EMPTY).to(tl.int32)) != 0:
                part = tl.load(place, mask=real, other=0, volatile=True)
            total += part.to(TYPE, bitcast=True).to(tl.float32)
    return total


@triton.jit
def _push_kernel(
    x_ptr, residual_ptr, out_ptr, buffers_ptr, turns_ptr, n, slot_size,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, EMPTY: tl.constexpr, SLOTS: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's blocks, each with a turn of its own. It pushes the next before it waits for one."""
    begin(PDL)
    first, step = tl.program_id(0), tl.num_programs(0)
    within = tl.arange(0, BLOCK)
    buffers = _buffers(buffers_ptr, RANKS)
    wait(PDL)
    blocks = tl.cdiv(n, BLOCK)
    for next_ in range(first, blocks + step, step):
        if next_ < blocks:
            at = next_ * BLOCK + within
            slot = tl.load(turns_ptr + next_)
            x = tl.load(x_ptr + at, mask=at < n, other=0.0)
            _send(x, at < n, buffers, slot, slot_size, at, RANK, RANKS, EMPTY)
        block = next_ - step
        if block >= 0:
            at = block * BLOCK + within
            real = at < n
            slot = tl.load(turns_ptr + block)
            bits = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.int16, bitcast=True)
            if RESIDUAL:
                beside = tl.load(residual_ptr + at, mask=real, other=0.0).to(tl.float32)
            total = _add_up(bits, buffers[RANK], slot, slot_size, at, real, at >= 0, x_ptr.dtype.element_ty, RANK,
                            RANKS, EMPTY, SLOTS)  # fmt: skip
            if RESIDUAL:
                total += beside
            tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=real)
            tl.store(turns_ptr + block, (slot + 1) % SLOTS)


@triton.jit
def _add_row_up(
    bits, residual, g, slot, row, at, d, real, used, out_ptr, normed_ptr, own, D, slot_size, scale,
    within_ptr, within_bias_ptr, within_eps, norm_bias_ptr, norm_eps,
    WITHIN: tl.constexpr, WITHIN_BIAS: tl.constexpr, WITHIN_OFFSET: tl.constexpr,
    NORM: tl.constexpr, NORM_BIAS: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, EMPTY: tl.constexpr, SLOTS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Store the sum of a row's parts and its residual, and the norm of that. g: the norm's weights."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    total = _add_up(bits, own, slot, slot_size, at, real, used, TYPE, RANK, RANKS, EMPTY, SLOTS)
    y = add_sum(residual.to(tl.float32), total, scale, within_ptr, within_bias_ptr, d, real, D, within_eps,
                WITHIN, WITHIN_BIAS, WITHIN_OFFSET, PLAIN, TYPE)  # fmt: skip
    tl.store(out_ptr + row * D + d, y, mask=real)
    y = norm_row(y.to(tl.float32), g, norm_bias_ptr, d, real, D, norm_eps, NORM == "layer", NORM_BIAS)
    tl.store(normed_ptr + row * D + d, y.to(normed_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def _push_norm_kernel(
    x_ptr, residual_ptr, out_ptr, normed_ptr, buffers_ptr, turns_ptr, rows, D, slot_size, scale,
    within_ptr, within_bias_ptr, within_eps, norm_ptr, norm_bias_ptr, norm_eps,
    WITHIN: tl.constexpr, WITHIN_BIAS: tl.constexpr, WITHIN_OFFSET: tl.constexpr,
    NORM: tl.constexpr, NORM_BIAS: tl.constexpr, NORM_OFFSET: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EMPTY: tl.constexpr,
    SLOTS: tl.constexpr, PARTS: tl.constexpr, PLAIN: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's rows, each of which has several blocks of the buffers for itself; each block has a turn of its own.

    ONE: a program has one row. Else it pushes the next before it waits for one."""
    begin(PDL)
    first, step = tl.program_id(0), tl.num_programs(0)
    number = tl.arange(0, BLOCKS)[:, None]
    d = number * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = d < D
    blocks = tl.cdiv(D, BLOCK)
    turn = turns_ptr + number
    used = number < blocks
    g = tl.load(norm_ptr + d, mask=real, other=0.0).to(tl.float32) + NORM_OFFSET
    buffers = _buffers(buffers_ptr, RANKS)
    wait(PDL)
    if ONE:
        at = first * blocks * BLOCK + d
        slot = tl.load(turn + first * blocks, mask=used, other=0)
        residual = tl.load(residual_ptr + first * D + d, mask=real, other=0.0)
        x = _own_part(x_ptr, first, rows, d, real, D, PARTS, out_ptr.dtype.element_ty)
        bits = _send(x, real, buffers, slot, slot_size, at, RANK, RANKS, EMPTY)
        _add_row_up(
            bits, residual, g, slot, first, at, d, real, used & (d >= 0), out_ptr, normed_ptr, buffers[RANK], D,
            slot_size, scale, within_ptr, within_bias_ptr, within_eps, norm_bias_ptr, norm_eps,
            WITHIN, WITHIN_BIAS, WITHIN_OFFSET, NORM, NORM_BIAS, RANK, RANKS, EMPTY, SLOTS, PLAIN,
        )  # fmt: skip
        tl.store(turn + first * blocks, (slot + 1) % SLOTS, mask=used)
    else:
        for next_ in range(first, rows + step, step):
            if next_ < rows:
                slot = tl.load(turn + next_ * blocks, mask=used, other=0)
                x = _own_part(x_ptr, next_, rows, d, real, D, PARTS, out_ptr.dtype.element_ty)
                _send(x, real, buffers, slot, slot_size, next_ * blocks * BLOCK + d, RANK, RANKS, EMPTY)
            row = next_ - step
            if row >= 0:
                slot = tl.load(turn + row * blocks, mask=used, other=0)
                x = _own_part(x_ptr, row, rows, d, real, D, PARTS, out_ptr.dtype.element_ty)
                bits = x.to(tl.int16, bitcast=True)
                residual = tl.load(residual_ptr + row * D + d, mask=real, other=0.0)
                _add_row_up(
                    bits, residual, g, slot, row, row * blocks * BLOCK + d, d, real, used & (d >= 0), out_ptr,
                    normed_ptr, buffers[RANK], D, slot_size, scale, within_ptr, within_bias_ptr, within_eps,
                    norm_bias_ptr, norm_eps, WITHIN, WITHIN_BIAS, WITHIN_OFFSET, NORM, NORM_BIAS, RANK, RANKS, EMPTY,
                    SLOTS, PLAIN,
                )  # fmt: skip
                tl.store(turn + row * blocks, (slot + 1) % SLOTS, mask=used)


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

    x is of residual's type, or lies in parts of a sum [parts, T, D] in float32. Buffers: see push_sum; rows begin with
    blocks, and a row fits into a slot; rows in parts fit all."""
    out, normed = torch.empty_like(residual), torch.empty_like(residual)
    width = residual.shape[1]
    blocks = triton.cdiv(width, BLOCK)
    padded = pow2(blocks)
    warps = min(16, 4 * padded)
    parts = 0 if x.ndim == 2 else x.shape[0]
    tensors = x, residual, out, normed
    for mine, beside, some, also in [tensors] if parts else _pieces(tensors, slot_size // (blocks * BLOCK)):
        rows = beside.shape[0]
        programs = min(rows, RESIDENT_WARPS // warps)
        registers = BESIDE if programs <= ALONE else REGISTERS
        _push_norm_kernel[(programs,)](
            mine, beside, some, also, buffers, turns, rows, width, slot_size, float(scale),
            **stored_norm(within, "within"), **stored_norm(norm, "norm"),
            RANK=rank, RANKS=buffers.numel(), BLOCK=BLOCK, BLOCKS=padded, EMPTY=EMPTY, SLOTS=SLOTS,
            PARTS=parts, PLAIN=within is None and scale == 1.0, ONE=rows == programs,
            PDL=pdl, num_warps=warps, maxnreg=registers, launch_pdl=pdl,
        )  # fmt: skip
    return out, normed


def push_sum(
    x: Tensor, residual: Tensor | None, buffers: Tensor, turns: Tensor, rank: int, slot_size: int, *, pdl: bool
) -> Tensor:
    """residual + the sum of every rank's x, in 16-bit floats, rounded once.

    buffers [ranks] int64: addresses of int16 [SLOTS, ranks - 1, slot_size] on each device, EMPTY at first; turns int32
    [slot_size / BLOCK], the slot of each block's next call, zeros at first; slot_size: a multiple of BLOCK.
    """
    out = torch.empty_like(x)
    flat = x.view(-1), None if residual is None else residual.view(-1), out.view(-1)
    for mine, beside, some in _pieces(flat, slot_size):
        count = mine.numel()
        _push_kernel[(min(triton.cdiv(count, BLOCK), RESIDENT_WARPS // 4),)](
            mine, beside, some, buffers, turns, count, slot_size,
            RANK=rank, RANKS=buffers.numel(), BLOCK=BLOCK, EMPTY=EMPTY, SLOTS=SLOTS,
            RESIDUAL=beside is not None, PDL=pdl, num_warps=4, maxnreg=REGISTERS, launch_pdl=pdl,
        )  # fmt: skip
    return out


def _pieces(tensors: Sequence[Any], most: int) -> Iterable[Sequence[Any]]:
    """Tensors (or None) that are equally long, in pieces of at most so many rows."""
    rows = tensors[0].shape[0]
    if rows <= most:
        return [tensors]
    return ([None if each is None else each[at : at + most] for each in tensors] for at in range(0, rows, most))
