"""Adapters in steps of few tokens. Owns: going down and up in one launch behind the product that they change.

The launch has programs that go down: an item is one part of the sum for some of the step's adapters. Others wait for
their end, add up the parts, and carry a tile of columns up: each adapter is read once by all programs together,
whichever rows have it. Those that go down come first and wait for no other program. Beside a product that streams its
weight (stream.py) all of this happens meanwhile: this launch begins with it, and is told by a sign when the rows are
there. Only who reads or ends the sum waits for the product: what adapters add is one part more, or this launch ends the
sum. (Nothing asks for adapters before the rows are there: with many of them that holds up the weight, and the rows.) A
row without an adapter costs only a check. Must not know: models, how adapters got into their slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.kernels.triton.common import (
    INTERPRETED,
    Scratch,
    act_parts,
    begin,
    gated_act,
    multiprocessors,
    plain_act,
    pow2,
    wait,
)
from tokenmill.kernels.triton.products.adapters import FEW, MOST_PARTS, part_of, tiles_of

_UP = 4096
"""Numbers of a tile on the way up."""
ROOM = 76 << 10
"""Shared memory of a program, with what the driver takes of it: tiles that are under way."""
_MOST_CUTS = 16
_LONG = 512
"""A cut of more entries is for programs of eight warps."""


# ---------------------------------------------------------------- which adapters a step has


@triton.jit
def adapters_of(slots, ranks, BM: tl.constexpr):
    """The different adapters of a step's rows: slot | rank << 16 of each [BM], and how many there are."""
    m = tl.arange(0, BM)
    before = (slots[:, None] == slots[None, :]) & (m[None, :] < m[:, None])
    first = (tl.sum(before.to(tl.int32), axis=1) == 0) & (slots > 0)
    place = tl.cumsum(first.to(tl.int32), 0) - 1
    here = first[None, :] & (place[None, :] == m[:, None])
    return tl.sum(tl.where(here, (slots | ranks << 16)[None, :], 0), axis=1), tl.sum(first.to(tl.int32), axis=0)


@triton.jit
def _one_of(adapters, place, BM: tl.constexpr):
    """The slot and the rank of one of them."""
    both = tl.sum(tl.where(tl.arange(0, BM) == place, adapters, 0), axis=0)
    return (both & 0xFFFF).to(tl.int64), both >> 16


# ---------------------------------------------------------------- down


@triton.jit
def _share(different, shrinkers, CUTS: tl.constexpr):
    """How many adapters an item has."""
    return tl.maximum(tl.cdiv(different, tl.maximum(shrinkers // CUTS, 1)), 1)


@triton.jit
def _items(different, shrinkers, CUTS: tl.constexpr):
    return CUTS * tl.cdiv(different, _share(different, shrinkers, CUTS))


@triton.jit
def go_down(
    x_ptr, x_stride, down_ptr, sums_ptr, down_count, slots, ranks, adapters, different, item, shrinkers, K,
    PARTS: tl.constexpr, LANES: tl.constexpr, LOW: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    EACH: tl.constexpr, CUTS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Items `item`, `item + shrinkers`, ...: sums[cut, m, part] = down @ x[m] over the cut's entries for a group of
    adapters, whose lanes lie side by side; LOW entries each, however many the adapter's rank fills. down_count: items
    that are done."""
    STEPS: tl.constexpr = EACH // BK
    m = tl.arange(0, BM)
    each = _share(different, shrinkers, CUTS)
    while item < _items(different, shrinkers, CUTS):
        cut = item % CUTS
        begin_at = item // CUTS * each
        count = tl.minimum(each, different - begin_at)
        for l0 in tl.range(0, count * LANES, BL, num_stages=1):
            column = l0 + tl.arange(0, BL)
            inside = column < count * LANES
            place = begin_at + column // LANES
            slot = tl.gather(adapters, tl.where(inside, place, 0), 0) & 0xFFFF
            slot = tl.max_constancy(tl.where(inside, slot, 0), [16])
            lane = column % LANES
            at = tl.max_contiguous(tl.multiple_of(slot.to(tl.int64) * K * LANES + lane, [16]), [16])
            acc = tl.zeros((BM, BL), dtype=tl.float32)
            for i in tl.range(0, STEPS, num_stages=DEEP + 1):
                k = cut * EACH + i * BK + tl.arange(0, BK)
                x = tl.load(
                    x_ptr + m[:, None] * x_stride + k[None, :],
                    mask=(slots > 0)[:, None] & (k < K)[None, :],
                    other=0.0,
                    cache_modifier=".cg",  # whoever has not waited must not read what an earlier kernel left near
                )
                # All lanes: a mask by the adapter's own rank would keep loads from running ahead.
                w = tl.load(down_ptr + at[None, :] + k[:, None] * LANES,
                            mask=(k < K)[:, None] & (slot > 0)[None, :], other=0.0)  # fmt: skip
                if WIDE:
                    acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
                else:
                    acc = tl.dot(x, w, acc)
            own = tl.maximum(ranks, 1)[:, None]
            to = lane[None, :] // own * LOW + lane[None, :] % own
            mine = (slot[None, :] == slots[:, None]) & (slot > 0)[None, :] & (lane[None, :] < PARTS * own)
            tl.store(sums_ptr + (cut * BM + m[:, None]) * (PARTS * LOW) + to, acc, mask=mine, cache_modifier=".cg")
        tl.debug_barrier()
        tl.atomic_add(down_count, 1, sem="release")
        item += shrinkers


@triton.jit
def _until(ptr, count):
    """Until so many have been counted there."""
    while tl.atomic_add(ptr, 0, sem="acquire") < count:
        pass


@triton.jit
def until_down(signs_ptr, different, shrinkers, programs, CUTS: tl.constexpr):
    """Until all items are down; the last of so many programs that has seen it takes all signs down."""
    if different > 0:
        _until(signs_ptr + 1, _items(different, shrinkers, CUTS))
        if tl.atomic_add(signs_ptr + 2, 1, sem="acq_rel") == programs - 1:
            for sign in tl.static_range(3):
                tl.store(signs_ptr + sign, 0)


# ---------------------------------------------------------------- up


@triton.jit
def up_tile(up_ptr, adapters, n, ok, most_rank, columns, chunk, r0, BR: tl.constexpr, CHUNK: tl.constexpr):
    """Of the adapters that one chunk has, from entry r0 of their ranks on: columns n [CHUNK, BN], and whose they are
    [CHUNK]."""
    k = tl.arange(0, CHUNK)
    both = tl.gather(adapters, chunk * (CHUNK // BR) + k // BR, 0)
    slot = both & 0xFFFF
    lane = r0 + k % BR
    w = tl.load(up_ptr + (slot.to(tl.int64) * most_rank + lane)[:, None] * columns + n[None, :],
                mask=(lane < both >> 16)[:, None] & ok[None, :], other=0.0)  # fmt: skip
    return w, slot


@triton.jit
def _times_low(acc, w, slot, every, slots, WIDE: tl.constexpr):
    """acc + the rows' sums, each row with its own adapter's, @ w."""
    low = tl.where((slot[None, :] == slots[:, None]) & (slot > 0)[None, :], every, 0.0)
    if WIDE:
        return tl.dot(low, w.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(low.to(w.dtype), w, acc)


@triton.jit
def _low(
    sums_ptr, slots, ranks, part, r0,
    PARTS: tl.constexpr, LOW: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """Entries r0 and on of down @ x of each row [BM, BR]: its cuts, as many asked for at once as registers hold."""
    AT_ONCE: tl.constexpr = max(1, 8192 // (BM * BR))
    m = tl.arange(0, BM)
    r = r0 + tl.arange(0, BR)
    mine = (slots > 0)[:, None]  # whole rows, so that a load takes four entries
    at = sums_ptr + m[:, None] * (PARTS * LOW) + part * LOW + r[None, :]
    low = tl.zeros((BM, BR), dtype=tl.float32)
    for first in tl.static_range(0, CUTS, AT_ONCE):
        cuts = ()
        for cut in tl.static_range(first, min(first + AT_ONCE, CUTS)):
            cuts += (tl.load(at + cut * (BM * PARTS * LOW), mask=mine, other=0.0, cache_modifier=".cg"),)
        for cut in tl.static_range(len(cuts)):
            low += cuts[cut]
    return tl.where(r[None, :] < ranks[:, None], low, 0.0)


@triton.jit
def come_up(
    first_w, first_slot, sums_ptr, up_ptr, slots, ranks, adapters, different, n, ok, part, most_rank, columns,
    PARTS: tl.constexpr, LOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    CHUNK: tl.constexpr, CUTS: tl.constexpr, WIDE: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """up @ down @ x of each row's adapter [BN, BM], for columns n of one part. first_w: what up_tile gives for the
    first chunk.

    The rows are on the left here: with the columns there these would be asynchronous products, whose operands Triton
    3.6 overwrites too early in two such loops of one program."""
    chunks = tl.cdiv(different, CHUNK // BR)
    more = tl.zeros((BM, BN), dtype=tl.float32)
    for r0 in range(0, most_rank, BR):
        low = _low(sums_ptr, slots, ranks, part, r0, PARTS, LOW, BM, BR, CUTS)
        every = tl.reshape(tl.broadcast_to(low[:, None, :], (BM, CHUNK // BR, BR)), (BM, CHUNK))
        start = 0
        if r0 == 0:
            more = _times_low(more, first_w, first_slot, every, slots, WIDE)
            start = 1
        for at in tl.range(start, chunks, num_stages=HIGH + 1):
            w, slot = up_tile(up_ptr, adapters, n, ok, most_rank, columns, at, r0, BR, CHUNK)
            more = _times_low(more, w, slot, every, slots, WIDE)
    return tl.trans(more)


# ---------------------------------------------------------------- the launch


@triton.jit(do_not_specialize=["M"])
def _adapted_kernel(
    x_ptr, y_ptr, residual_ptr, out_ptr, down_ptr, up_ptr, ranks_ptr, slots_ptr, gains_ptr, shifts_ptr,
    sums_ptr, signs_ptr, M, K, x_stride, columns, WIDTH, most_rank, shrinkers,
    border1, border2, border3, tiles1, tiles2, tiles3,
    PARTS: tl.constexpr, LANES: tl.constexpr, LOW: tl.constexpr, GAINS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    BR: tl.constexpr, EACH: tl.constexpr, CUTS: tl.constexpr, CHUNK: tl.constexpr, UNADDED: tl.constexpr,
    SHADE: tl.constexpr, OPEN: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, HIGH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program has BN columns of all rows; no tile crosses a border of parts. WIDTH: of the output. UNADDED: y lies
    in so many parts of a sum; 0: it is whole. signs: x is there (SHADE: then it may be read), items that are down,
    programs that have seen all. OPEN: out is what adapters add, without y."""
    m = tl.arange(0, BM)
    slots = tl.load(slots_ptr + m, mask=m < M, other=0)  # nothing that runs behind the embedding writes these
    ranks = tl.load(ranks_ptr + slots)
    adapters, different = adapters_of(slots, ranks, BM)
    item = tl.program_id(0)
    if item < shrinkers:
        if not SHADE:
            begin(PDL)
            wait(PDL)
        elif item == 0 or item < _items(different, shrinkers, CUTS):
            # Only now may the next launch begin: whoever looks at these signs next must find that they were taken down.
            _until(signs_ptr, 1)
            begin(PDL)
        go_down(x_ptr, x_stride, down_ptr, sums_ptr, signs_ptr + 1, slots, ranks, adapters, different, item, shrinkers,
                K, PARTS, LANES, LOW, BM, BK, BL, EACH, CUTS, WIDE, DEEP)  # fmt: skip
        if SHADE and item + different == 0:
            tl.store(signs_ptr, 0)
        return
    begin(PDL)
    part, start, end, tile = part_of(
        tl.program_id(0) - shrinkers, columns, WIDTH, border1, border2, border3, tiles1, tiles2, tiles3, PARTS, GATED
    )
    n = start + tile * BN + tl.arange(0, BN)
    ok = n < end
    if not SHADE:
        wait(PDL)
    w, slot = up_tile(up_ptr, adapters, n, ok, most_rank, columns, 0, 0, BR, CHUNK)
    if GATED:
        w_u, _ = up_tile(up_ptr, adapters, n + WIDTH, ok, most_rank, columns, 0, 0, BR, CHUNK)
    until_down(signs_ptr, different, shrinkers, tl.num_programs(0) - shrinkers, CUTS)
    more = come_up(w, slot, sums_ptr, up_ptr, slots, ranks, adapters, different, n, ok, part, most_rank, columns,
                   PARTS, LOW, BM, BN, BR, CHUNK, CUTS, WIDE, HIGH)  # fmt: skip
    if GATED:
        other_more = come_up(w_u, slot, sums_ptr, up_ptr, slots, ranks, adapters, different, n + WIDTH, ok, PARTS - 1,
                             most_rank, columns, PARTS, LOW, BM, BN, BR, CHUNK, CUTS, WIDE, HIGH)  # fmt: skip
    real = m < M
    keep = ok[:, None] & real[None, :]
    to = m[None, :] * WIDTH + n[:, None]
    if OPEN:
        tl.store(out_ptr + to, more, mask=keep)
    if SHADE:
        wait(PDL)  # whoever waits for this launch waits for the product, too
    if OPEN:
        return
    at = m[None, :] * columns + n[:, None]
    y = _product_at(y_ptr, at, keep, M * columns, UNADDED)
    y = _scaled(y, gains_ptr, shifts_ptr, slots, n, ok, columns, GAINS) + more
    if GATED:
        other = _product_at(y_ptr, at + WIDTH, keep, M * columns, UNADDED)
        other = _scaled(other, gains_ptr, shifts_ptr, slots, n + WIDTH, ok, columns, GAINS) + other_more
        y = gated_act(y, other, ACT)
    else:
        y = plain_act(y, ACT)
    if RESIDUAL:
        y += tl.load(residual_ptr + to, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _product_at(y_ptr, at, keep, size, UNADDED: tl.constexpr):
    """The product there; UNADDED: from so many parts, each of this size."""
    y = tl.load(y_ptr + at, mask=keep, other=0.0).to(tl.float32)
    for part in tl.static_range(1, UNADDED):
        y += tl.load(y_ptr + part * size + at, mask=keep, other=0.0)
    return y


@triton.jit
def _scaled(y, gains_ptr, shifts_ptr, slots, n, ok, columns, GAINS: tl.constexpr):
    """y [BN, BM] * gain + shift where there are such."""
    if GAINS:
        at = slots[None, :].to(tl.int64) * columns + n[:, None]
        mine = (slots > 0)[None, :] & ok[:, None]
        y = y * tl.load(gains_ptr + at, mask=mine, other=1.0) + tl.load(shifts_ptr + at, mask=mine, other=0.0)
    return y


# ---------------------------------------------------------------- launches


@dataclass(frozen=True, slots=True)
class Cuts:
    """How the way down is cut: into `cuts` sums of `each` entries, for so many rows and lanes, and what a row has of
    each sum."""

    cuts: int
    each: int
    rows: int
    lanes: int
    sums: int

    @property
    def floats(self) -> int:
        """Scratch memory for all sums."""
        return self.cuts * self.rows * self.sums


def _low_of(site: AdapterSite) -> int:
    """Entries that every rank fits into."""
    assert site.up is not None
    return max(16, pow2(site.up.shape[1]))


def cuts_of(site: AdapterSite, tokens: int) -> Cuts:
    """For a product of so many tokens."""
    assert site.down is not None and site.up is not None
    each = max(256, triton.cdiv(triton.cdiv(site.inputs, _MOST_CUTS), 128) * 128)
    return Cuts(
        triton.cdiv(site.inputs, each), each, max(16, pow2(tokens)), site.down.shape[2], site.parts * _low_of(site)
    )


def serves(site: AdapterSite, x: Tensor, scratch: Scratch) -> bool:
    """May a product of x [T, in] have its adapters within its own launch?"""
    if not 0 < x.shape[0] <= FEW or x.ndim != 2 or site.down is None or site.parts > MOST_PARTS:
        return False
    if x.dtype == torch.float32 and not INTERPRETED:  # its tiles take twice the shared memory, and all registers
        return False
    return cuts_of(site, x.shape[0]).floats <= scratch.floats // 2


def _under_way(cuts: Cuts, size: int, gated: bool) -> dict[str, int]:
    """Lanes and entries of a sum that are taken at once on the way down, and how many tiles of such numbers are under
    way: of the rows and of the lanes, and on the way up."""
    room = (ROOM - 4096 - 640 * max(0, cuts.rows - 32)) // size  # a tile's sums pass through there, too
    lanes = min(64, pow2(4 * cuts.lanes))  # more at once take longer: 18 us instead of 9 for q, k and v
    step = 128 if cuts.rows <= 32 else 64
    return {"BL": lanes, "BK": step, "DEEP": max(1, min(8, room // (step * (cuts.rows + lanes)))),
            "HIGH": min(8, room // _UP) - gated}  # fmt: skip


def shrinkers_of(programs: int) -> int:
    """Programs that go down in front of so many that go up."""
    processors = 1 if INTERPRETED else multiprocessors()
    return max(16, min(processors, (4 * processors - programs) // 16 * 16))


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Columns of a program on the way up, its warps and registers, and where all programs' columns lie."""

    block: int
    warps: int
    registers: int
    borders: list[int]
    ends: list[int]
    programs: int


def _tiles_of(site: AdapterSite, cuts: Cuts, width: int, gated: bool) -> _Tiles:
    """One program fits beside a product, and who ends a sum stays until the product has ended: so all are to be there
    at once."""

    def tiles(block: int, warps: int, registers: int) -> _Tiles:
        borders, ends = tiles_of(site, block)
        programs = triton.cdiv(width, block) if gated or site.parts == 1 else ends[-1]
        return _Tiles(block, warps, registers, borders, ends, programs)

    small = tiles(64, 4, 168)
    if INTERPRETED or (small.programs <= multiprocessors() and cuts.each <= _LONG):
        return small
    return tiles(128, 8, 128)


def _constants(site: AdapterSite, cuts: Cuts, block: int) -> dict[str, int | bool]:
    """What the kernel must know of the adapters when it is compiled."""
    assert site.down is not None and site.up is not None
    return {
        "PARTS": site.parts, "LANES": cuts.lanes, "LOW": _low_of(site),
        "BR": max(16, min(_UP // block, pow2(site.up.shape[1]))), "EACH": cuts.each, "CUTS": cuts.cuts,
        "BN": block, "CHUNK": _UP // block,
    }  # fmt: skip


def adapted(
    y: Tensor, delta: Delta, act: str | None, residual: Tensor | None, scratch: Scratch, signs: Tensor, *,
    pdl: bool, shade: bool = False, open_: bool = False,
) -> Tensor:  # fmt: skip
    """residual + act(y * gain + shift + up @ down @ x); y is the product of delta.inputs [T <= 64, N], or what `stream`
    makes of it with `shade` [parts + 1, T, N]. open_: make the last of these parts what adapters add, and no more."""
    site, x = delta.site, delta.inputs
    assert site.down is not None and site.up is not None
    x = x if x.stride(1) == 1 else x.contiguous()
    kind, gated = act_parts(act)
    tokens, width = x.shape[0], site.columns // 2 if gated else site.columns
    out = y[-1] if open_ else torch.empty((tokens, width), dtype=x.dtype, device=y.device)
    cuts = cuts_of(site, tokens)
    tiles = _tiles_of(site, cuts, width, gated)
    shrinkers = shrinkers_of(tiles.programs)
    _adapted_kernel[(shrinkers + tiles.programs,)](
        x, y, residual, out, site.down, site.up, site.ranks, delta.slots, site.gains, site.shifts,
        scratch.partial(y.device), signs, tokens, site.inputs, x.stride(0), site.columns, width,
        site.up.shape[1], shrinkers, *tiles.borders, *tiles.ends[:3],
        **_constants(site, cuts, tiles.block), **_under_way(cuts, x.element_size(), gated),
        GAINS=site.gains is not None, RESIDUAL=residual is not None, ACT=kind, GATED=gated, BM=cuts.rows,
        UNADDED=0 if y.ndim == 2 else y.shape[0] - shade, SHADE=shade, OPEN=open_,
        WIDE=INTERPRETED or x.dtype == torch.float32, PDL=pdl,
        num_warps=tiles.warps, maxnreg=tiles.registers, launch_pdl=pdl,
    )  # fmt: skip
    return y if open_ else out
