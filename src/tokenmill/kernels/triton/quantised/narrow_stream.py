"""Some rows times a matrix of 4 bit numbers on Hopper. Owns: the kernel in which no group of columns waits for another.

One warp copies: it keeps a ring of tiles full through the copy engine, words and scales as they lie, and the rows. The
others take words from there as tensor cores want their left operand, make numbers of the activations' type times
their scales of them in registers, and multiply these while they fetch the next words. So one chain of sums runs
through all groups, whatever their width (`narrow_thin.py` scales sums after every group, and waits for them). K is cut
into SPLIT parts; the program that ends last adds them in order. Must not know: layers, where a number's code comes
from. Not for the interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.kernels.triton.common import Scratch, act_parts, begin, gated_act, plain_act, pow2, wait
from tokenmill.kernels.triton.quantised.codes import float_asm, half_of, integer_asm, looks_up, more_than_code, planes
from tokenmill.kernels.triton.quantised.narrow import BLOCK, NarrowMatrix
from tokenmill.kernels.triton.ring import for_rows, make_signs, results_layout, sums_layout

Config = tuple[int, int, int, int, int, int]
"""BN (both halves of a gated weight), the most rows of a tile, split, stages (blocks of 128 columns under way), warps,
registers of a thread at the start."""


@gluon.constexpr_function
def _rows_of(height, warps):
    """How threads hold what each row of a left operand has, [1, height]."""
    repeated = [[0, 8]] + [[0, 16 * warps << i] for i in range(16) if 16 * warps << i < height]
    warp_bases = [[0, 16 << i] for i in range(8) if 1 << i < warps]
    return gl.DistributedLinearLayout(repeated, [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], warp_bases, [], [1, height])


@gluon.constexpr_function
def groups_of(group):
    """Groups of scales in a block of 128 columns."""
    return 1 if group >= 128 else 128 // group


@gluon.constexpr_function
def step_bytes(rows, height, groups, zero, pair):
    """All that comes for a step: words, rows, scales and zeros."""
    return pair * (height * 64 + rows * 256 + groups * height * (4 if zero else 2))


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
def fill(
    w_desc, scale_desc, zero_desc, bar, w_ring, scale_ring, zero_ring, stage, step, n, partner, row, line,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, GATED: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Ask for the words, scales and zeros of a step. row, line: where the matrix begins among others' rows, and its
    groups among theirs."""
    _ask(w_desc, bar, w_ring.index(stage), step * (32 * PAIR), row + n, row + partner, 0, GATED)
    for b in gl.static_range(PAIR):
        for g in gl.static_range(GROUPS):
            group = line + (step * PAIR + b) * 128 // GROUP + g
            at = (stage * PAIR + b) * GROUPS + g
            _ask(scale_desc, bar, scale_ring.index(at), group, n, partner, 1, GATED)
            if ZERO:
                _ask(zero_desc, bar, zero_ring.index(at), group, n, partner, 1, GATED)


@gluon.jit
def fill_rows(x_desc, bar, x_ring, stage, step, m, PAIR: gl.constexpr):
    """Ask for a step's columns of the rows."""
    for i in gl.static_range(2 * PAIR):
        column = (step * (2 * PAIR) + i) * 64
        tma.async_copy_global_to_shared(x_desc, [m, column], bar, x_ring.index(stage * (2 * PAIR) + i))


@gluon.jit
def make_rings(
    x_desc, w_desc, scale_desc, zero_desc, BM: gl.constexpr, BN: gl.constexpr, GROUPS: gl.constexpr,
    ZERO: gl.constexpr, PAIR: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Room for steps under way, rows, words, scales and zeros; and what says that one is full, or free again."""
    w_ring = gl.allocate_shared_memory(gl.int16, [STAGES, BN, 32 * PAIR], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2 * PAIR, BM, 64], x_desc.layout)
    scale_ring = gl.allocate_shared_memory(scale_desc.dtype, [STAGES * PAIR * GROUPS, 1, BN], scale_desc.layout)
    zero_ring = scale_ring
    if ZERO:
        zero_ring = gl.allocate_shared_memory(zero_desc.dtype, [STAGES * PAIR * GROUPS, 1, BN], zero_desc.layout)
    full, free = make_signs(STAGES, 1)
    return x_ring, w_ring, scale_ring, zero_ring, full, free


@gluon.jit
def _copy(
    x_desc, w_desc, scale_desc, zero_desc, x_ring, w_ring, scale_ring, zero_ring, full, free, m, n, partner, first,
    STEPS: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, GATED: gl.constexpr,
    PAIR: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The copying warp. BYTES: all that comes for a step."""
    for i in gl.static_range(STAGES):
        if i < STEPS:
            mbarrier.expect(full.index(i), BYTES)
            fill(w_desc, scale_desc, zero_desc, full.index(i), w_ring, scale_ring, zero_ring, i, first + i, n, partner,
                 0, 0, GROUP, GROUPS, ZERO, GATED, PAIR)  # fmt: skip
    wait(PDL)
    for i in gl.static_range(STAGES):
        if i < STEPS:
            fill_rows(x_desc, full.index(i), x_ring, i, first + i, m, PAIR)
    for i in range(STAGES, STEPS):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), (i // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BYTES)
        fill(w_desc, scale_desc, zero_desc, full.index(stage), w_ring, scale_ring, zero_ring, stage, first + i, n,
             partner, 0, 0, GROUP, GROUPS, ZERO, GATED, PAIR)  # fmt: skip
        fill_rows(x_desc, full.index(stage), x_ring, stage, first + i, m, PAIR)


@gluon.constexpr_function
def _times(asm, scale, half):
    """This asm, its result times what is given behind its other operands: two numbers at once, which stay together."""
    return asm[:-1] + f"mul.rn.{half}x2 $0, $0, ${scale}; }}"


@gluon.constexpr_function
def _product_asm(half):
    """Two numbers times two."""
    return f"mul.rn.{half}x2 $0, $1, $2;"


@gluon.jit
def _number(w, less, scales, SHIFT: gl.constexpr, TABLE: gl.constexpr):
    """One nibble of each word times its scale, in the scales' type; less: more_than_code and zero points, less than
    nothing."""
    LIKE: gl.constexpr = scales.dtype
    HALF: gl.constexpr = half_of(LIKE)
    if TABLE == 0:
        q = gl.inline_asm_elementwise(
            _times(integer_asm(SHIFT, HALF), 3, HALF), "=&r,r,r,r", [w, less, scales], dtype=LIKE.value, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        q = gl.inline_asm_elementwise(
            _times(float_asm(SHIFT, HALF), 2, HALF), "=&r,r,r", [w, scales], dtype=LIKE.value, is_pure=True, pack=2
        )
    return q


@gluon.jit
def _beside(first, second, LEFT: gl.constexpr):
    """[rows, n] and [rows, n] -> [rows, 2 n]: columns are a thread's own, so that nothing moves."""
    both = gl.join(first, second).permute(0, 2, 1).reshape([first.shape[0], 2 * first.shape[1]])
    return gl.convert_layout(both, LEFT)


@gluon.jit
def _blocks_of(words, LEFT: gl.constexpr, PAIR: gl.constexpr):
    """A step's words by blocks of 128 columns."""
    if PAIR == 1:
        return (words,)
    else:
        first, second = words.reshape([words.shape[0], 2, 32]).permute(0, 2, 1).split()
        return gl.convert_layout(first, LEFT), gl.convert_layout(second, LEFT)


@gluon.jit
def _multiply_block(
    acc, before, w, x_ring, scale_ring, zero_ring, block,
    GROUPS: gl.constexpr, ZERO: gl.constexpr, TABLE: gl.constexpr, LEFT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """acc with two more products, of which the second is under way still, and its left operand; before: the same of
    the product that is under way. block: the place of a block of 128 columns in the rings."""
    LIKE: gl.constexpr = x_ring.dtype
    AT_ONCE: gl.constexpr = looks_up(TABLE, LIKE, False)
    like = w.to(LIKE, bitcast=True)
    made = ()
    if AT_ONCE:
        every = planes(w, LIKE, TABLE)
    for g in gl.static_range(GROUPS):
        scale = _of_rows(scale_ring.index(block * GROUPS + g), LEFT, WARPS)
        less = gl.full([w.shape[0]], -more_than_code(LIKE), gl.float32, gl.SliceLayout(1, LEFT))
        if ZERO:
            less -= _of_rows(zero_ring.index(block * GROUPS + g), LEFT, WARPS)
        _, scales = gl.broadcast(like, scale.to(LIKE)[:, None])
        _, lesses = gl.broadcast(like, less.to(LIKE)[:, None])
        for p in gl.static_range(g * (4 // GROUPS), (g + 1) * (4 // GROUPS)):
            if AT_ONCE:
                q = gl.inline_asm_elementwise(
                    _product_asm(half_of(LIKE)), "=r,r,r", [every[p], scales], dtype=LIKE.value, is_pure=True, pack=2
                )
                made = made + (q,)
            else:
                made = made + (_number(w, lesses, scales, p * 4, TABLE),)
            if p % 2 == 1:
                left = _beside(made[p - 1], made[p], LEFT)
                acc = warpgroup_mma(left, x_ring.index(block * 2 + p // 2).permute((1, 0)), acc, is_async=True)
                # Tensor cores read a left operand until its product ends: without `before` here, the next numbers
                # would be written over it.
                acc, before = warpgroup_mma_wait(1, deps=(acc, before))
                before = left
    return acc, before


@gluon.jit
def multiply_steps(
    x_ring, w_ring, scale_ring, zero_ring, full, free, done,
    STEPS: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, TABLE: gl.constexpr, PAIR: gl.constexpr,
    STAGES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr, DRAINS: gl.constexpr,
):  # fmt: skip
    """Sums [BN, BM] over the next steps of the ring; done: how many came before. While a product is under way, the
    numbers of the next are made. DRAINS: a step waits for its last one, whose stage is free earlier then."""
    SUMS: gl.constexpr = sums_layout(BM, WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    acc = gl.zeros([BN, BM], gl.float32, SUMS)
    before = gl.zeros([BN, 64], x_ring.dtype, LEFT)
    mbarrier.wait(full.index(done % STAGES), (done // STAGES) & 1)
    words = w_ring.index(done % STAGES).load(LEFT)
    for step in range(done, done + STEPS):
        stage = step % STAGES
        w = _blocks_of(words, LEFT, PAIR)
        for b in gl.static_range(PAIR):
            acc, before = _multiply_block(
                acc, before, w[b], x_ring, scale_ring, zero_ring, stage * PAIR + b, GROUPS, ZERO, TABLE, LEFT, WARPS
            )
        if not DRAINS:
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > done)
        # The next words; after the last ones these once more.
        coming = gl.minimum(step + 1, done + STEPS - 1)
        mbarrier.wait(full.index(coming % STAGES), (coming // STAGES) & 1)
        words = w_ring.index(coming % STAGES).load(LEFT)
        if DRAINS:
            acc, before = warpgroup_mma_wait(0, deps=(acc, before))
            mbarrier.arrive(free.index(stage), count=1)
    if not DRAINS:
        acc, _ = warpgroup_mma_wait(0, deps=(acc, before))
        mbarrier.arrive(free.index((done + STEPS - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _multiply(
    x_ring, w_ring, scale_ring, zero_ring, full, free,
    STEPS: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, TABLE: gl.constexpr, PAIR: gl.constexpr,
    STAGES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: sums [BN, BM]. With few rows, a stage that is free late costs more than the wait."""
    acc = multiply_steps(
        x_ring, w_ring, scale_ring, zero_ring, full, free, 0, STEPS, GROUPS, ZERO, TABLE, PAIR, STAGES, BM, BN, WARPS,
        PAIR == 2,
    )  # fmt: skip
    return (acc,)


@gluon.jit
def results_of(acc, ACT: gl.constexpr, GATED: gl.constexpr, WARPS: gl.constexpr):
    """Sums [BN, BM] -> act of them, of a gated weight [BN / 2, BM], as they are written."""
    MADE: gl.constexpr = results_layout(WARPS)
    if GATED:
        gate, up = acc.reshape([2, acc.shape[0] // 2, acc.shape[1]]).permute(1, 2, 0).split()
        y = gl.convert_layout(gated_act(gate, up, ACT), MADE)
    else:
        y = gl.convert_layout(plain_act(acc, ACT), MADE)
    return y


@gluon.jit(do_not_specialize=["M"])
def _stream_kernel(
    x_desc, w_desc, scale_desc, zero_desc, bias_ptr, residual_ptr, out_ptr, part_ptr, count_ptr, M, N,
    BM: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr,
    ZERO: gl.constexpr, TABLE: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, PAIR: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    begin(PDL)
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = sums_layout(BM, WARPS)
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    GROUPS: gl.constexpr = groups_of(GROUP)
    tile = gl.program_id(0)
    part = gl.program_id(1)
    m = gl.program_id(2) * BM
    n = tile * WIDTH
    x_ring, w_ring, scale_ring, zero_ring, full, free = make_rings(
        x_desc, w_desc, scale_desc, zero_desc, BM, BN, GROUPS, ZERO, PAIR, STAGES
    )
    (acc,) = gl.warp_specialize(
        [
            (_multiply, (x_ring, w_ring, scale_ring, zero_ring, full, free,
                         STEPS, GROUPS, ZERO, TABLE, PAIR, STAGES, BM, BN, WARPS)),
            (_copy, (x_desc, w_desc, scale_desc, zero_desc, x_ring, w_ring, scale_ring, zero_ring, full, free,
                     m, n, N + n, part * STEPS, STEPS, GROUP, GROUPS, ZERO, GATED, PAIR, STAGES,
                     step_bytes(BM, BN, GROUPS, ZERO, PAIR), PDL)),
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
            acc += for_rows(bias_ptr, n, N, BN, BM, GATED, WARPS)
        y = results_of(acc, ACT, GATED, WARPS)
        MADE: gl.constexpr = results_layout(WARPS)
        column = n + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, MADE))
        line = m + gl.arange(0, BM, layout=gl.SliceLayout(0, MADE))
        place = line.to(gl.int64)[None, :] * N + column[:, None]
        keep = (column < N)[:, None] & (line < M)[None, :]
        if RESIDUAL:
            y += gl.load(residual_ptr + place, mask=keep, other=0.0).to(gl.float32)
        gl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=keep)


def blocks_together(rows: int, stages: int) -> int:
    """How many blocks of 128 columns are a step of the ring, which has room for `stages` blocks. The copy engine takes
    as long for a line of 64 bytes as for one of 128: where there are few rows, it is what a step waits for."""
    return 2 if rows <= 64 and stages % 2 == 0 else 1


def can_copy(
    dtype: torch.dtype, shape: tuple[int, int], group: int, parts: tuple[Tensor, Tensor, Tensor | None], *, gated: bool
) -> bool:
    """Does the copy engine take such a weight (words, scales, zeros) for activations of this type? Groups are as wide
    as planes of a word, or wider. Lines, and what is copied of them (a gated weight's second half, too), begin at
    multiples of 16 bytes. Numbers times their scales have the activations' type: scales must not leave its range."""
    planes_whole = group in (32, 64) or (group > 0 and group % BLOCK == 0)
    typed = dtype == torch.bfloat16 or (dtype == torch.float16 and parts[1].dtype == torch.float16)
    width = shape[0] // 2 if gated else shape[0]
    lines = width % 8 == 0 and shape[1] % 8 == 0
    return planes_whole and typed and lines and all(t is None or t.data_ptr() % 16 == 0 for t in parts)


def can_stream(x: Tensor, weight: NarrowMatrix, *, gated: bool) -> bool:
    """Does the copy engine take both?"""
    parts = weight.data, weight.scales, weight.zeros
    copied = weight.bits == 4 and can_copy(x.dtype, weight.shape, weight.group, parts, gated=gated)
    return copied and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def _by_groups(of_groups: Tensor, height: int) -> TensorDescriptor:
    """What each group of each row has [groups, rows], by lines (torch gives a single line any stride), so that any
    group can be copied by itself."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    return TensorDescriptor(of_groups, list(of_groups.shape), [of_groups.shape[1], 1], [1, height], layout)


def described(
    x: Tensor, data: Tensor, scales: Tensor, zeros: Tensor | None, block_m: int, height: int, pair: int
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """What the copying warp reads, in tiles of block_m rows of x and of `height` rows of the weight: x, the words, the
    scales [groups, rows] and zeros."""
    rows = gl.NVMMASharedLayout.get_default_for([block_m, 64], gl.bfloat16)
    words = gl.NVMMASharedLayout.get_default_for([height, 32 * pair], gl.int16)
    of_groups = _by_groups(scales, height)
    return (
        TensorDescriptor.from_tensor(x, [block_m, 64], rows),
        TensorDescriptor.from_tensor(data, [height, 32 * pair], words),
        of_groups,
        of_groups if zeros is None else _by_groups(zeros, height),
    )


def narrow_stream(
    x: Tensor, weight: NarrowMatrix, act: str | None, residual: Tensor | None, *, scratch: Scratch, pdl: bool,
    config: Config,
) -> Tensor:  # fmt: skip
    """x [M, K] (`can_stream`) -> residual + act(x @ weight.T + bias) [M, out]."""
    rows, inner = x.shape
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_n, most, split, stages, warps, registers = config
    block_m = min(most, max(16, pow2(rows)))
    pair = blocks_together(block_m, stages)
    steps = -(-inner // (BLOCK * pair))
    height = block_n // 2 if gated else block_n
    tiles, high = -(-width // height), -(-rows // block_m)
    if tiles * high * split * block_n * block_m > scratch.floats or tiles * high > scratch.num_counters:
        split = 1
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _stream_kernel[(tiles, split, high)](
        *described(x, weight.data, weight.scales, weight.zeros, block_m, height, pair),
        weight.bias, residual, out, scratch.partial(x.device), scratch.counters(x.device), rows, width,
        BM=block_m, BN=block_n, SPLIT=split, STEPS=-(-steps // split), GROUP=weight.group,
        ZERO=weight.zeros is not None, TABLE=weight.table, ACT=kind, GATED=gated, BIAS=weight.bias is not None,
        RESIDUAL=residual is not None, PAIR=pair, STAGES=stages // pair, PDL=pdl, num_warps=warps,
        maxnreg=registers, launch_pdl=pdl,
    )  # fmt: skip
    return out
