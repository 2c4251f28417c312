"""Tokens through experts of 4 bit numbers on Hopper. Owns: the kernel that takes each expert's rows the way of
narrow_stream.py.

Rows that experts read lie in the order of experts (`sorting.py`), so that the copy engine takes a tile of them as it
takes the expert's words. A tile may hold rows of the expert behind: their results are not stored.
Must not know: how experts were chosen, gates, layers. Not for the interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tokenmill.kernels.triton.common import act_parts, begin, multiprocessors, wait
from tokenmill.kernels.triton.experts.narrow_grouped import NarrowStack
from tokenmill.kernels.triton.experts.sorting import Sorted
from tokenmill.kernels.triton.quantised.narrow import BLOCK
from tokenmill.kernels.triton.quantised.narrow_stream import (
    blocks_together,
    can_copy,
    described,
    fill,
    fill_rows,
    groups_of,
    make_rings,
    multiply_steps,
    results_of,
    step_bytes,
)
from tokenmill.kernels.triton.ring import for_rows, results_layout

Cut = tuple[int, int, int, int, int, int]
"""BN (both halves of a gated weight), rows of a tile, stages, warps, registers of a thread at the start, and programs
of a multiprocessor."""


@gluon.jit
def _tile_of(tile_ptr, item, WIDE: gl.constexpr, WIDTH: gl.constexpr):
    """The first column, the expert, its tile's first place and one beyond the last."""
    tile = tile_ptr + item // WIDE * 3
    return item % WIDE * WIDTH, gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)


@gluon.jit
def _copy_tiles(
    x_desc, w_desc, scale_desc, zero_desc, x_ring, w_ring, scale_ring, zero_ring, full, free, tile_ptr, items,
    N: gl.constexpr, WIDTH: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    LINES: gl.constexpr, ZERO: gl.constexpr, GATED: gl.constexpr, PAIR: gl.constexpr, STAGES: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """The copying warp goes on with the next tile while the last one's results are written."""
    ROWS: gl.constexpr = 2 * N if GATED else N
    WIDE: gl.constexpr = (N + WIDTH - 1) // WIDTH
    done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, expert, first, last = _tile_of(tile_ptr, item, WIDE, WIDTH)
        if last > first:
            for step in range(STEPS):
                stage = done % STAGES
                bar = full.index(stage)
                mbarrier.wait(free.index(stage), (done // STAGES + 1) & 1)
                mbarrier.expect(bar, BYTES)
                fill(w_desc, scale_desc, zero_desc, bar, w_ring, scale_ring, zero_ring, stage, step, n, N + n,
                     expert * ROWS, expert * LINES, GROUP, GROUPS, ZERO, GATED, PAIR)  # fmt: skip
                fill_rows(x_desc, bar, x_ring, stage, step, first, PAIR)
                done += 1


@gluon.jit
def _multiply_tiles(
    x_ring, w_ring, scale_ring, zero_ring, full, free, bias_ptr, out_ptr, order_ptr, tile_ptr, items,
    N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr,
    ZERO: gl.constexpr, TABLE: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
    TO_PAIR: gl.constexpr, PAIR: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The multiplying warps. (Within the loop over tiles ptxas would wait for each product that is not waited for.)"""
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    ROWS: gl.constexpr = 2 * N if GATED else N
    WIDE: gl.constexpr = (N + WIDTH - 1) // WIDTH
    MADE: gl.constexpr = results_layout(WARPS)
    done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, expert, first, last = _tile_of(tile_ptr, item, WIDE, WIDTH)
        if last > first:
            acc = multiply_steps(
                x_ring, w_ring, scale_ring, zero_ring, full, free, done,
                STEPS, GROUPS, ZERO, TABLE, PAIR, STAGES, BM, BN, WARPS, True,
            )  # fmt: skip
            done += STEPS
            if BIAS:
                acc += for_rows(bias_ptr + expert * ROWS, n, N, BN, BM, GATED, WARPS)
            y = results_of(acc, ACT, GATED, WARPS)
            column = n + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, MADE))
            slot = first + gl.arange(0, BM, layout=gl.SliceLayout(0, MADE))
            line = slot
            if TO_PAIR:
                line = gl.load(order_ptr + slot, mask=slot < last, other=0)
            place = line.to(gl.int64)[None, :] * N + column[:, None]
            keep = (column < N)[:, None] & (slot < last)[None, :]
            gl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=keep)


@gluon.jit(do_not_specialize=["items"])
def _streamed_kernel(
    x_desc, w_desc, scale_desc, zero_desc, bias_ptr, out_ptr, order_ptr, tile_ptr, items,
    N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr,
    LINES: gl.constexpr, ZERO: gl.constexpr, TABLE: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, TO_PAIR: gl.constexpr, PAIR: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """items: tiles of pairs times tiles of columns; a program takes one after the other. LINES: groups of scales of an
    expert. TO_PAIR: results lie in the order of pairs, not in that of experts."""
    begin(PDL)
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    GROUPS: gl.constexpr = groups_of(GROUP)
    x_ring, w_ring, scale_ring, zero_ring, full, free = make_rings(
        x_desc, w_desc, scale_desc, zero_desc, BM, BN, GROUPS, ZERO, PAIR, STAGES
    )
    wait(PDL)
    gl.warp_specialize(
        [
            (_multiply_tiles, (x_ring, w_ring, scale_ring, zero_ring, full, free, bias_ptr, out_ptr, order_ptr,
                               tile_ptr, items, N, BM, BN, STEPS, GROUPS, ZERO, TABLE, ACT, GATED, BIAS, TO_PAIR,
                               PAIR, STAGES, WARPS)),
            (_copy_tiles, (x_desc, w_desc, scale_desc, zero_desc, x_ring, w_ring, scale_ring, zero_ring, full, free,
                           tile_ptr, items, N, WIDTH, STEPS, GROUP, GROUPS, LINES, ZERO, GATED, PAIR, STAGES,
                           step_bytes(BM, BN, GROUPS, ZERO, PAIR))),
        ],
        [1],
        [24],
    )  # fmt: skip


def can_stream_experts(x: Tensor, weight: NarrowStack, *, gated: bool) -> bool:
    """As `can_stream`, of packed experts; their rows are laid anew."""
    return can_copy(x.dtype, weight.shape, weight.group, (weight.data, weight.scales, weight.zeros), gated=gated)


def pick_cut(size: int, *, gated: bool) -> Cut:
    """For tiles of so many pairs."""
    if size == 16:
        return (128, 16, 6, 4, 104, 2) if gated else (128, 16, 4, 4, 80, 3)
    return (128, size, 4, 4, 104, 2) if size <= 64 else (256, 128, 2, 8, 168, 1)


def narrow_streamed(
    x: Tensor, weight: NarrowStack, order: Sorted, act: str | None, *, up: bool, pdl: bool, cut: Cut
) -> Tensor:
    """x [P, K] (`can_stream_experts`) in the order of experts -> act(x @ weight[id].T + bias[id]) [P, N'], in that
    order (up) or in that of pairs. Rows of pairs without an expert: undefined."""
    kind, gated = act_parts(act)
    rows, inner = weight.shape
    width = rows // 2 if gated else rows
    block_n, block_m, stages, warps, registers, beside = cut
    height, pair = block_n // 2 if gated else block_n, blocks_together(block_m, stages)
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    scales, zeros = weight.scales.flatten(0, 1), None if weight.zeros is None else weight.zeros.flatten(0, 1)
    items = -(-width // height) * order.tiles.shape[0]
    _streamed_kernel[(min(items, beside * multiprocessors()),)](
        *described(x, weight.data.flatten(0, 1), scales, zeros, block_m, height, pair),
        weight.bias, out, order.order, order.tiles, items,
        N=width, BM=block_m, BN=block_n, STEPS=-(-inner // (BLOCK * pair)), GROUP=weight.group,
        LINES=weight.scales.shape[1], ZERO=zeros is not None, TABLE=weight.table, ACT=kind, GATED=gated,
        BIAS=weight.bias is not None, TO_PAIR=not up, PAIR=pair, STAGES=stages // pair, PDL=pdl, num_warps=warps,
        maxnreg=registers, launch_pdl=pdl,
    )  # fmt: skip
    return out
