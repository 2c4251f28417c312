"""What adapters do to products: down to a few lanes, up again behind the sum (compute/adapters.py has the formula).

Both kernels run over blocks of tokens and, within one, over the adapters that its tokens have: each is read once for a
block, and a block without any ends at once. So one grid serves every mixture, and a recording holds for all of them.
Long sums are split; the second kernel adds the parts, and does what follows the product: activation and residual.
Steps of few tokens have a way of their own (adapted.py).
Must not know: models, how adapters got into their slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.kernels.triton.common import act_parts, begin, gated_act, plain_act, pow2, wait

FEW = 64
"""Tokens up to which a product waits for memory, not for arithmetic."""
_TILE, _WARPS = (32, 128), 4
"""Tokens and columns of a program that carries up, of many tokens; and its warps."""
_SPLITS = 4
"""How many programs share a sum of many tokens on the way down."""
_NONE = tl.constexpr(1 << 30)
MOST_PARTS = 4


def splits_of(tokens: int, inputs: int, *, steady: bool) -> int:
    """How many programs share a sum: a step of few tokens has nothing else to keep a GPU busy with."""
    most = 8 if steady else 16 if tokens <= FEW else _SPLITS
    return max(1, min(most, inputs // 256))


@triton.jit
def _next_slot(slots, after):
    """The lowest slot above `after`, or _NONE."""
    return tl.min(tl.where(slots > after, slots, _NONE))


@triton.jit
def shrink_rows(
    x_ptr, source, down_ptr, ranks_ptr, low, target, slots, first, K, K_EACH, x_stride, parts,
    LANES: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Rows `target` of low = down @ x[source], entries first .. first + K_EACH of the sum, for the slots [BM] of
    these rows."""
    slot = _next_slot(slots, 0)
    while slot < _NONE:
        lanes = tl.load(ranks_ptr + slot) * parts
        down = down_ptr + slot.to(tl.int64) * K * LANES
        for l0 in range(0, lanes, BL):
            lane = l0 + tl.arange(0, BL)
            acc = tl.zeros((BM, BL), dtype=tl.float32)
            for k0 in range(0, K_EACH, BK):
                k = first + k0 + tl.arange(0, BK)
                inside = (k < K) & (k < first + K_EACH)
                mine = (slots == slot)[:, None] & inside[None, :]
                x = tl.load(x_ptr + source[:, None].to(tl.int64) * x_stride + k[None, :], mask=mine, other=0.0)
                # All lanes: a mask by the adapter's own rank would keep loads from running ahead.
                w = tl.load(down + k[:, None] * LANES + lane[None, :],
                            mask=inside[:, None] & (lane < LANES)[None, :], other=0.0)  # fmt: skip
                if IEEE:
                    acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
                else:
                    acc = tl.dot(x, w, acc)
            tl.store(low + target[:, None] * LANES + lane[None, :], acc,
                     mask=(slots == slot)[:, None] & (lane < lanes)[None, :])  # fmt: skip
        slot = _next_slot(slots, slot)


@triton.jit
def _shrink_kernel(
    x_ptr, down_ptr, ranks_ptr, slots_ptr, low_ptr, T, K, K_EACH, x_stride, parts,
    LANES: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, IEEE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    real = t < T
    slots = tl.load(slots_ptr + t, mask=real, other=0)  # nothing that runs behind the embedding writes these
    wait(PDL)
    low = low_ptr + tl.program_id(1).to(tl.int64) * T * LANES
    shrink_rows(x_ptr, t, down_ptr, ranks_ptr, low, t, slots, tl.program_id(1) * K_EACH, K, K_EACH, x_stride, parts,
                LANES, BM, BK, BL, IEEE)  # fmt: skip


@triton.jit
def carried(
    low_ptr, up_ptr, ranks_ptr, slots, t, T, n, ok, part, most_rank, N,
    SPLITS: tl.constexpr, LANES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    IEEE: tl.constexpr,
):  # fmt: skip
    """up @ low of these tokens' adapters, for columns n of one part -> [BM, BN]."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    slot = _next_slot(slots, 0)
    while slot < _NONE:
        rank = tl.load(ranks_ptr + slot)
        up = up_ptr + slot.to(tl.int64) * most_rank * N
        for r0 in range(0, rank, BR):
            r = r0 + tl.arange(0, BR)
            mine = (slots == slot)[:, None] & (r < rank)[None, :]
            low = tl.zeros((BM, BR), dtype=tl.float32)
            for split in range(SPLITS):
                own = low_ptr + tl.cast(split, tl.int64) * T * LANES
                low += tl.load(own + (t[:, None] * LANES + part * rank + r[None, :]), mask=mine, other=0.0)
            w = tl.load(up + r[:, None].to(tl.int64) * N + n[None, :],
                        mask=(r < rank)[:, None] & ok[None, :], other=0.0)  # fmt: skip
            if IEEE:
                acc = tl.dot(low, w.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(low.to(w.dtype), w, acc)
        slot = _next_slot(slots, slot)
    return acc


@triton.jit
def _adapted(y, gains_ptr, shifts_ptr, slots, n, ok, N, GAINS: tl.constexpr):
    """y * gain + shift where there are such."""
    if GAINS:
        at = slots[:, None].to(tl.int64) * N + n[None, :]
        mine = (slots > 0)[:, None] & ok[None, :]
        y = y * tl.load(gains_ptr + at, mask=mine, other=1.0) + tl.load(shifts_ptr + at, mask=mine, other=0.0)
    return y


@triton.jit
def part_of(
    tile, columns, WIDTH, border1, border2, border3, tiles1, tiles2, tiles3, PARTS: tl.constexpr, GATED: tl.constexpr
):
    """The part of a product's columns that a tile lies in, where the part begins and ends, and which of its tiles it
    is. No tile crosses a border; the partners of a gated product are found from the first half."""
    part = 0
    start = 0
    end = WIDTH
    if not GATED and PARTS > 1:
        part = (tile >= tiles1).to(tl.int32) + (tile >= tiles2).to(tl.int32) + (tile >= tiles3).to(tl.int32)
        before = tl.where(part == 0, 0, tl.where(part == 1, tiles1, tl.where(part == 2, tiles2, tiles3)))
        start = tl.where(part == 0, 0, tl.where(part == 1, border1, tl.where(part == 2, border2, border3)))
        end = tl.where(part == 0, border1, tl.where(part == 1, border2, tl.where(part == 2, border3, columns)))
        end = tl.minimum(end, columns)
        tile = tile - before
    return part, start, end, tile


@triton.jit
def _expand_kernel(
    y_ptr, low_ptr, up_ptr, ranks_ptr, slots_ptr, gains_ptr, shifts_ptr, residual_ptr, out_ptr,
    T, N, WIDTH, most_rank, border1, border2, border3, tiles1, tiles2, tiles3,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr, GAINS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, IEEE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, tile of columns); no tile crosses a border of parts. WIDTH: of the output."""
    begin(PDL)
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    real = t < T
    tile = tl.program_id(1)
    part, start, end, tile = part_of(tile, N, WIDTH, border1, border2, border3, tiles1, tiles2, tiles3, PARTS, GATED)
    n = start + tile * BN + tl.arange(0, BN)
    ok = n < end
    slots = tl.load(slots_ptr + t, mask=real, other=0)
    wait(PDL)
    both = real[:, None] & ok[None, :]
    at = t[:, None].to(tl.int64) * N + n[None, :]
    y = tl.load(y_ptr + at, mask=both, other=0.0).to(tl.float32)
    y = _adapted(y, gains_ptr, shifts_ptr, slots, n, ok, N, GAINS)
    y += carried(low_ptr, up_ptr, ranks_ptr, slots, t, T, n, ok, part, most_rank, N,
                  SPLITS, LANES, BM, BN, BR, IEEE)  # fmt: skip
    if GATED:
        other = tl.load(y_ptr + at + WIDTH, mask=both, other=0.0).to(tl.float32)
        other = _adapted(other, gains_ptr, shifts_ptr, slots, n + WIDTH, ok, N, GAINS)
        other += carried(low_ptr, up_ptr, ranks_ptr, slots, t, T, n + WIDTH, ok, PARTS - 1, most_rank, N,
                          SPLITS, LANES, BM, BN, BR, IEEE)  # fmt: skip
        y = gated_act(y, other, ACT)
    else:
        y = plain_act(y, ACT)
    to = t[:, None].to(tl.int64) * WIDTH + n[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + to, mask=both, other=0.0).to(tl.float32)
    tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=both)


def borders_of(site: AdapterSite) -> list[int]:
    """The three borders between parts; those that are not there lie at the end."""
    return [*site.borders[1:-1], *[site.columns] * (MOST_PARTS - site.parts)]


def tiles_of(site: AdapterSite, width: int) -> tuple[list[int], list[int]]:
    """These borders, and how many tiles of this width there are up to each and in all, where none crosses a border."""
    borders, tiles, total = borders_of(site), [], 0
    for start, end in zip((0, *borders), (*borders, site.columns), strict=True):
        total += triton.cdiv(end - start, width)
        tiles.append(total)
    return borders, tiles


def can_adapt(site: AdapterSite, x: Tensor) -> bool:
    """Do the kernels serve this product?"""
    return site.parts <= MOST_PARTS and site.down is not None and site.down.dtype == x.dtype and x.ndim == 2


def adapt(x: Tensor, site: AdapterSite, slots: Tensor, *, steady: bool, pdl: bool) -> Tensor:
    """down @ x of each token's adapter, in parts of the sum: [splits, T, lanes] float32."""
    assert site.down is not None
    tokens, lanes = x.shape[0], site.down.shape[2]
    splits = splits_of(tokens, site.inputs, steady=steady)
    each = -(-triton.cdiv(site.inputs, splits) // 64) * 64
    low = torch.empty((splits, tokens, lanes), dtype=torch.float32, device=x.device)
    block, stages = (16, 3) if steady or tokens <= FEW else (32, 3) if x.element_size() == 4 else (64, 4)
    _shrink_kernel[(triton.cdiv(tokens, block), splits)](
        x, site.down, site.ranks, slots, low, tokens, site.inputs, each, x.stride(0), site.parts,
        LANES=lanes, BM=block, BK=64, BL=min(64, pow2(lanes)),
        IEEE=x.dtype == torch.float32, PDL=pdl, num_warps=4, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    return low


def finish(y: Tensor, delta: Delta, act: str | None, residual: Tensor | None, *, steady: bool, pdl: bool) -> Tensor:
    """residual + act(y * gain + shift + up @ low); y [T, N] is the product."""
    site, low = delta.site, delta.low
    assert site.up is not None and low is not None
    kind, gated = act_parts(act)
    tokens, width = y.shape[0], site.columns // 2 if gated else site.columns
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    (block, columns), warps = ((16, 64), 4) if steady or tokens <= FEW else (_TILE, _WARPS)
    borders, tiles = tiles_of(site, columns)
    grid = triton.cdiv(tokens, block), triton.cdiv(width, columns) if gated or site.parts == 1 else tiles[-1]
    most = site.up.shape[1]
    _expand_kernel[grid](
        y, low, site.up, site.ranks, delta.slots, site.gains, site.shifts, residual, out,
        tokens, site.columns, width, most, *borders, *tiles[:3],
        PARTS=site.parts, SPLITS=low.shape[0], LANES=low.shape[2], GAINS=site.gains is not None,
        RESIDUAL=residual is not None, ACT=kind, GATED=gated, BM=block, BN=columns,
        BR=max(16, min(64, pow2(most))), IEEE=y.dtype == torch.float32, PDL=pdl, num_warps=warps,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
