"""Few rows (1 to 64) times a matrix on Hopper. Owns: the kernel that keeps memory busy from one product to the next.

One program per multiprocessor: a warp copies weights through the copy engine into a ring of shared memory, and begins
before it waits for the kernel before, so that by the time the activations exist up to 200 KB per multiprocessor (five
microseconds of the whole memory) lie there. A warp group multiplies. The matrix is cut evenly by (tile of rows, piece
of K), so a program may begin and end inside a tile; parts of a tile meet in scratch memory, and the program that
finishes last adds them in order. Not for the interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmill.kernels.triton.common import Scratch, act_parts, gated_act, plain_act, pow2

TILE = 64
"""Rows of the matrix per accumulator; a program has two: gate and up, or neighbours."""
BK = 128


@gluon.jit
def _first(program, base, rest):
    """The first unit of a program: units are dealt out evenly, the first `rest` programs have one more."""
    return program * base + gl.minimum(program, rest)


@gluon.jit
def _owner(unit, base, rest):
    """The program that has this unit."""
    long = rest * (base + 1)
    return gl.where(unit < long, unit // (base + 1), rest + (unit - long) // gl.maximum(base, 1))


@gluon.jit
def _feed(w_desc, x_desc, first_ring, second_ring, x_ring, full, free, begin, end, second,
          CHUNKS: gl.constexpr, BK: gl.constexpr, STEP: gl.constexpr,
          STAGES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The copying warp."""
    total: gl.constexpr = 2 * w_desc.block_type.nbytes + x_desc.block_type.nbytes
    early = gl.minimum(end - begin, STAGES)
    for i in range(early):
        row = (begin + i) // CHUNKS * STEP
        k = (begin + i) % CHUNKS * BK
        mbarrier.expect(full.index(i), total)
        tma.async_copy_global_to_shared(w_desc, [row, k], full.index(i), first_ring.index(i))
        tma.async_copy_global_to_shared(w_desc, [row + second, k], full.index(i), second_ring.index(i))
    if PDL:
        gdc_wait()
    for i in range(early):
        k = (begin + i) % CHUNKS * BK
        tma.async_copy_global_to_shared(x_desc, [0, k], full.index(i), x_ring.index(i))
    for i in range(early, end - begin):
        stage = i % STAGES
        row = (begin + i) // CHUNKS * STEP
        k = (begin + i) % CHUNKS * BK
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), total)
        tma.async_copy_global_to_shared(w_desc, [row, k], full.index(stage), first_ring.index(stage))
        tma.async_copy_global_to_shared(w_desc, [row + second, k], full.index(stage), second_ring.index(stage))
        tma.async_copy_global_to_shared(x_desc, [0, k], full.index(stage), x_ring.index(stage))


@gluon.jit
def _finish(y, n, m, M, N, residual_ptr, out_ptr, RESIDUAL: gl.constexpr):
    """y [TILE, BM] and the residual go to out[m, n]."""
    place = m[None, :] * N + n[:, None]
    keep = (n < N)[:, None] & (m < M)[None, :]
    if RESIDUAL:
        y += gl.load(residual_ptr + place, mask=keep, other=0.0).to(gl.float32)
    gl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=keep)


@gluon.jit
def _multiply(
    first_ring, second_ring, x_ring, full, free, bias_ptr, residual_ptr, out_ptr, part_ptr, count_ptr,
    M, N, begin, end, base, rest, program,
    CHUNKS: gl.constexpr, BM: gl.constexpr, TILE: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The multiplying warps."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    SIZE: gl.constexpr = TILE * BM
    m = gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    spot = row[:, None] * BM + m[None, :]
    unit = begin
    i = 0
    while unit < end:
        tile = unit // CHUNKS
        low = unit % CHUNKS
        high = gl.minimum(CHUNKS, low + end - unit)
        a = gl.zeros([TILE, BM], gl.float32, LAYOUT)
        b = gl.zeros([TILE, BM], gl.float32, LAYOUT)
        for _ in range(low, high):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            x = x_ring.index(stage).permute((1, 0))
            a = warpgroup_mma(first_ring.index(stage), x, a)
            b = warpgroup_mma(second_ring.index(stage), x, b)
            mbarrier.arrive(free.index(stage), count=1)
            i += 1
        unit += high - low
        last = True
        if high - low < CHUNKS:
            # A program has at most two parts of tiles: one that begins its tile, one that does not.
            head = _owner(tile * CHUNKS, base, rest)
            parts = _owner(tile * CHUNKS + CHUNKS - 1, base, rest) - head + 1
            mine = part_ptr + (program * 2 + gl.where(low == 0, 1, 0)).to(gl.int64) * (2 * SIZE)
            gl.store(mine + spot, a, cache_modifier=".cg")
            gl.store(mine + SIZE + spot, b, cache_modifier=".cg")
            gl.thread_barrier()
            last = gl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == parts - 1
            if last:
                gl.store(count_ptr + tile, 0)
                a = gl.zeros([TILE, BM], gl.float32, LAYOUT)
                b = gl.zeros([TILE, BM], gl.float32, LAYOUT)
                for other in range(parts):
                    theirs = part_ptr + ((head + other) * 2 + gl.where(other == 0, 1, 0)).to(gl.int64) * (2 * SIZE)
                    a += gl.load(theirs + spot, cache_modifier=".cg")
                    b += gl.load(theirs + SIZE + spot, cache_modifier=".cg")
        if last:
            if GATED:
                n = tile * TILE + row
                if BIAS:
                    a += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
                    b += gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
                _finish(gated_act(a, b, ACT), n, m, M, N, residual_ptr, out_ptr, RESIDUAL)
            else:
                n = tile * (2 * TILE) + row
                if BIAS:
                    a += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
                    b += gl.load(bias_ptr + n + TILE, mask=n + TILE < N, other=0.0).to(gl.float32)[:, None]
                _finish(plain_act(a, ACT), n, m, M, N, residual_ptr, out_ptr, RESIDUAL)
                _finish(plain_act(b, ACT), n + TILE, m, M, N, residual_ptr, out_ptr, RESIDUAL)


@gluon.jit(do_not_specialize=["M", "base", "rest"])
def _stream_kernel(
    w_desc, x_desc, bias_ptr, residual_ptr, out_ptr, part_ptr, count_ptr, M, N, base, rest,
    CHUNKS: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, TILE: gl.constexpr,
    ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    program = gl.program_id(0)
    begin = _first(program, base, rest)
    end = _first(program + 1, base, rest)
    kind: gl.constexpr = w_desc.dtype
    first_ring = gl.allocate_shared_memory(kind, [STAGES, TILE, BK], w_desc.layout)
    second_ring = gl.allocate_shared_memory(kind, [STAGES, TILE, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(kind, [STAGES, BM, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    if GATED:
        second = N
        step: gl.constexpr = TILE
    else:
        second = TILE
        step: gl.constexpr = 2 * TILE
    gl.warp_specialize(
        [
            (_multiply, (first_ring, second_ring, x_ring, full, free, bias_ptr, residual_ptr, out_ptr, part_ptr,
                         count_ptr, M, N, begin, end, base, rest, program,
                         CHUNKS, BM, TILE, ACT, GATED, BIAS, RESIDUAL, STAGES, PDL)),
            (_feed, (w_desc, x_desc, first_ring, second_ring, x_ring, full, free, begin, end, second,
                     CHUNKS, BK, step, STAGES, PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip


def stream(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None, residual: Tensor | None, *,
    scratch: Scratch, pdl: bool, programs: int, stages: int,
) -> Tensor:  # fmt: skip
    """x [M <= 64, K], weight [N, K] -> residual + act(x @ weight.T + bias); programs: multiprocessors to fill;
    stages: of the ring, each (128 + M) * 256 bytes."""
    rows, inner = x.shape
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_m = max(16, pow2(rows))
    chunks = -(-inner // BK)
    tiles = -(-width // (TILE if gated else 2 * TILE))
    programs = min(programs, tiles * chunks)
    assert tiles <= scratch.num_counters
    assert programs * 4 * TILE * block_m <= scratch.floats
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    w_shape, x_shape = [TILE, BK], [block_m, BK]
    layout = gl.NVMMASharedLayout.get_default_for(w_shape, gl.bfloat16)
    x_layout = gl.NVMMASharedLayout.get_default_for(x_shape, gl.bfloat16)
    _stream_kernel[(programs,)](
        TensorDescriptor.from_tensor(weight, w_shape, layout), TensorDescriptor.from_tensor(x, x_shape, x_layout),
        bias, residual, out, scratch.partial(x.device), scratch.counters(x.device), rows, width,
        tiles * chunks // programs, tiles * chunks % programs,
        CHUNKS=chunks, BM=block_m, BK=BK, TILE=TILE, ACT=kind, GATED=gated, BIAS=bias is not None,
        RESIDUAL=residual is not None, STAGES=stages, PDL=pdl, num_warps=4, maxnreg=128, launch_pdl=pdl,
    )  # fmt: skip
    return out
