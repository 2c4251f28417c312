"""Some rows times a matrix of 4 bit numbers on Hopper. Owns: the kernel in which no group of columns waits for another.

One warp copies: it keeps a ring of tiles full through the copy engine, words and scales as they lie, and the rows. The
others take words from there as tensor cores want their left operand, make bfloat16 numbers times their scales of them
in registers, and multiply these while they fetch the next words. So one chain of sums runs through all groups, whatever
their width (`narrow_thin.py` scales sums after every group, and waits for them). K is cut into SPLIT parts; the program
that ends last adds them in order. Must not know: layers, where a number's code comes from. Not for the interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.kernels.triton.common import Scratch, act_parts, begin, gated_act, plain_act, pow2, wait
from tokenmill.kernels.triton.quantised.codes import float_asm, integer_asm, looks_up, planes
from tokenmill.kernels.triton.quantised.narrow import BLOCK, NarrowMatrix

Config = tuple[int, int, int, int, int, int]
"""BN (both halves of a gated weight), the most rows of a tile, split, stages, warps, registers of a thread at the
start."""


@gluon.constexpr_function
def _rows_of(height, warps):
    """How threads hold what each row of a left operand has, [1, height]."""
    repeated = [[0, 8]] + [[0, 16 * warps << i] for i in range(16) if 16 * warps << i < height]
    warp_bases = [[0, 16 << i] for i in range(8) if 1 << i < warps]
    return gl.DistributedLinearLayout(repeated, [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], warp_bases, [], [1, height])


@gluon.jit
def _of_rows(tile, LEFT: gl.constexpr, WARPS: gl.constexpr):
    """What rows of the weight have each, from a tile [1, rows]: float32 [rows]."""
    found = tile.load(_rows_of(tile.shape[1], WARPS)).reshape([tile.shape[1]])
    return gl.convert_layout(found, gl.SliceLayout(1, LEFT)).to(gl.float32)


@gluon.jit
def _ask(desc, bar, tile, line, n, partner, ALONG: gl.constexpr, GATED: gl.constexpr):
    """Copy what belongs to rows of the weight, which lie along this axis; of a gated weight two halves."""
    if GATED:
        HALF: gl.constexpr = tile.shape[ALONG] // 2
        if ALONG == 0:
            tma.async_copy_global_to_shared(desc, [n, line], bar, tile.slice(0, HALF, 0))
            tma.async_copy_global_to_shared(desc, [partner, line], bar, tile.slice(HALF, HALF, 0))
        else:
            tma.async_copy_global_to_shared(desc, [line, n], bar, tile.slice(0, HALF, 1))
            tma.async_copy_global_to_shared(desc, [line, partner], bar, tile.slice(HALF, HALF, 1))
    elif ALONG == 0:
        tma.async_copy_global_to_shared(desc, [n, line], bar, tile)
    else:
        tma.async_copy_global_to_shared(desc, [line, n], bar, tile)


@gluon.jit
def _fill(
    w_desc, scale_desc, zero_desc, bar, w_ring, scale_ring, zero_ring, stage, block, n, partner,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Ask for the words, scales and zeros of a block of 128 columns."""
    _ask(w_desc, bar, w_ring.index(stage), block * 32, n, partner, 0, GATED)
    for g in gl.static_range(GROUPS):
        group = block * 128 // GROUP + g
        _ask(scale_desc, bar, scale_ring.index(stage * GROUPS + g), group, n, partner, 1, GATED)
        if ZERO:
            _ask(zero_desc, bar, zero_ring.index(stage * GROUPS + g), group, n, partner, 1, GATED)


@gluon.jit
def _fill_rows(x_desc, bar, x_ring, stage, block, m):
    """Ask for 128 columns of the rows, as the four planes of words."""
    for p in gl.static_range(4):
        tma.async_copy_global_to_shared(x_desc, [m, block * 128 + p * 32], bar, x_ring.index(stage * 4 + p))


@gluon.jit
def _copy(
    x_desc, w_desc, scale_desc, zero_desc, x_ring, w_ring, scale_ring, zero_ring, full, free, m, n, partner, first,
    BLOCKS: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, GATED: gl.constexpr,
    STAGES: gl.constexpr, BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The copying warp. BYTES: all that comes for a block."""
    for i in gl.static_range(STAGES):
        if i < BLOCKS:
            mbarrier.expect(full.index(i), BYTES)
            _fill(w_desc, scale_desc, zero_desc, full.index(i), w_ring, scale_ring, zero_ring, i, first + i, n, partner,
                  GROUP, GROUPS, ZERO, GATED)  # fmt: skip
    wait(PDL)
    for i in gl.static_range(STAGES):
        if i < BLOCKS:
            _fill_rows(x_desc, full.index(i), x_ring, i, first + i, m)
    for i in range(STAGES, BLOCKS):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), (i // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BYTES)
        _fill(w_desc, scale_desc, zero_desc, full.index(stage), w_ring, scale_ring, zero_ring, stage, first + i, n,
              partner, GROUP, GROUPS, ZERO, GATED)  # fmt: skip
        _fill_rows(x_desc, full.index(stage), x_ring, stage, first + i, m)


@gluon.jit
def _number(w, less, SHIFT: gl.constexpr, TABLE: gl.constexpr):
    """One nibble of each word as bfloat16; less: what 128 + q is too much by, of integers."""
    if TABLE == 0:
        q = gl.inline_asm_elementwise(integer_asm(SHIFT), "=r,r,r", [w, less], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        q = gl.inline_asm_elementwise(float_asm(SHIFT, "bf16"), "=r,r", [w], dtype=gl.bfloat16, is_pure=True, pack=2)
    return q


@gluon.jit
def _begin_products(
    acc, w, x_ring, scale_ring, zero_ring, stage,
    GROUPS: gl.constexpr, ZERO: gl.constexpr, TABLE: gl.constexpr, LEFT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """acc and the left operands of four products that are under way: tensor cores read both until these end."""
    AT_ONCE: gl.constexpr = looks_up(TABLE, gl.bfloat16, False)
    rows: gl.constexpr = w.shape[0]
    like = w.to(gl.bfloat16, bitcast=True)
    held = ()
    if AT_ONCE:
        every = planes(w, gl.bfloat16, TABLE)
    for g in gl.static_range(GROUPS):
        scale = _of_rows(scale_ring.index(stage * GROUPS + g), LEFT, WARPS)
        less = gl.full([rows], -136.0, gl.float32, gl.SliceLayout(1, LEFT))
        if ZERO:
            less -= _of_rows(zero_ring.index(stage * GROUPS + g), LEFT, WARPS)
        _, scales = gl.broadcast(like, scale.to(gl.bfloat16)[:, None])
        _, lesses = gl.broadcast(like, less.to(gl.bfloat16)[:, None])
        for p in gl.static_range(g * (4 // GROUPS), (g + 1) * (4 // GROUPS)):
            if AT_ONCE:
                q = every[p]
            else:
                q = _number(w, lesses, p * 4, TABLE)
            left = q * scales
            acc = warpgroup_mma(left, x_ring.index(stage * 4 + p).permute((1, 0)), acc, is_async=True)
            held = held + (left,)
    return acc, held


@gluon.jit
def _multiply(
    x_ring, w_ring, scale_ring, zero_ring, full, free,
    BLOCKS: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, TABLE: gl.constexpr, STAGES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: sums [BN, BM]."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    acc = gl.zeros([BN, BM], gl.float32, SUMS)
    mbarrier.wait(full.index(0), 0)
    w = w_ring.index(0).load(LEFT)
    for block in range(BLOCKS):
        stage = block % STAGES
        acc, held = _begin_products(acc, w, x_ring, scale_ring, zero_ring, stage, GROUPS, ZERO, TABLE, LEFT, WARPS)
        # The next words (after the last ones these once more) come while these products end.
        coming = gl.minimum(block + 1, BLOCKS - 1)
        mbarrier.wait(full.index(coming % STAGES), (coming // STAGES) & 1)
        w = w_ring.index(coming % STAGES).load(LEFT)
        # Without `held` here, the next operands would be written over these while they are read.
        acc, _, _, _, _ = warpgroup_mma_wait(0, deps=(acc, held[0], held[1], held[2], held[3]))
        mbarrier.arrive(free.index(stage), count=1)
    return (acc,)


@gluon.jit(do_not_specialize=["M"])
def _stream_kernel(
    x_desc, w_desc, scale_desc, zero_desc, bias_ptr, residual_ptr, out_ptr, part_ptr, count_ptr, M, N,
    BM: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    ZERO: gl.constexpr, TABLE: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    begin(PDL)
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16])
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    GROUPS: gl.constexpr = 1 if GROUP >= 128 else 128 // GROUP
    TOTAL: gl.constexpr = BN * 64 + BM * 256 + GROUPS * BN * (4 if ZERO else 2)
    tile = gl.program_id(0)
    part = gl.program_id(1)
    m = gl.program_id(2) * BM
    n = tile * WIDTH
    w_ring = gl.allocate_shared_memory(gl.int16, [STAGES, BN, 32], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 4, BM, 32], x_desc.layout)
    scale_ring = gl.allocate_shared_memory(scale_desc.dtype, [STAGES * GROUPS, 1, BN], scale_desc.layout)
    zero_ring = scale_ring
    if ZERO:
        zero_ring = gl.allocate_shared_memory(zero_desc.dtype, [STAGES * GROUPS, 1, BN], zero_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    (acc,) = gl.warp_specialize(
        [
            (_multiply, (x_ring, w_ring, scale_ring, zero_ring, full, free,
                         BLOCKS, GROUPS, ZERO, TABLE, STAGES, BM, BN, WARPS)),
            (_copy, (x_desc, w_desc, scale_desc, zero_desc, x_ring, w_ring, scale_ring, zero_ring, full, free,
                     m, n, N + n, part * BLOCKS, BLOCKS, GROUP, GROUPS, ZERO, GATED, STAGES, TOTAL, PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip
    wait(PDL)
    last = True
    if SPLIT > 1:
        whole = gl.program_id(2) * gl.num_programs(0) + tile
        row = gl.arange(0, BN, layout=gl.SliceLayout(1, SUMS))[:, None]
        at = row * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, SUMS))[None, :]
        gl.store(part_ptr + (whole * SPLIT + part).to(gl.int64) * (BN * BM) + at, acc, cache_modifier=".cg")
        gl.thread_barrier()
        last = gl.atomic_add(count_ptr + whole, 1, sem="acq_rel") == SPLIT - 1
        if last:
            gl.store(count_ptr + whole, 0)
            acc = gl.zeros([BN, BM], gl.float32, SUMS)
            for other in gl.static_range(SPLIT):
                theirs = part_ptr + (whole * SPLIT + other).to(gl.int64) * (BN * BM)
                acc += gl.load(theirs + at, cache_modifier=".cg")
    if last:
        if BIAS:
            own = gl.arange(0, BN, layout=gl.SliceLayout(1, SUMS))
            own = gl.minimum(n + own % WIDTH, N - 1) + own // WIDTH * N
            acc += gl.load(bias_ptr + own).to(gl.float32)[:, None]
        MADE: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
        if GATED:
            gate, up = acc.reshape([2, WIDTH, BM]).permute(1, 2, 0).split()
            y = gl.convert_layout(gated_act(gate, up, ACT), MADE)
        else:
            y = gl.convert_layout(plain_act(acc, ACT), MADE)
        column = n + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, MADE))
        line = m + gl.arange(0, BM, layout=gl.SliceLayout(0, MADE))
        place = line.to(gl.int64)[None, :] * N + column[:, None]
        keep = (column < N)[:, None] & (line < M)[None, :]
        if RESIDUAL:
            y += gl.load(residual_ptr + place, mask=keep, other=0.0).to(gl.float32)
        gl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=keep)


def can_stream(x: Tensor, weight: NarrowMatrix, *, gated: bool) -> bool:
    """Does the copy engine take these, and are groups as wide as planes? Lines, and what is copied of them (a gated
    weight's second half, too), begin at multiples of 16 bytes."""
    groups = weight.bits == 4 and (weight.group in (32, 64) or (weight.group > 0 and weight.group % BLOCK == 0))
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    lines = width % 8 == 0 and weight.shape[1] % 8 == 0 and x.stride(0) % 8 == 0
    read = (x, weight.data, weight.scales, weight.zeros)
    return groups and x.dtype == torch.bfloat16 and lines and all(t is None or t.data_ptr() % 16 == 0 for t in read)


def _by_groups(of_groups: Tensor, height: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """What each group of each row has [groups, rows], by lines (torch gives a single line any stride)."""
    return TensorDescriptor(of_groups, list(of_groups.shape), [of_groups.shape[1], 1], [1, height], layout)


def narrow_stream(
    x: Tensor, weight: NarrowMatrix, act: str | None, residual: Tensor | None, *, scratch: Scratch, pdl: bool,
    config: Config,
) -> Tensor:  # fmt: skip
    """x [M, K] bfloat16 (`can_stream`) -> residual + act(x @ weight.T + bias) [M, out]."""
    rows, inner = x.shape
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_n, most, split, stages, warps, registers = config
    block_m = min(most, max(16, pow2(rows)))
    blocks = -(-inner // BLOCK)
    height = block_n // 2 if gated else block_n
    tiles, high = -(-width // height), -(-rows // block_m)
    if tiles * high * split * block_n * block_m > scratch.floats or tiles * high > scratch.num_counters:
        split = 1
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    # What rows of the weight have each lies in lines of its own, so that any group can be copied by itself.
    line = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    scales = _by_groups(weight.scales, height, line)
    zeros = scales if weight.zeros is None else _by_groups(weight.zeros, height, line)
    planes_of_x = gl.NVMMASharedLayout.get_default_for([block_m, 32], gl.bfloat16)
    words = gl.NVMMASharedLayout.get_default_for([height, 32], gl.int16)
    _stream_kernel[(tiles, split, high)](
        TensorDescriptor.from_tensor(x, [block_m, 32], planes_of_x),
        TensorDescriptor.from_tensor(weight.data, [height, 32], words),
        scales, zeros, weight.bias, residual, out, scratch.partial(x.device), scratch.counters(x.device), rows, width,
        BM=block_m, BN=block_n, SPLIT=split, BLOCKS=-(-blocks // split), GROUP=weight.group,
        ZERO=weight.zeros is not None, TABLE=weight.table, ACT=kind, GATED=gated, BIAS=weight.bias is not None,
        RESIDUAL=residual is not None, STAGES=stages, PDL=pdl, num_warps=warps, maxnreg=registers, launch_pdl=pdl,
    )  # fmt: skip
    return out
