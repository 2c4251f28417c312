"""Which kernel multiplies which shape, and how it is cut. Owns: the measured table, and the rules for other shapes.

A shape that was not measured takes the way of the nearest one that was. `bench/fit_ways.py` writes `measured.json` from
what `bench/gpu_ways.py` timed, and prints what that rule loses against each shape's own best way; `bench/gpu_kernels.py
--tune` writes it for the shapes of one model. The table: device -> operation -> way. An operation is named by the most
rows it is meant for, the weight's shape, and what is fused. A way is one of
    ["gemv", BN, BK, warps]                                        one row
    ["thin", BN, BK, split, stages, warps, prefetch, norm inside]  up to 64 rows; norm inside: 0 norms beforehand
    ["stream", BN, height, split, stages]                          2 to 64 rows, on Hopper: by a rule, never measured
    ["wide"]                                                       more than 64 rows, on Hopper
    ["blas"]                                                       cuBLAS, with what is fused around it in own launches
"""

from __future__ import annotations

import json
import math
import pathlib
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.kernels.triton.common import INTERPRETED, multiprocessors, pow2, shared_memory

Way = tuple[str | int, ...]
Cut = tuple[int, int, int, int]
"""How stream.py cuts a product: BN (both halves of a gated weight), output columns of a piece, parts of K, stages."""
LINE, _BOX = 128, 16
"""Bytes of a row in one of its steps, and rows of the weight that are copied at once, at least."""
_LEAST_PIECES, _LEAST_STEPS, _MOST_PARTS = 40, 4, 4
"""Whoever adds parts up reads them while the next product's weights come: more than four cost more than they gain."""
_UNDER_WAY = 128 << 10
"""Bytes of the weight that a program asks for ahead."""
_A_LINE, _MEMORY, _MEETING = 2.3e-9, 4.4e12, 5e-6
"""Seconds a line takes a multiprocessor's copy engine, bytes a second of memory, and seconds that programs which add up
what they share are there longer (measured on an H200)."""
RUNGS = (1, 16, 32, 64, 128, 256, 384, 512)
"""Rows for which measured ways differ."""
FAR = 4.0
"""Distance from which a measured shape says nothing of another one."""
FEW = 64
"""Rows up to which the weight's bytes are all that counts."""


def operation(rows: int, shape: tuple[int, int], act: str | None, normed: bool) -> str:
    """The name of an operation in the table."""
    rung = next((r for r in RUNGS if rows <= r), 0)
    return f"{rung} {shape[0]}x{shape[1]} {act or '-'} {'norm' if normed else '-'}"


def measured_ways(device: str) -> dict[str, Way]:
    """What was measured on a device of this name."""
    return read_measured(pathlib.Path(__file__).with_name("measured.json"), device)


def read_measured(path: pathlib.Path, device: str) -> dict[str, Way]:
    """The ways that such a table has for a device of this name."""
    if not path.exists():
        return {}
    return {name: tuple(way) for name, way in json.loads(path.read_text()).get(device, {}).items()}


def is_way(name: str, way: Way) -> bool:
    """Is this a way that kernels take, for an operation of this name? (Of a file that anybody may have written.)"""
    rung, _, rest = name.partition(" ")
    sizes = {"gemv": 3, "thin": 7, "blas": 0}
    if len(rest.split()) != 3 or not rung.isdigit() or not way or sizes.get(str(way[0])) != len(way) - 1:
        return False
    if not all(type(n) is int and 0 <= n <= 1 << 16 for n in way[1:]) or (way[0] == "gemv") > (rung == "1"):
        return False
    blocks = way[1:3]
    return all(isinstance(n, int) and n > 0 and n & (n - 1) == 0 for n in blocks) and 0 not in way[3:6]


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured operation: the most rows it is meant for, the weight's shape, what is fused, and its best way."""

    rung: int
    shape: tuple[int, int]
    gated: bool
    normed: bool
    way: Way


def samples(ways: dict[str, Way]) -> list[Sample]:
    """The table's operations, taken apart."""
    found = []
    for name, way in ways.items():
        rung, size, act, norm = name.split()
        out, inner = (int(n) for n in size.split("x"))
        found.append(Sample(int(rung), (out, inner), act != "-", norm == "norm", way))
    return found


def nearest_way(known: list[Sample], rows: int, shape: tuple[int, int], *, gated: bool, normed: bool) -> Way | None:
    """The way of the closest operation for as many rows, cut to this shape; None: none is close."""
    rung = next((r for r in RUNGS if rows <= r), 0)
    close = [(_distance(s, shape, normed), s) for s in known if s.rung == rung and s.gated == gated]
    distance, sample = min(close, key=lambda pair: pair[0], default=(math.inf, None))
    if sample is None or distance > FAR:
        return None
    way = sample.way
    if way[0] == "gemv":
        return "gemv", way[1], min(int(way[2]), pow2(shape[1])), way[3]
    if way[0] == "thin":
        chunks = -(-shape[1] // int(way[2]))
        return (*way[:3], max(1, min(int(way[3]), chunks // 3)), *way[4:])
    return way


def _distance(sample: Sample, shape: tuple[int, int], normed: bool) -> float:
    """In doublings of rows and columns; how far columns can be halved says which blocks fill them."""
    apart = sum(abs(math.log2(a / b)) for a, b in zip(sample.shape, shape, strict=True))
    return apart + (sample.normed != normed) + 0.15 * abs(_halvings(sample.shape[1]) - _halvings(shape[1]))


def _halvings(n: int) -> int:
    return (n & -n).bit_length()


def default_way(rows: int, width: int, inner: int, *, gated: bool, small: bool = False) -> Way:
    """A way for a shape that was not measured; width: output columns; small: little shared memory."""
    if INTERPRETED:
        return ("gemv", 32, 64, 1) if rows == 1 else ("thin", 32, 64, 2, 1, 4, 0, rows % 2)
    if rows == 1:
        block_k = min(pow2(inner), 2048)
        return "gemv", 2, block_k, max(1, min(4, block_k // 512))
    if gated and rows > 16:
        return ("blas",)
    tiles = -(-width // 64)
    chunks = -(-inner // 128)
    split = max(1, min(4, chunks // 8, round(396 / tiles)))
    if small:
        return "thin", 64, 64, split, 3, 4, 2, 0
    return "thin", 64, 128, split, 4 if not gated else 3, 4, 2, 0


def may_stream(x: Tensor, weight: Tensor) -> bool:
    """Does Hopper's copy engine take both for stream.py? (Of rows that are no whole lines, a copy is made.)"""
    typed = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    lines = weight.is_contiguous() and weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0
    return typed and lines and x.ndim == 2 and 0 < x.shape[0] <= FEW


def stream_cut(
    rows: int, width: int, inner: int, *, gated: bool = False, parts: bool = False, beside: int = 0, size: int = 2
) -> Cut | None:
    """The tiles of a product with so many columns of output; parts: K may be cut, and sums stay in parts. beside: bytes
    of shared memory that programs of another launch need; size: bytes of a number. None: another kernel, whose programs
    add up what they share, is faster (in 8 bits it never is by much).

    What a program copies are lines, those of the weight and, again for each piece, those of the rows; the busiest one
    says how long all takes. So pieces are high, and all programs have as many."""
    programs, block_m, halves = multiprocessors(), max(16, pow2(rows)), 1 + gated
    least, most = (16, 64) if gated else (64, 128)
    found: list[tuple[int, int, int, int]] = []
    for split in range(2, _MOST_PARTS + 1) if parts else (1,):
        steps = -(-inner * size // (LINE * split))
        for height in range(least, most + 1, _BOX):
            pieces = -(-width // height) * split
            rounds = -(-pieces // programs)
            if pieces >= _LEAST_PIECES and (split == 1 or (steps >= _LEAST_STEPS and rounds == 1)):
                found.append((rounds * steps * (height * halves + block_m), -height, rounds, split))
    lines, less, _, split = min(found, default=(0, 0, 0, 0))
    if not found or (size == 2 and lines * _A_LINE > halves * width * inner * size / _MEMORY + _MEETING):
        return None
    return cut_of(-less, split, block_m, gated=gated, beside=beside)


def cut_of(height: int, split: int, block_m: int, *, gated: bool, beside: int = 0) -> Cut:
    """Pieces of so many columns of output, with as many stages as there is room for and are of use. block_m: rows of
    x."""
    halves = 1 + gated
    block_n = max(64, pow2(height * halves))
    apart = gated and block_n < 128  # gates and their partners are in different threads
    passing = (block_n if gated and not apart else 4 * block_n) * block_m + 1024  # through shared memory, to be written
    if beside:
        passing = max(2 * block_n * block_m, 8192) + beside
    stages = (shared_memory() - passing) // (LINE * (block_n + block_m))
    return block_n, height, split, min(stages, -(-_UNDER_WAY // (LINE * height * halves)), 12)


def wide_way(rows: int, out: int, programs: int, *, fused: bool) -> Way:
    """For more rows, on Hopper: wide.py where its tiles (of 256 weight rows) fill whole rounds of programs.

    fused: it saves a pass over the result; else cuBLAS is as fast from 8192 rows on."""
    tiles = -(-rows // 128) * -(-out // 256)
    rounds = -(-tiles // programs)
    full = tiles >= 0.9 * rounds * programs
    return ("wide",) if full and rows > 512 and (fused or rows <= 4096) else ("blas",)
