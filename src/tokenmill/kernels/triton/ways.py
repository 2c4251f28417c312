"""Which kernel multiplies which shape, and how it is cut. Owns: reading the measured table, and the rule for the rest.

`measured.json` is written by `bench/gpu_kernels.py --tune`: device -> operation -> way. An operation is named by the
most rows it is meant for, the weight's shape, and what is fused. A way is one of
    ["gemv", BN, BK, warps]                                        one row
    ["thin", BN, BK, split, stages, warps, prefetch, norm inside]  up to 64 rows; norm inside: 0 norms beforehand
    ["wide"]                                                       more than 64 rows, on Hopper
    ["blas"]                                                       cuBLAS, with what is fused around it in own launches
"""

from __future__ import annotations

import json
import pathlib

from tokenmill.kernels.triton.common import INTERPRETED, pow2

Way = tuple[str | int, ...]
RUNGS = (1, 16, 32, 64, 128, 256, 384, 512)
"""Rows for which measured ways differ."""
FEW = 64
"""Rows up to which the weight's bytes are all that counts."""


def operation(rows: int, shape: tuple[int, int], act: str | None, normed: bool) -> str:
    """The name of an operation in the table."""
    rung = next((r for r in RUNGS if rows <= r), 0)
    return f"{rung} {shape[0]}x{shape[1]} {act or '-'} {'norm' if normed else '-'}"


def measured_ways(device: str) -> dict[str, Way]:
    """What was measured on a device of this name."""
    path = pathlib.Path(__file__).with_name("measured.json")
    if not path.exists():
        return {}
    return {name: tuple(way) for name, way in json.loads(path.read_text()).get(device, {}).items()}


def default_way(rows: int, width: int, inner: int, *, gated: bool, small: bool = False) -> Way:
    """A way for a shape that was not measured; width: output columns; small: little shared memory."""
    if INTERPRETED:
        return ("gemv", 2, 64, 1) if rows == 1 else ("thin", 32, 64, 2, 1, 4, 0, rows % 2)
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


def wide_way(rows: int, out: int, programs: int, *, fused: bool) -> Way:
    """For more rows, on Hopper: wide.py where its tiles (of 256 weight rows) fill whole rounds of programs.

    fused: it saves a pass over the result; else cuBLAS is as fast from 8192 rows on."""
    tiles = -(-rows // 128) * -(-out // 256)
    rounds = -(-tiles // programs)
    full = tiles >= 0.9 * rounds * programs
    return ("wide",) if full and rows > 512 and (fused or rows <= 4096) else ("blas",)
