"""Few rows (up to 64) times a 2:4 matrix. Owns: the kernel that streams its packed form through sparse tensor cores.

A program makes 16 rows of the weight (and the 16 that gate them), its warps take the blocks of K in turn, and their
sums are added in the order of warps. Weights go from memory into the registers that a multiplication reads.
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
_WARPS = 132 * 32
"""Warps that fill a device."""


@triton.jit
def _four(pointers):
    """Four neighbouring words of each thread."""
    words = tl.load(pointers[:, None] + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _four_or_none(pointers, real):
    words = tl.load(pointers[:, None] + tl.arange(0, 4)[None, :], mask=real[:, None], other=0)
    even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _weights(kept_ptr, place_ptr, tile, block, lane, BLOCKS: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """A tile's words of each warp's block: of eight rows, of the other eight, and where they belong."""
    rows = kept_ptr + (tile * 16 + lane // 4).to(tl.int64) * (BLOCKS * 16) + block * 16 + lane % 4 * 4
    places = place_ptr + (tile.to(tl.int64) * BLOCKS + block) * (32 * WORDS) + lane
    if EVEN:
        w, v = _four(rows), _four(rows + 8 * BLOCKS * 16)
        e = (tl.load(places),)
        if WORDS == 2:
            e = e + (tl.load(places + 32),)
    else:  # a last warp may have no block left: of weights that are zero
        real = block < BLOCKS
        w, v = _four_or_none(rows, real), _four_or_none(rows + 8 * BLOCKS * 16, real)
        e = (tl.load(places, mask=real, other=0x44444444),)
        if WORDS == 2:
            e = e + (tl.load(places + 32, mask=real, other=0x44444444),)
    return w, v, e


@triton.jit
def _whole(parts, COUNT: tl.constexpr, LEVELS: tl.constexpr, WARPS: tl.constexpr):
    """COUNT = 2 ** LEVELS sums of every thread -> [32, COUNT], added over warps."""
    for level in tl.static_range(LEVELS):
        half = ()
        for i in tl.static_range(COUNT >> (level + 1)):
            half = half + (tl.join(parts[i], parts[i + (COUNT >> (level + 1))]),)
        parts = half
    return tl.sum(tl.reshape(parts[0], (WARPS, 32, COUNT)), axis=0)


@triton.jit(do_not_specialize=["M"])
def _few_kernel(
    x_ptr, step_ptr, kept_ptr, place_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, M, N, BLOCKS: tl.constexpr,
    WARPS: tl.constexpr, TILES: tl.constexpr, LEVELS: tl.constexpr, TYPE: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, RESIDUAL: tl.constexpr, UNROLL: tl.constexpr,
    WIDE: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, kept and places as words of 32 bits."""
    begin(PDL)
    thread = tl.arange(0, WARPS * 32)
    lane, warp, tile = thread % 32, thread // 32, tl.program_id(0)
    WORDS: tl.constexpr = 2 if TYPE == "e4m3" else 1
    EVEN: tl.constexpr = BLOCKS % WARPS == 0
    if PREFETCH:
        line = tl.arange(0, 16)[:, None] * (BLOCKS * 16) + tl.arange(0, 4)[None, :] * 32
        ahead = tl.minimum(line, 16 * BLOCKS * 16 - 1)
        prefetch(kept_ptr + tile.to(tl.int64) * (256 * BLOCKS) + ahead)
        if GATED:
            prefetch(kept_ptr + (tile + N // 16).to(tl.int64) * (256 * BLOCKS) + ahead)
    zero = tl.zeros((WARPS * 32,), dtype=tl.float32)
    sums = ()
    for _ in tl.static_range(4 * TILES):
        sums = sums + (zero,)
    ups = sums
    wait(PDL)
    for turn in tl.range(0, (BLOCKS + WARPS - 1) // WARPS, loop_unroll_factor=UNROLL):
        block = turn * WARPS + warp
        w, v, e = _weights(kept_ptr, place_ptr, tile, block, lane, BLOCKS, WORDS, EVEN)
        if GATED:
            w_up, v_up, e_up = _weights(kept_ptr, place_ptr, tile + N // 16, block, lane, BLOCKS, WORDS, EVEN)
        new, new_up = (), ()
        for i in tl.static_range(TILES):
            at = x_ptr + ((tl.minimum(block, BLOCKS - 1) * TILES + i) * 32 + lane) * (8 * WORDS)
            b = _four(at) + _four(at + 4)
            if WORDS == 2:
                b = b + _four(at + 8) + _four(at + 12)
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
    l, q = tl.arange(0, 32)[:, None], tl.arange(0, 4 * TILES)[None, :]
    n = tile * 16 + l // 4 + q % 4 // 2 * 8
    m = q // 4 * 8 + l % 4 * 2 + q % 2
    real = m < M
    y = _whole(sums, 4 * TILES, LEVELS, WARPS)
    if SCALE:
        step = tl.load(step_ptr + m, mask=real, other=0.0)
        y *= step * tl.load(scale_ptr + n)
    if BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)
    if GATED:
        up = _whole(ups, 4 * TILES, LEVELS, WARPS)
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
    dtype: torch.dtype, *, pdl: bool, config: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """x: that many rows, laid out by activations.py, and their scales -> residual + act(x @ weight.T + bias) in dtype.
    config: warps, and blocks of a warp that are read at once."""
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    blocks = weight.shape[1] * weight.stored.element_size() // 128
    tiles = tiles_of(rows)
    warps, unroll = config or default_config(width // TILE, blocks)
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    _few_kernel[(width // TILE,)](
        x.view(torch.int32), steps, weight.kept.view(torch.int32), weight.places, weight.scales, weight.bias, residual,
        out, rows, width, BLOCKS=blocks, WARPS=warps, TILES=tiles, LEVELS=(4 * tiles).bit_length() - 1,
        TYPE=TYPES[weight.dtype], ACT=kind, GATED=gated, BIAS=weight.bias is not None, SCALE=steps is not None,
        RESIDUAL=residual is not None, UNROLL=unroll, WIDE=INTERPRETED, PREFETCH=pdl, PDL=pdl, num_warps=warps,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def default_config(tiles: int, blocks: int) -> tuple[int, int]:
    """As many warps as fill the device, each with four blocks at least."""
    if INTERPRETED:
        return 2, 1
    warps = 16
    while warps > 2 and (warps * tiles > _WARPS or warps * 4 > blocks):
        warps //= 2
    return warps, 2
