"""Products of many rows on Hopper. Owns: the persistent kernel in which one warp copies and two warp groups multiply.

Tiles are 128 rows by 256 weight rows, dealt to programs in turn. The copying warp keeps a ring of tiles full through
the copy engine, across the borders of tiles; each multiplying group owns 64 rows, and as the groups drift apart one
multiplies while the other finishes. A gated activation takes gates and their partners into one tile; a residual is
added before rounding: neither needs a pass of its own. Must not know: layers. Not for the interpreter.
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

from tokenmill.kernels.triton.common import multiprocessors
from tokenmill.kernels.triton.ring import make_signs

BM = 128
BN = 256
BK = 64
STAGES = 4
GROUP = 16
"""Row tiles that follow each other before the next columns: what they share stays in L2."""


@gluon.jit
def _place(item, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column of the item-th tile."""
    band = GROUP * tiles_n
    first = item // band * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    return first + item % band % height, item % band // height


@gluon.jit
def _copy(
    x_desc, w_desc, low, high, weights, full, free, tiles_m, tiles_n, width, items,
    STEPS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    HALF: gl.constexpr = BM // 2
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile_m, tile_n = _place(item, tiles_m, tiles_n, GROUP)
        m = tile_m * BM
        if GATED:
            n = tile_n * (BN // 2)
            partner = width + n
        else:
            n = tile_n * BN
            partner = n + BN // 2
        for step in range(STEPS):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, 2 * x_desc.block_type.nbytes + 2 * w_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [m, step * BK], bar, low.index(stage))
            tma.async_copy_global_to_shared(x_desc, [m + HALF, step * BK], bar, high.index(stage))
            both = weights.index(stage)
            tma.async_copy_global_to_shared(w_desc, [n, step * BK], bar, both.slice(0, BN // 2, 0))
            tma.async_copy_global_to_shared(w_desc, [partner, step * BK], bar, both.slice(BN // 2, BN // 2, 0))
            count += 1


@gluon.jit
def _halves(acc, LAYOUT: gl.constexpr):
    """[64, 2 * n] -> its left and right half."""
    left, right = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1).split()
    return gl.convert_layout(left, LAYOUT), gl.convert_layout(right, LAYOUT)


@gluon.jit
def _add(y, residual_ptr, m, n, rows, width, LAYOUT: gl.constexpr):
    """y + the residual's part that begins at row m and column n."""
    row = m + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    column = n + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    place = row.to(gl.int64)[:, None] * width + column[None, :]
    keep = (row < rows)[:, None] & (column < width)[None, :]
    return y + gl.load(residual_ptr + place, mask=keep, other=0.0).to(gl.float32)


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _multiply(
    out_desc, residual_ptr, mine, weights, full, free, spare, tiles_m, tiles_n, rows, width, items, part,
    STEPS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr, ADDED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One multiplying group: rows 64 * part and following of each tile."""
    HALF: gl.constexpr = BM // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN // 2, 16]
    )
    kind: gl.constexpr = out_desc.dtype
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile_m, tile_n = _place(item, tiles_m, tiles_n, GROUP)
        m = tile_m * BM + part * HALF
        acc = gl.zeros([HALF, BN], gl.float32, LAYOUT)
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        acc = warpgroup_mma(mine.index(stage), weights.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        count += 1
        for _ in range(1, STEPS):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            acc = warpgroup_mma(mine.index(stage), weights.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index((count - 1) % STAGES), count=1)
            count += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((count - 1) % STAGES), count=1)
        left, right = _halves(acc, NARROW)
        # The copy to memory clips what lies outside.
        if GATED:
            n = tile_n * (BN // 2)
            y = left * _sigmoid(left) * right
            tma.store_wait(0)
            spare.store(y.to(kind))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [m, n], spare)
        else:
            n = tile_n * BN
            if ADDED:
                left = _add(left, residual_ptr, m, n, rows, width, NARROW)
                right = _add(right, residual_ptr, m, n + BN // 2, rows, width, NARROW)
            tma.store_wait(0)
            spare.store(left.to(kind))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [m, n], spare)
            tma.store_wait(0)
            spare.store(right.to(kind))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [m, n + BN // 2], spare)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "rows"])
def _wide_kernel(
    x_desc, w_desc, out_desc, residual_ptr, tiles_m, tiles_n, rows, width,
    STEPS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr, ADDED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = x_desc.dtype
    low = gl.allocate_shared_memory(kind, [STAGES, BM // 2, BK], x_desc.layout)
    high = gl.allocate_shared_memory(kind, [STAGES, BM // 2, BK], x_desc.layout)
    weights = gl.allocate_shared_memory(kind, [STAGES, BN, BK], w_desc.layout)
    one = gl.allocate_shared_memory(kind, [BM // 2, BN // 2], out_desc.layout)
    two = gl.allocate_shared_memory(kind, [BM // 2, BN // 2], out_desc.layout)
    full, free = make_signs(STAGES, 2)
    items = tiles_m * tiles_n
    gl.warp_specialize(
        [
            (_multiply, (out_desc, residual_ptr, low, weights, full, free, one, tiles_m, tiles_n, rows, width, items, 0,
                         STEPS, BM, BN, GROUP, GATED, ADDED, STAGES)),
            (_multiply, (out_desc, residual_ptr, high, weights, full, free, two, tiles_m, tiles_n, rows, width, items,
                         1, STEPS, BM, BN, GROUP, GATED, ADDED, STAGES)),
            (_copy, (x_desc, w_desc, low, high, weights, full, free, tiles_m, tiles_n, width, items,
                     STEPS, BM, BN, BK, GROUP, GATED, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def wide(x: Tensor, weight: Tensor, residual: Tensor | None, *, gated: bool) -> Tensor:
    """x [M, K], weight [N, K] -> residual + x @ weight.T, or silu(gate) * up for [gate; up] = weight."""
    rows, inner = x.shape
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    ring = gl.NVMMASharedLayout.get_default_for([BM // 2, BK], gl.bfloat16)
    made = gl.NVMMASharedLayout.get_default_for([BM // 2, BN // 2], gl.bfloat16)
    tiles_m, tiles_n = -(-rows // BM), -(-width // (BN // 2 if gated else BN))
    _wide_kernel[(min(multiprocessors(), tiles_m * tiles_n),)](
        TensorDescriptor.from_tensor(x, [BM // 2, BK], ring),
        TensorDescriptor.from_tensor(weight, [BN // 2, BK], ring),
        TensorDescriptor.from_tensor(out, [BM // 2, BN // 2], made),
        residual, tiles_m, tiles_n, rows, width,
        STEPS=-(-inner // BK), BM=BM, BN=BN, BK=BK, GROUP=GROUP, GATED=gated, ADDED=residual is not None,
        STAGES=STAGES, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return out
