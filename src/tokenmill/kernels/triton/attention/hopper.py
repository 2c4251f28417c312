"""Flash attention of long chunks on Hopper. Owns: the kernel in which one warp copies and two warp groups compute.

The copying warp fills a ring of key and value tiles through the copy engine. Each computing group owns 64 of 128
(query, head) rows; while the tensor cores multiply the probabilities of one tile with its values, the group computes
the probabilities of the next, and the two groups overlap as they drift apart. Keys lie in rows as `gathered.py` lays
them; tiles run from the last key to the first. Must not know: tables, the gathering. Not for the interpreter.
"""

from __future__ import annotations

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

from tokenmill.compute.forward import AttentionSpec, ForwardContext
from tokenmill.kernels.triton.common import pow2

ROWS = 128
KEYS = 128
"""Keys of a tile: what `gathered.py` aligns sequences to."""


@gluon.jit
def _copy(key_desc, value_desc, keys, values, key_full, key_free, value_full, value_free, row, tiles,
          BN: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The copying warp: tile after tile into the ring."""
    for i in range(tiles):
        stage = i % STAGES
        turn = (i // STAGES) & 1
        place = row + (tiles - 1 - i) * BN
        mbarrier.wait(key_free.index(stage), turn ^ 1)
        mbarrier.expect(key_full.index(stage), key_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(key_desc, [place, 0], key_full.index(stage), keys.index(stage))
        mbarrier.wait(value_free.index(stage), turn ^ 1)
        mbarrier.expect(value_full.index(stage), value_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(value_desc, [place, 0], value_full.index(stage), values.index(stage))


@gluon.jit
def _weigh(s, top, total, at, oldest, position, scale, BN: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Raw dots [64, BN] -> probabilities, new maxima (of raw dots), sums, and by how much the old ones shrink."""
    if at + BN > oldest + 1:
        n = at + gl.arange(0, BN, layout=gl.SliceLayout(0, S_LAYOUT))
        s = gl.where(position[:, None] >= n[None, :], s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, axis=1))
    shrink = gl.exp2((top - new_top) * scale)
    p = gl.exp2(s * scale - (new_top * scale)[:, None])
    total = total * shrink + gl.sum(p, axis=1)
    return p, new_top, total, shrink


@gluon.jit
def _compute(
    q_ptr, out_ptr, sink_ptr, q_tile, keys, values, key_full, key_free, value_full, value_free,
    start, local, queries, kv_len, kv_head, tiles, scale, part,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BG: gl.constexpr, BN: gl.constexpr,
    SINKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One computing group: rows 64 * part and following."""
    HALF: gl.constexpr = 64
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    oldest = kv_len - queries + local + part * (HALF // BG)

    pair = part * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LOAD))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LOAD))
    query = local + pair // BG
    real = (query < queries) & (pair % BG < GROUP)
    place = (start + query).to(gl.int64) * (H * D) + (kv_head * GROUP + pair % BG) * D
    q_tile.store(gl.load(q_ptr + place[:, None] + d[None, :], mask=real[:, None], other=0.0))
    fence_async_shared()

    row = part * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_LAYOUT))
    position = kv_len - queries + local + row // BG
    top = gl.full([HALF], -1e30, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    o = gl.zeros([HALF, D], gl.float32, O_LAYOUT)
    none = gl.zeros([HALF, BN], gl.float32, S_LAYOUT)

    mbarrier.wait(key_full.index(0), 0)
    s = warpgroup_mma(q_tile, keys.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(key_free.index(0), count=1)
    p, top, total, shrink = _weigh(s, top, total, (tiles - 1) * BN, oldest, position, scale, BN, S_LAYOUT)
    a = gl.convert_layout(p.to(q_ptr.dtype.element_ty), P_LAYOUT)
    for i in range(1, tiles):
        stage = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(key_full.index(stage), (i // STAGES) & 1)
        s = warpgroup_mma(q_tile, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(value_full.index(before), ((i - 1) // STAGES) & 1)
        o = warpgroup_mma(a, values.index(before), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(key_free.index(stage), count=1)
        p, top, total, shrink = _weigh(s, top, total, (tiles - 1 - i) * BN, oldest, position, scale, BN, S_LAYOUT)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(value_free.index(before), count=1)
        o = o * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        a = gl.convert_layout(p.to(q_ptr.dtype.element_ty), P_LAYOUT)
    last = (tiles - 1) % STAGES
    mbarrier.wait(value_full.index(last), ((tiles - 1) // STAGES) & 1)
    o = warpgroup_mma(a, values.index(last), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])

    ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    top = gl.convert_layout(top, ROW) * scale
    total = gl.convert_layout(total, ROW)
    pair = part * HALF + gl.arange(0, HALF, layout=ROW)
    query = local + pair // BG
    head = kv_head * GROUP + pair % BG
    real = (query < queries) & (pair % BG < GROUP)
    if SINKS:
        sink = gl.load(sink_ptr + head, mask=real, other=-1e30).to(gl.float32) * 1.4426950408889634
        higher = gl.maximum(top, sink)
        total = total * gl.exp2(top - higher) + gl.exp2(sink - higher)
        o = o * gl.exp2(top - higher)[:, None]
    y = o / gl.where(real, total, 1.0)[:, None]
    place = (start + query).to(gl.int64) * (H * D) + head * D
    column = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    gl.store(out_ptr + place[:, None] + column[None, :], y.to(out_ptr.dtype.element_ty), mask=real[:, None])


@gluon.jit(do_not_specialize=["total_keys"])
def _hopper_kernel(
    q_ptr, key_desc, value_desc, tile_ptr, at_ptr, start_ptr, len_ptr, sink_ptr, out_ptr, total_keys, scale,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BQ: gl.constexpr, BG: gl.constexpr, BN: gl.constexpr,
    SINKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HEADS: gl.constexpr = H // GROUP
    kv_head = gl.program_id(0) % HEADS
    tile = gl.num_programs(0) // HEADS - 1 - gl.program_id(0) // HEADS
    seq = gl.load(tile_ptr + tile)
    if seq >= 0:
        start = gl.load(start_ptr + seq)
        queries = gl.load(start_ptr + seq + 1) - start
        local = (tile - start // BQ - seq) * BQ
        kv_len = gl.load(len_ptr + seq)
        end = gl.minimum(kv_len - queries + local + BQ, kv_len)
        tiles = (end + BN - 1) // BN
        row = kv_head * total_keys + gl.load(at_ptr + seq)
        kind: gl.constexpr = key_desc.dtype
        first = gl.allocate_shared_memory(kind, [64, D], key_desc.layout)
        second = gl.allocate_shared_memory(kind, [64, D], key_desc.layout)
        keys = gl.allocate_shared_memory(kind, [STAGES, BN, D], key_desc.layout)
        values = gl.allocate_shared_memory(kind, [STAGES, BN, D], value_desc.layout)
        key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(key_full.index(i), count=1)
            mbarrier.init(key_free.index(i), count=2)
            mbarrier.init(value_full.index(i), count=1)
            mbarrier.init(value_free.index(i), count=2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_compute, (q_ptr, out_ptr, sink_ptr, first, keys, values, key_full, key_free, value_full, value_free,
                            start, local, queries, kv_len, kv_head, tiles, scale, 0,
                            H, GROUP, D, BG, BN, SINKS, STAGES)),
                (_compute, (q_ptr, out_ptr, sink_ptr, second, keys, values, key_full, key_free, value_full, value_free,
                            start, local, queries, kv_len, kv_head, tiles, scale, 1,
                            H, GROUP, D, BG, BN, SINKS, STAGES)),
                (_copy, (key_desc, value_desc, keys, values, key_full, key_free, value_full, value_free, row, tiles,
                         BN, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def attend_hopper(
    q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext, arranged: tuple[Tensor, Tensor],
    gathered: tuple[Tensor, Tensor], stages: int = 2,
) -> None:  # fmt: skip
    """q [T, H, D] -> out [T, H * D], for the sequences with several new tokens; arranged for ROWS rows."""
    at, tiles = arranged
    keys, values = gathered
    heads, total, width = keys.shape
    group = spec.heads // heads
    packed = pow2(group)
    shape = [KEYS, width]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
    _hopper_kernel[(heads * tiles.shape[0],)](
        q, TensorDescriptor.from_tensor(keys.view(-1, width), shape, layout),
        TensorDescriptor.from_tensor(values.view(-1, width), shape, layout), tiles, at,
        ctx.query_start, ctx.kv_len, spec.sinks, out, total, spec.scale * 1.4426950408889634,
        H=spec.heads, GROUP=group, D=width, BQ=ROWS // packed, BG=packed, BN=KEYS,
        SINKS=spec.sinks is not None, STAGES=stages, num_warps=4, maxnreg=168,
    )  # fmt: skip
