"""Few rows (up to 64) times a 2:4 matrix. Owns: the kernel that streams its packed form through sparse tensor cores.

A program makes SIDE times 16 rows of the weight (and those that gate them). As many warps stand side by side and read
the same activations, DEEP of them take the blocks of K in turn, and their sums are added in the order of warps. Weights
go from memory into the registers that a multiplication reads.
Must not know: who laid out the activations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.common import INTERPRETED, act_parts, begin, gated_act, plain_act, prefetch, wait
from tokenmill.kernels.triton.pruned.activations import tiles_of
from tokenmill.kernels.triton.pruned.layout import TILE, PrunedMatrix
from tokenmill.kernels.triton.pruned.sparse_cores import multiply_block

FEW = 64
"""The most rows."""
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}
_PROGRAMS, _WARPS = 128, 132 * 32
"""Programs, and warps, that fill a device."""


@triton.jit
def _four(pointers, real, EVERY: tl.constexpr):
    """Four neighbouring words of each thread; EVERY: all are real."""
    if EVERY:
        words = tl.load(pointers[:, None] + tl.arange(0, 4)[None, :])
    else:
        words = tl.load(pointers[:, None] + tl.arange(0, 4)[None, :], mask=real[:, None], other=0)
    even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _weights(kept_ptr, place_ptr, tile, block, lane, BLOCKS: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """The words of each warp's tile and block: of eight rows, of the other eight, and where they belong. A last warp
    may have no block left: its weights are zero."""
    real = block < BLOCKS
    rows = kept_ptr + (tile * 16 + lane // 4).to(tl.int64) * (BLOCKS * 16) + block * 16 + lane % 4 * 4
    places = place_ptr + (tile.to(tl.int64) * BLOCKS + block) * (32 * WORDS) + lane
    w, v = _four(rows, real, EVEN), _four(rows + 8 * BLOCKS * 16, real, EVEN)
    if EVEN:
        e = (tl.load(places),)
        if WORDS == 2:
            e = e + (tl.load(places + 32),)
    else:
        e = (tl.load(places, mask=real, other=0x44444444),)
        if WORDS == 2:
            e = e + (tl.load(places + 32, mask=real, other=0x44444444),)
    return w, v, e


@triton.jit
def _whole(parts, COUNT: tl.constexpr, LEVELS: tl.constexpr, DEEP: tl.constexpr, SIDE: tl.constexpr):
    """COUNT = 2 ** LEVELS sums of every thread -> [SIDE * 32, COUNT], added over the warps behind each other."""
    for level in tl.static_range(LEVELS):
        half = ()
        for i in tl.static_range(COUNT >> (level + 1)):
            half = half + (tl.join(parts[i], parts[i + (COUNT >> (level + 1))]),)
        parts = half
    return tl.sum(tl.reshape(parts[0], (DEEP, SIDE * 32, COUNT)), axis=0)


@triton.jit(do_not_specialize=["M"])
def _few_kernel(
    x_ptr, step_ptr, kept_ptr, place_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, M, N, BLOCKS: tl.constexpr,
    SIDE: tl.constexpr, DEEP: tl.constexpr, TILES: tl.constexpr, LEVELS: tl.constexpr, TYPE: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, RESIDUAL: tl.constexpr,
    UNROLL: tl.constexpr, WIDE: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, kept and places as words of 32 bits."""
    begin(PDL)
    thread = tl.arange(0, DEEP * SIDE * 32)
    lane, deep, first = thread % 32, thread // (32 * SIDE), tl.program_id(0) * SIDE
    tile = first + thread // 32 % SIDE
    WORDS: tl.constexpr = 2 if TYPE == "e4m3" else 1
    EVEN: tl.constexpr = BLOCKS % DEEP == 0
    if PREFETCH:
        line = tl.arange(0, SIDE * 16)[:, None] * (BLOCKS * 16) + tl.arange(0, 4)[None, :] * 32
        ahead = tl.minimum(line, SIDE * 16 * BLOCKS * 16 - 1)
        prefetch(kept_ptr + first.to(tl.int64) * (256 * BLOCKS) + ahead)
        if GATED:
            prefetch(kept_ptr + (first + N // 16).to(tl.int64) * (256 * BLOCKS) + ahead)
    zero = tl.zeros((DEEP * SIDE * 32,), dtype=tl.float32)
    sums = ()
    for _ in tl.static_range(4 * TILES):
        sums = sums + (zero,)
    ups = sums
    wait(PDL)
    for turn in tl.range(0, (BLOCKS + DEEP - 1) // DEEP, loop_unroll_factor=UNROLL):
        block = turn * DEEP + deep
        w, v, e = _weights(kept_ptr, place_ptr, tile, block, lane, BLOCKS, WORDS, EVEN)
        if GATED:
            w_up, v_up, e_up = _weights(kept_ptr, place_ptr, tile + N // 16, block, lane, BLOCKS, WORDS, EVEN)
        new, new_up = (), ()
        for i in tl.static_range(TILES):
            at = x_ptr + ((tl.minimum(block, BLOCKS - 1) * TILES + i) * 32 + lane) * (8 * WORDS)
            b = _four(at, True, True) + _four(at + 4, True, True)
            if WORDS == 2:
                b = b + _four(at + 8, True, True) + _four(at + 12, True, True)
            old = (sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3])
            c = multiply_block(old, w, v, e, b, TYPE, WIDE)
            new = new + (c[0], c[1], c[2], c[3])
            if GATED:
                old = (ups[4 * i], ups[4 * i + 1], ups[4 * i + 2], ups[4 * i + 3])
                c = multiply_block(old, w_up, v_up, e_up, b, TYPE, WIDE)
                new_up = new_up + (c[0], c[1], c[2], c[3])
        sums = new
        if GATED:
            ups = new_up
    l, q = tl.arange(0, SIDE * 32)[:, None], tl.arange(0, 4 * TILES)[None, :]
    n = (first + l // 32) * 16 + l % 32 // 4 + q % 4 // 2 * 8
    m = q // 4 * 8 + l % 4 * 2 + q % 2
    real = m < M
    y = _whole(sums, 4 * TILES, LEVELS, DEEP, SIDE)
    if SCALE:
        step = tl.load(step_ptr + m, mask=real, other=0.0)
        y *= step * tl.load(scale_ptr + n)
    if BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)
    if GATED:
        up = _whole(ups, 4 * TILES, LEVELS, DEEP, SIDE)
        if SCALE:
            up *= step * tl.load(scale_ptr + N + n)
        if BIAS:
            up += tl.load(bias_ptr + N + n).to(tl.float32)
        y = gated_act(y, up, ACT)
    else:
        y = plain_act(y, ACT)
    place = m.to(tl.int64) * N + n
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=real)


def few_rows(
    x: Tensor, rows: int, steps: Tensor | None, weight: PrunedMatrix, act: str | None, residual: Tensor | None,
    dtype: torch.dtype, *, pdl: bool, config: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """x: that many rows, laid out by activations.py, and their scales -> residual + act(x @ weight.T + bias) in dtype.
    config: warps side by side, warps behind each other, and blocks of a warp that are read at once."""
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    blocks = weight.shape[1] * weight.stored.element_size() // 128
    tiles = tiles_of(rows)
    side, deep, unroll = config or default_config(width // TILE, blocks, 2 * tiles if gated else tiles)
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    _few_kernel[(width // (TILE * side),)](
        x.view(torch.int32), steps, weight.kept.view(torch.int32), weight.places, weight.scales, weight.bias, residual,
        out, rows, width, BLOCKS=blocks, SIDE=side, DEEP=deep, TILES=tiles, LEVELS=(4 * tiles).bit_length() - 1,
        TYPE=TYPES[weight.dtype], ACT=kind, GATED=gated, BIAS=weight.bias is not None, SCALE=steps is not None,
        RESIDUAL=residual is not None, UNROLL=unroll, WIDE=INTERPRETED, PREFETCH=pdl, PDL=pdl, num_warps=side * deep,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def default_config(tiles: int, blocks: int, sums: int) -> tuple[int, int, int]:
    """Where a warp has sums of more than two tiles, as many warps side by side as leave a program for each
    multiprocessor; behind each other as many as fill the device, each with four blocks at least. (Of more than one tile
    of activations nothing was measured yet.)"""
    side = 1
    while sums > 2 and side < 8 and tiles % (2 * side) == 0 and tiles >= 2 * side * _PROGRAMS:
        side *= 2
    deep = (16 if sums <= 4 else 8) // side
    if INTERPRETED:
        return side, min(2, deep), 1
    while deep > 1 and side * deep > 2 and (deep * tiles > _WARPS or deep * 4 > blocks):
        deep //= 2
    return side, deep, 2
