"""How pages hold keys and values (kernels/stored_kv.py). Owns: the kinds of stored numbers, rounding new heads into
pages, and making numbers of tiles that were loaded as they lie.

A head has GROUPS parts with a scale each. In 4 bits byte j holds number j and, above it, number j + half of the head;
a group has a least value, too, behind all scales. What decodes keeps numbers packed in registers: see narrow_keys.py.
Must not know: tables, scores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.compute.forward import KVView


class Kind(NamedTuple):
    """TYPE: of scaled numbers in pages (uint8: two of 4 bits in each), None where they lie as they are; PER: narrow
    numbers in 16 bits; GROUPS: parts of a head that have a scale each; WHOLE: there is one at most and no least value,
    so that it can be taken into scores or probabilities."""

    TYPE: Any = None
    PER: int = 1
    GROUPS: int = 1
    WHOLE: bool = True


def kinds_of(kv: KVView) -> dict[str, Kind]:
    """What kernels are told of these pages."""
    return {"K_KIND": _kind(kv.key, kv.key_scale), "V_KIND": _kind(kv.value, kv.value_scale)}


def _kind(pages: torch.Tensor, scale: torch.Tensor | None) -> Kind:
    if scale is None:
        return Kind()
    if pages.dtype == torch.uint8:
        return Kind(tl.uint8, 4, scale.shape[3] // 2, False)
    groups = scale.shape[3]
    return Kind(tl.int8 if pages.dtype == torch.int8 else tl.float8e4nv, 2, groups, groups == 1)


def scale_strides(kv: KVView) -> tuple[int, ...]:
    """Blocks, heads and rows of the keys' scales, and of the values'; zeros where there are none."""
    if kv.key_scale is None or kv.value_scale is None:
        return (0,) * 6
    return *kv.key_scale.stride()[:3], *kv.value_scale.stride()[:3]


def scales_of(kv: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys and of values; where there are none something else that is not read."""
    return kv.key if kv.key_scale is None else kv.key_scale, kv.value if kv.value_scale is None else kv.value_scale


def can_store(kv: KVView) -> bool:
    """Are there kernels for these pages? Groups are powers of two; of 4 bits each half of a head has its own."""
    return all(
        kind.TYPE is None or (kind.GROUPS & (kind.GROUPS - 1) == 0 and not (kind.PER == 4 and kind.GROUPS == 1))
        for kind in kinds_of(kv).values()
    )


def can_pair(kv: KVView) -> bool:
    """Are numbers plain, or can words of 16 bits be read, each with one scale (of 4 bits: with one for each half of a
    head)? Heads and blocks are even then."""
    parts = zip(kinds_of(kv).values(), (kv.key, kv.value), strict=True)
    return all(
        kind.PER == 1 or (kind.GROUPS == kind.PER // 2 and not pages.shape[2] % kind.PER and not pages.shape[3] % 2)
        for kind, pages in parts
    )


@triton.jit
def columns(BLOCK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Which number of a head of WIDTH lies in each of BLOCK columns, of which every part has as many; WIDTH: none."""
    d = tl.arange(0, BLOCK)
    if PARTS > 1 and WIDTH < BLOCK:
        EACH: tl.constexpr = BLOCK // PARTS
        REAL: tl.constexpr = WIDTH // PARTS
        d = tl.where(d % EACH < REAL, d // EACH * REAL + d % EACH, WIDTH)
    return d


@triton.jit
def _to_bfloat(x):
    """float32 -> the nearest bfloat16, in float32; ties to even, by hand: the interpreter would cut off."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 32767 + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _divided(x, wide):
    """x [R, N] / wide [R]; zeros where that is zero or NaN."""
    return tl.where(wide[:, None] > 0.0, x / tl.where(wide > 0.0, wide, 1.0)[:, None], 0.0)


@triton.jit
def rounded(x, real, TYPE: tl.constexpr):
    """x [R, N] in float32, of which some are real -> numbers [R, N] of TYPE (of 4 bits: 0 to 15 in int32), and scales
    and least values [R] in float32."""
    wrong = tl.max((real & (x != x)).to(tl.int32), axis=1) > 0
    if tl.uint8 == TYPE:
        least = _to_bfloat(tl.min(tl.where(real, x, float("inf")), axis=1))
        most = tl.max(tl.where(real, x, float("-inf")), axis=1)
        wide = _to_bfloat(tl.maximum((most - least) / 15.0, 0.0))
        y = _divided(x - least[:, None], wide)
        y = tl.where(y == y, tl.minimum(tl.maximum(y, 0.0), 15.0), 0.0)
        numbers = ((y + 12582912.0) - 12582912.0).to(tl.int32)  # to whole numbers, ties to even
    else:
        LARGEST: tl.constexpr = 127.0 if tl.int8 == TYPE else 448.0
        least = tl.zeros_like(wrong.to(tl.float32))
        wide = _to_bfloat(tl.max(tl.where(real, tl.abs(x), 0.0), axis=1) / LARGEST)
        y = _divided(x, wide)
        y = tl.where(y == y, tl.minimum(tl.maximum(y, -LARGEST), LARGEST), 0.0)
        if tl.int8 == TYPE:
            y = (y + 12582912.0) - 12582912.0
        numbers = y.to(TYPE)
    scale = tl.where(wrong, float("nan"), wide)
    return numbers, scale, least


@triton.jit
def put(
    x, real, target, scale_target, KIND: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Heads x [HEADS, BLOCK] in float32, by `columns`, go to their pages at `target` and `scale_target` [HEADS] where
    they are real [HEADS] -> what will be read there, in float32."""
    if KIND.TYPE is None:
        d = tl.arange(0, BLOCK)
        stored = x.to(target.dtype.element_ty)
        tl.store(target[:, None] + d[None, :], stored, mask=real[:, None] & (d < WIDTH)[None, :])
        read = stored.to(tl.float32)
    else:
        PARTS: tl.constexpr = KIND.GROUPS
        each = columns(BLOCK, WIDTH, PARTS)
        inside = tl.broadcast_to((each < WIDTH)[None, :], (HEADS, BLOCK))
        ROWS: tl.constexpr = HEADS * PARTS
        numbers, scale, least = rounded(
            tl.reshape(x, (ROWS, BLOCK // PARTS)), tl.reshape(inside, (ROWS, BLOCK // PARTS)), KIND.TYPE
        )
        read = numbers.to(tl.float32) * scale[:, None] + least[:, None]
        read = tl.where(inside, tl.reshape(read, (HEADS, BLOCK)), 0.0)
        if KIND.PER == 4:
            both = tl.permute(tl.reshape(numbers, (HEADS, 2, BLOCK // 2)), (0, 2, 1))
            low, high = tl.split(both)
            each = columns(BLOCK // 2, WIDTH // 2, PARTS // 2)
            stored = (low | high << 4).to(tl.uint8)
            mask = real[:, None] & (each < WIDTH // 2)[None, :]
        else:
            stored = tl.reshape(numbers, (HEADS, BLOCK))
            mask = real[:, None] & (each < WIDTH)[None, :]
        tl.store(target.to(tl.pointer_type(KIND.TYPE))[:, None] + each[None, :], stored, mask=mask)
        spots = scale_target[:, None] + tl.arange(0, PARTS)[None, :]
        tl.store(spots, tl.reshape(scale, (HEADS, PARTS)).to(tl.bfloat16), mask=real[:, None])
        if KIND.PER == 4:
            tl.store(spots + PARTS, tl.reshape(least, (HEADS, PARTS)).to(tl.bfloat16), mask=real[:, None])
    return read


@triton.jit
def spot_in(d, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """Where in a stored head of WIDTH numbers those numbered d lie."""
    if KIND.PER == 4:
        d = d % (WIDTH // 2)
    return d


@triton.jit
def _spread(scales, group, known, GROUPS: tl.constexpr):
    """The scale (or least value) of each number of a tile. scales: pointers to the first of each head."""
    found = tl.load(scales, mask=known, other=0.0).to(tl.float32)
    for g in tl.static_range(1, GROUPS):
        found = tl.where(group == g, tl.load(scales + g, mask=known, other=0.0).to(tl.float32), found)
    return found


@triton.jit
def widened(stored, scales, d, known, LIKE: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """A tile, loaded as it lies (see `spot_in`), as numbers of type LIKE; without the scale where that is WHOLE.

    d, and pointers to scales and which of them are known: shaped so that they broadcast to the tile."""
    if KIND.WHOLE:
        found = stored.to(LIKE)
    else:
        EACH: tl.constexpr = WIDTH // KIND.GROUPS
        group = d // EACH
        scale = _spread(scales, group, known, KIND.GROUPS)
        if KIND.PER == 4:
            number = (stored.to(tl.int32) >> tl.where(d < WIDTH // 2, 0, 4)) & 15
            least = _spread(scales + KIND.GROUPS, group, known, KIND.GROUPS)
            found = (number.to(tl.float32) * scale + least).to(LIKE)
        else:
            found = (stored.to(tl.float32) * scale).to(LIKE)
    return found
