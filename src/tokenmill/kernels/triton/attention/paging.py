"""How attention kernels find and weigh keys. Owns: the step from a table to key positions, and the score arithmetic.

Index i of a sequence means offset i % SIZE of table entry i // SIZE. Where tables are contiguous the index is the
position; else entry j begins at first[j], and a position belongs to the last entry that begins at or before it.
Where sequences are nodes of trees (compute/descriptors.py: Paths) the keys from a root on lie further on than they
stand: tables have no gaps there, as these are the newest entries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import Paths
from tokenmill.kernels.triton.common import tanh

FLOOR = tl.constexpr(-1e30)
"""Running maximum before any key: finite, so that rows without keys stay free of NaN."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def further(position, known, path):
    """How much further on than they stand these keys [N] lie; path: a root, and where its descendants lie."""
    root, places = path
    depth = position - root
    below = known & (depth >= 0)
    return tl.where(below, tl.load(places + depth, mask=below, other=0) - depth, 0)


@triton.jit
def path_of(roots, places, seq, stride):
    """The path of a sequence, as helpers take it."""
    return tl.load(roots + seq).to(tl.int32), places + seq.to(tl.int64) * stride


@triton.jit
def locate(
    at, n, table, first, entries, kv_len, path,
    SIZE: tl.constexpr, FIRST: tl.constexpr, TREE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Indexes at + n [N] -> block [N] (int64), offset [N], position [N], and which of them exist. TREE: the sequence is
    a node, which has a path. ALIGNED: at is a multiple of SIZE, so that offsets stay the same from tile to tile."""
    index = at + n
    if ALIGNED:
        entry = at // SIZE + n // SIZE
        offset = n % SIZE
    else:
        entry = index // SIZE
        offset = index % SIZE
    if FIRST:
        held = entry < entries
        start = tl.load(first + entry, mask=held, other=0)
        after = tl.load(first + entry + 1, mask=entry + 1 < entries, other=2147483647)
        position = start + offset
        known = held & (position < kv_len) & (position < after)
    else:
        position = index
        known = index < kv_len
    if TREE:
        offset += further(position, known, path)
        entry += offset // SIZE
        offset = offset % SIZE
    block = tl.load(table + entry, mask=known, other=0).to(tl.int64)
    return block, offset, position, known


def path_parts(paths: Paths | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Roots, places and how far apart the places of two sequences lie, as `path_of` takes them."""
    return (None, None, 0) if paths is None else (paths.roots, paths.places, paths.places.stride(0))


@triton.jit
def reach(query_position, window):
    """How many positions a query sees, itself included: `window`, or those of its chunk of -window."""
    return tl.where(window < 0, query_position % tl.maximum(-window, 1) + 1, window)


@triton.jit
def place_of(tile, start_ptr, S, BQ: tl.constexpr):
    """The sequence that a tile of BQ queries belongs to, and its first query there. Sequence i owns tiles
    query_start[i] // BQ + i and the following ones."""
    low = 0
    high = S
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(start_ptr + middle) // BQ + middle <= tile:
            low = middle
        else:
            high = middle
    return low, (tile - tl.load(start_ptr + low) // BQ - low) * BQ


@triton.jit
def head_and_tile(heads):
    """What a program takes, the heads of a tile in turn, the last tile first. (The second dimension of a grid ends at
    65535, which tiles of few queries exceed.)"""
    program = tl.program_id(0)
    return program % heads, tl.num_programs(0) // heads - 1 - program // heads


@triton.jit
def bend(scores, query_position, position, slope, scale, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Raw dots [R, N] -> scores in units of log 2: scaled, capped, biased by distance."""
    if SOFTCAP:
        scores = softcap * tanh(scores * (scale / softcap))
        if ALIBI:
            scores -= slope[:, None] * (query_position - position).to(tl.float32)
        scores = scores * LOG2E
    elif ALIBI:
        scores = (scores * scale - slope[:, None] * (query_position - position).to(tl.float32)) * LOG2E
    else:
        scores = scores * (scale * LOG2E)
    return scores
