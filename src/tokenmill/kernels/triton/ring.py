"""What kernels share in which one warp copies tiles into a ring and others multiply them. Owns: the signs that a tile
is full or free, how sums and results lie, and what belongs to rows of the weight. Not for the interpreter.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def make_signs(STAGES: gl.constexpr, READERS: gl.constexpr):
    """What says that a stage is full, and that each of its readers has left it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=READERS)
    fence_async_shared()
    return full, free


@gluon.constexpr_function
def sums_layout(width, warps, bits=16):
    """How the multiplying warps hold sums [rows of the weight, width] of numbers of so many bits."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, width, 256 // bits])


@gluon.constexpr_function
def results_layout(warps):
    """How they hold what is written: neighbouring rows of the weight are neighbours in memory then."""
    return gl.BlockedLayout([4, 1], [16, 2], [1, warps], [0, 1])


@gluon.jit
def for_rows(
    ptr, n, N, BN: gl.constexpr, BM: gl.constexpr, GATED: gl.constexpr, WARPS: gl.constexpr,
    BITS: gl.constexpr = 16,
):  # fmt: skip
    """What each row of a tile from n on has (its bias, its scale), [BN, 1]; n of each half of a gated weight."""
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    own = gl.arange(0, BN, layout=gl.SliceLayout(1, sums_layout(BM, WARPS, BITS)))
    own = gl.minimum(n + own % WIDTH, N - 1) + own // WIDTH * N
    return gl.load(ptr + own).to(gl.float32)[:, None]
