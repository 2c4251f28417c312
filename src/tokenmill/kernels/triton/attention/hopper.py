"""Flash attention of long chunks on Hopper. Owns: the kernel in which one warp copies and two warp groups compute.

The copying warp fills a ring of key and value tiles through the copy engine. Each computing group owns 64 of 128
(query, head) rows; while the tensor cores multiply the probabilities of one tile with its values, the group computes
the probabilities of the next, and the two groups overlap as they drift apart. Keys lie in rows as `gathered.py` lays
them, a part of them that all heads share in rows of its own; tiles run from the last key to the first. Must not know:
tables, the gathering. Not for the interpreter.
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
from tokenmill.kernels.triton.attention.gathered import Gathered
from tokenmill.kernels.triton.common import pow2

ROWS = 128


@gluon.jit
def _copy(key_desc, beside_desc, value_desc, keys, beside, values, key_full, key_free, value_full, value_free,
          first, place, tiles, R: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The copying warp: tile after tile into the ring. first, place: where keys begin, and their shared part."""
    MORE: gl.constexpr = beside_desc.block_type.nbytes if R > 0 else 0
    for i in range(tiles):
        stage = i % STAGES
        turn = (i // STAGES) & 1
        at = (tiles - 1 - i) * BN
        mbarrier.wait(key_free.index(stage), turn ^ 1)
        mbarrier.expect(key_full.index(stage), key_desc.block_type.nbytes + MORE)
        tma.async_copy_global_to_shared(key_desc, [first + at, 0], key_full.index(stage), keys.index(stage))
        if R > 0:
            tma.async_copy_global_to_shared(beside_desc, [place + at, 0], key_full.index(stage), beside.index(stage))
        mbarrier.wait(value_free.index(stage), turn ^ 1)
        mbarrier.expect(value_full.index(stage), value_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(value_desc, [first + at, 0], value_full.index(stage), values.index(stage))


@gluon.jit
def _scores(q_tile, q_beside, keys, beside, stage, none, R: gl.constexpr):
    """Raw dots [64, BN] under way."""
    s = warpgroup_mma(q_tile, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    if R > 0:
        s = warpgroup_mma(q_beside, beside.index(stage).permute((1, 0)), s, is_async=True)
    return s


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
    q_ptr, out_ptr, sink_ptr, q_tile, q_beside, keys, beside, values, key_full, key_free, value_full, value_free,
    start, local, queries, kv_len, kv_head, tiles, scale, part,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, R: gl.constexpr, DV: gl.constexpr, BG: gl.constexpr,
    BN: gl.constexpr, SINKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One computing group: rows 64 * part and following."""
    HALF: gl.constexpr = 64
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    oldest = kv_len - queries + local + part * (HALF // BG)

    pair = part * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LOAD))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LOAD))
    query = local + pair // BG
    real = (query < queries) & (pair % BG < GROUP)
    place = (start + query).to(gl.int64) * (H * (D + R)) + (kv_head * GROUP + pair % BG) * (D + R)
    q_tile.store(gl.load(q_ptr + place[:, None] + d[None, :], mask=real[:, None], other=0.0))
    if R > 0:
        r = gl.arange(0, R, layout=gl.SliceLayout(0, LOAD))
        q_beside.store(gl.load(q_ptr + place[:, None] + D + r[None, :], mask=real[:, None], other=0.0))
    fence_async_shared()

    row = part * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_LAYOUT))
    position = kv_len - queries + local + row // BG
    top = gl.full([HALF], -1e30, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    o = gl.zeros([HALF, DV], gl.float32, O_LAYOUT)
    none = gl.zeros([HALF, BN], gl.float32, S_LAYOUT)

    mbarrier.wait(key_full.index(0), 0)
    s = _scores(q_tile, q_beside, keys, beside, 0, none, R)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(key_free.index(0), count=1)
    p, top, total, shrink = _weigh(s, top, total, (tiles - 1) * BN, oldest, position, scale, BN, S_LAYOUT)
    a = gl.convert_layout(p.to(q_ptr.dtype.element_ty), P_LAYOUT)
    for i in range(1, tiles):
        stage = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(key_full.index(stage), (i // STAGES) & 1)
        s = _scores(q_tile, q_beside, keys, beside, stage, none, R)
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
    place = (start + query).to(gl.int64) * (H * DV) + head * DV
    column = gl.arange(0, DV, layout=gl.SliceLayout(0, O_LAYOUT))
    gl.store(out_ptr + place[:, None] + column[None, :], y.to(out_ptr.dtype.element_ty), mask=real[:, None])


@gluon.jit(do_not_specialize=["total_keys", "heads"])
def _hopper_kernel(
    q_ptr, key_desc, beside_desc, value_desc, tile_ptr, at_ptr, start_ptr, len_ptr, sink_ptr, out_ptr,
    total_keys, heads, scale,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, R: gl.constexpr, DV: gl.constexpr, BQ: gl.constexpr,
    BG: gl.constexpr, BN: gl.constexpr, SINKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """H: query heads of a token; heads: key heads of this launch."""
    kv_head = gl.program_id(0) % heads
    tile = gl.num_programs(0) // heads - 1 - gl.program_id(0) // heads
    seq = gl.load(tile_ptr + tile)
    if seq >= 0:
        start = gl.load(start_ptr + seq)
        queries = gl.load(start_ptr + seq + 1) - start
        local = (tile - start // BQ - seq) * BQ
        kv_len = gl.load(len_ptr + seq)
        end = gl.minimum(kv_len - queries + local + BQ, kv_len)
        tiles = (end + BN - 1) // BN
        place = gl.load(at_ptr + seq)
        row = kv_head * total_keys + place
        kind: gl.constexpr = key_desc.dtype
        first = gl.allocate_shared_memory(kind, [64, D], key_desc.layout)
        second = gl.allocate_shared_memory(kind, [64, D], key_desc.layout)
        keys = gl.allocate_shared_memory(kind, [STAGES, BN, D], key_desc.layout)
        values = gl.allocate_shared_memory(kind, [STAGES, BN, DV], value_desc.layout)
        first_beside, second_beside, beside = first, second, keys
        if R > 0:
            first_beside = gl.allocate_shared_memory(kind, [64, R], beside_desc.layout)
            second_beside = gl.allocate_shared_memory(kind, [64, R], beside_desc.layout)
            beside = gl.allocate_shared_memory(kind, [STAGES, BN, R], beside_desc.layout)
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
                (_compute, (q_ptr, out_ptr, sink_ptr, first, first_beside, keys, beside, values, key_full, key_free,
                            value_full, value_free, start, local, queries, kv_len, kv_head, tiles, scale, 0,
                            H, GROUP, D, R, DV, BG, BN, SINKS, STAGES)),
                (_compute, (q_ptr, out_ptr, sink_ptr, second, second_beside, keys, beside, values, key_full, key_free,
                            value_full, value_free, start, local, queries, kv_len, kv_head, tiles, scale, 1,
                            H, GROUP, D, R, DV, BG, BN, SINKS, STAGES)),
                (_copy, (key_desc, beside_desc, value_desc, keys, beside, values, key_full, key_free, value_full,
                         value_free, row, place, tiles, R, BN, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def attend_hopper(
    q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext, arranged: tuple[Tensor, Tensor],
    gathered: Gathered, stages: int = 2,
) -> None:  # fmt: skip
    """q [T, H, D + R] -> out [T, H, DV], for the sequences with several new tokens; arranged for ROWS rows."""
    at, tiles = arranged
    dim, rest, wide = gathered.sizes
    heads, total = gathered.keys.shape[:2]
    group = q.shape[1] // heads
    packed = pow2(group)
    keys = 64 if wide > 128 else 128  # of a tile; `gathered.py` aligns sequences to 128

    def tiled(rows: Tensor) -> TensorDescriptor:
        shape = [keys, rows.shape[-1]]
        layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
        return TensorDescriptor.from_tensor(rows.view(-1, rows.shape[-1]), shape, layout)

    values = tiled(gathered.values)
    _hopper_kernel[(heads * tiles.shape[0],)](
        q, tiled(gathered.keys), values if gathered.beside is None else tiled(gathered.beside), values, tiles, at,
        ctx.query_start, ctx.kv_len, spec.sinks, out, total, heads, spec.scale * 1.4426950408889634,
        H=spec.heads, GROUP=group, D=dim, R=rest, DV=wide, BQ=ROWS // packed, BG=packed, BN=keys,
        SINKS=spec.sinks is not None, STAGES=stages, num_warps=4, maxnreg=168,
    )  # fmt: skip
