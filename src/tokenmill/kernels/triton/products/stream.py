"""Few rows (2 to 64) times a matrix on Hopper. Owns: the kernel that reads a weight through the copy engine.

One warp copies: it keeps a ring of tiles of the weight and of the rows full, from one piece to the next, and asks for
the first tiles of the weight before it waits for the launch before it. The others multiply what lies there. No program
waits for another: what parts of K there are stay unadded, and the operation behind the product, which reads every
number anyway, adds them. (A program that adds up what others made is there 3 to 6 us longer than these, and so long
the next product cannot ask for its weight.) What adapters add is made meanwhile, by the launch behind (adapted.py).
Numbers have 16 bits, or both operands are float8, of which each row has a scale.
Must not know: layers. Not for the interpreter.
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

from tokenmill.kernels.triton.common import act_parts, begin, gated_act, multiprocessors, plain_act, pow2, wait
from tokenmill.kernels.triton.products.ways_by_shape import LINE, Cut
from tokenmill.kernels.triton.ring import for_rows, make_signs, results_layout, sums_layout

Scales = tuple[Tensor, Tensor]
"""What the rows of x and those of the weight are multiplied by, [M] and [N] float32."""
_REGISTERS = 128


@gluon.jit
def _first_of(program, pieces):
    """The first piece of a program; of the one behind the last: how many there are."""
    return (pieces.to(gl.int64) * program // gl.num_programs(0)).to(gl.int32)


@gluon.jit
def _ask_weight(
    w_desc, bar, tile, n, column, N, BN: gl.constexpr, HEIGHT: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """Copy a step's tile of the weight, of a gated one two halves, box by box. (What a tile has beyond its height stays
    what it was, and nobody reads its sums.)"""
    BOX: gl.constexpr = w_desc.block_type.shape[0]
    for at in gl.static_range(0, HEIGHT, BOX):
        tma.async_copy_global_to_shared(w_desc, [n + at, column], bar, tile.slice(at, BOX, 0))
        if GATED:
            tma.async_copy_global_to_shared(w_desc, [N + n + at, column], bar, tile.slice(BN // 2 + at, BOX, 0))


@gluon.jit
def _copy(
    x_desc, w_desc, x_ring, w_ring, full, free, ready_ptr, N, pieces, steps,
    BK: gl.constexpr, BN: gl.constexpr, HEIGHT: gl.constexpr, GATED: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, BYTES: gl.constexpr, SHADE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The copying warp. BYTES: all that comes for a step. SHADE: tell the next launch when the rows are there."""
    first = _first_of(gl.program_id(0), pieces)
    count = (_first_of(gl.program_id(0) + 1, pieces) - first) * steps
    for i in gl.static_range(STAGES):
        if i < count:
            piece = first + i // steps
            column = (piece % SPLIT * steps + i % steps) * BK
            mbarrier.expect(full.index(i), BYTES)
            _ask_weight(w_desc, full.index(i), w_ring.index(i), piece // SPLIT * HEIGHT, column, N, BN, HEIGHT, GATED)
    wait(PDL)
    if SHADE:
        if gl.program_id(0) == 0:
            gl.atomic_xchg(ready_ptr, 1, sem="release")
    for i in gl.static_range(STAGES):
        if i < count:
            column = ((first + i // steps) % SPLIT * steps + i % steps) * BK
            tma.async_copy_global_to_shared(x_desc, [0, column], full.index(i), x_ring.index(i))
    for i in range(STAGES, count):
        stage = i % STAGES
        piece = first + i // steps
        column = (piece % SPLIT * steps + i % steps) * BK
        mbarrier.wait(free.index(stage), (i // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BYTES)
        _ask_weight(
            w_desc, full.index(stage), w_ring.index(stage), piece // SPLIT * HEIGHT, column, N, BN, HEIGHT, GATED
        )
        tma.async_copy_global_to_shared(x_desc, [0, column], full.index(stage), x_ring.index(stage))


@gluon.jit
def _sum_steps(
    x_ring, w_ring, full, free, done, count,
    BM: gl.constexpr, BN: gl.constexpr, SUMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sums [BN, BM] over the next steps of the ring; done: how many came before."""
    acc = gl.zeros([BN, BM], gl.float32, SUMS)
    for step in range(done, done + count):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        acc = warpgroup_mma(w_ring.index(stage), x_ring.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > done)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((done + count - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _write(
    acc, step_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, n, part, M, N,
    BM: gl.constexpr, BN: gl.constexpr, HEIGHT: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr,
    BITS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """A tile's results from its sums [BN, BM]; n: its first column of the output. part: of K, of which the first one
    has the bias."""
    WIDTH: gl.constexpr = BN // 2 if GATED else BN
    MADE: gl.constexpr = results_layout(gl.num_warps())
    if BITS == 8:
        row = gl.arange(0, BM, layout=gl.SliceLayout(0, sums_layout(BM, gl.num_warps(), BITS)))
        acc *= for_rows(scale_ptr, n, N, BN, BM, GATED, gl.num_warps(), BITS)
        acc *= gl.load(step_ptr + row, mask=row < M, other=0.0)[None, :]
    if BIAS:
        acc += gl.where(part == 0, for_rows(bias_ptr, n, N, BN, BM, GATED, gl.num_warps(), BITS), 0.0)
    if GATED:
        both = acc.reshape([2, WIDTH, BM])
        if BN < 128:  # else a thread has both numbers
            BOTH: gl.constexpr = gl.BlockedLayout([2, 4, 1], [1, 8, 4], [1, 1, gl.num_warps()], [1, 0, 2])
            both = gl.convert_layout(both, BOTH)
        gate, up = both.permute(1, 2, 0).split()
        y = gated_act(gate, up, ACT)
    else:
        y = plain_act(acc, ACT)
    if not RESIDUAL:
        y = y.to(out_ptr.dtype.element_ty)  # half as much to move
    y = gl.convert_layout(y, MADE)
    column = n + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, MADE))
    line = gl.arange(0, BM, layout=gl.SliceLayout(0, MADE))
    place = line.to(gl.int64)[None, :] * N + column[:, None]
    keep = (column < gl.minimum(n + HEIGHT, N))[:, None] & (line < M)[None, :]
    if RESIDUAL:
        y += gl.load(residual_ptr + place, mask=keep, other=0.0).to(gl.float32)
    gl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=keep)


@gluon.jit
def _multiply(
    x_ring, w_ring, full, free, step_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, M, N, pieces, steps,
    BM: gl.constexpr, BN: gl.constexpr, HEIGHT: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: one piece after the other."""
    BITS: gl.constexpr = w_ring.dtype.primitive_bitwidth
    SUMS: gl.constexpr = sums_layout(BM, gl.num_warps(), BITS)
    first = _first_of(gl.program_id(0), pieces)
    wait(PDL)
    for piece in range(first, _first_of(gl.program_id(0) + 1, pieces)):
        acc = _sum_steps(x_ring, w_ring, full, free, (piece - first) * steps, steps, BM, BN, SUMS, STAGES)
        part = piece % SPLIT
        _write(acc, step_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr + part.to(gl.int64) * M * N,
               piece // SPLIT * HEIGHT, part, M, N, BM, BN, HEIGHT, ACT, GATED, BITS, BIAS, RESIDUAL)  # fmt: skip


@gluon.jit(do_not_specialize=["M", "pieces", "steps"])
def _stream_kernel(
    x_desc, w_desc, step_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, ready_ptr, M, N, pieces, steps,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, HEIGHT: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, SHADE: gl.constexpr,
    BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BYTES: of a row in a step."""
    begin(PDL)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    full, free = make_signs(STAGES, 1)
    gl.warp_specialize(
        [
            (_multiply, (x_ring, w_ring, full, free, step_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, M, N, pieces,
                         steps, BM, BN, HEIGHT, ACT, GATED, BIAS, RESIDUAL, SPLIT, STAGES, PDL)),
            (_copy, (x_desc, w_desc, x_ring, w_ring, full, free, ready_ptr, N, pieces, steps,
                     BK, BN, HEIGHT, GATED, SPLIT, STAGES, BYTES * (BM + (2 * HEIGHT if GATED else HEIGHT)), SHADE,
                     PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip


def stream(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None, residual: Tensor | None, *, pdl: bool, cut: Cut,
    ready: Tensor | None = None, scales: Scales | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """x [M <= 64, K], weight [N, K] (`may_stream`) -> residual + act(x @ weight.T + bias) [M, N] in dtype (x's own);
    cut in parts, these in float32 [parts, M, N], without a residual. ready: in parts, however many, and with room for
    one more behind them; made 1 when x is there, for a next launch that does not wait for this one, but ends after it.
    scales: those of float8."""
    rows, inner = x.shape
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_n, height, split, stages = cut
    shade = ready is not None
    assert (split == 1 and not shade) or (act is None and residual is None)
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.contiguous()
    block_m, box = max(16, pow2(rows)), min(64, height & -height)
    pieces, columns = -(-width // height) * split, LINE // x.element_size()
    whole = split == 1 and not shade
    shape, made = ((rows, width), dtype or x.dtype) if whole else ((split + shade, rows, width), torch.float32)
    out = torch.empty(shape, dtype=made, device=x.device)
    _stream_kernel[(min(pieces, multiprocessors()),)](
        _described(x, block_m), _described(weight, box), *(scales or (None, None)), bias, residual, out, ready, rows,
        width, pieces, -(-inner // (columns * split)), BM=block_m, BN=block_n, BK=columns, HEIGHT=height, ACT=kind,
        GATED=gated, BIAS=bias is not None, RESIDUAL=residual is not None, SPLIT=split,
        STAGES=stages, SHADE=shade, BYTES=LINE, PDL=pdl, num_warps=4, maxnreg=_REGISTERS, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _described(matrix: Tensor, rows: int) -> TensorDescriptor:
    """What the copying warp reads, in tiles of so many rows."""
    columns, kind = LINE // matrix.element_size(), gl.bfloat16 if matrix.element_size() == 2 else gl.float8e4nv
    return TensorDescriptor.from_tensor(
        matrix, [rows, columns], gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    )
