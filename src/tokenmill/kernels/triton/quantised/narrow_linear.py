"""A product with a packed weight. Owns: which kernel serves which shape, and when activations are rounded.

One row is multiplied nearly as it is (narrow_words.py), and so are a few rows of a 4 bit weight. More are rounded to
the weight's own 8 bits, row by row, where the weight has a scale per row or per block: tensor cores then take both as
they lie. Weights with a scale per group of columns are widened on their way, or beforehand where there are many rows.
Ways, as in ways_by_shape.py:
    ["gemv", BN, words, warps, early lines]              one row, of 4 bits a few
    ["thin", BN, BK, split, stages, warps, prefetch]     few rows
    ["stream", BN, BM, split, stages, warps, registers]  some rows, 4 bits, on Hopper
    ["stream", BN, height, 1, stages]                    2 to 64 rows, float8, on Hopper: by a rule (products/stream.py)
    ["wide", BM, BN, BK, stages, warps]                  many rows, rounded
    ["library"]                                          many rows, rounded, through cuBLAS
    ["widen"]                                            the weight is widened, then cuBLAS
    ["float8"]                                           many rows of a 4 bit weight that lets them be rounded
`measured_narrow.json` holds what was measured (bench/gpu_narrow.py): device -> operation -> way.
"""

from __future__ import annotations

import pathlib

import torch
from torch import Tensor

from tokenmill.compute.forward import Act, NormSpec
from tokenmill.kernels.triton.common import INTERPRETED, act_parts
from tokenmill.kernels.triton.launch import Launch
from tokenmill.kernels.triton.products.ways_by_shape import Way, read_measured, stream_cut
from tokenmill.kernels.triton.quantised.narrow import BLOCK, NarrowMatrix
from tokenmill.kernels.triton.quantised.narrow_gemv import narrow_gemv
from tokenmill.kernels.triton.quantised.narrow_round import round_rows
from tokenmill.kernels.triton.quantised.narrow_stream import can_stream, narrow_stream
from tokenmill.kernels.triton.quantised.narrow_thin import narrow_thin
from tokenmill.kernels.triton.quantised.narrow_wide import narrow_wide

RUNGS = (1, 8, 16, 32, 64, 128, 256, 512)
"""Rows for which ways differ."""
_FEW = 64
_WIDE: Way = ("wide", 128, 128, 128, 3, 8)
_WIDEST = 1 << 15
_SOME = 512
"""Rows up to which words are unpacked once for every 128 rows; beyond, the whole weight is, beforehand."""
_SOME_ROUNDED = 256
"""The same for weights that let activations be rounded: these become float8."""
_RESIDENT = 264
"""Programs on a Hopper's multiprocessors, two on each."""


def narrow_operation(rung: int, weight: NarrowMatrix, act: str | None) -> str:
    """The name of an operation in the measured table; rung: the most rows it is meant for, 0: more than any."""
    kind = "fp8" if weight.data.dtype == torch.float8_e4m3fn else "table" if weight.table else f"int{weight.bits}"
    return _name(f"{kind}/{'blocks' if weight.blocks else weight.group or 'rows'}", rung, weight, act)


def _name(kind: str, rung: int, weight: NarrowMatrix, act: str | None) -> str:
    return f"{kind} {rung or 'many'} {weight.shape[0]}x{weight.shape[1]} {act or '-'}"


def _measured(ways: dict[str, Way], rows: int, weight: NarrowMatrix, act: str | None) -> Way | None:
    """The way of the closest operation that was measured: float8 tells for int8, groups of 128 for others."""
    close = "int4/128" if weight.bits == 4 else "fp8/rows" if weight.plain else ""
    for rung in rungs(rows):
        found = ways.get(narrow_operation(rung, weight, act)) or ways.get(_name(close, rung, weight, act))
        if found is not None:
            return found
    return None


def rungs(rows: int) -> list[int]:
    """The rungs that may serve so many rows, closest first: what is good for many is not for few."""
    if rows <= _FEW:
        return [1] if rows == 1 else [r for r in RUNGS if rows <= r <= _FEW]
    return [*(r for r in RUNGS if rows <= r), 0]


def measured_narrow(device: str) -> dict[str, Way]:
    """What was measured on a device of this name."""
    return read_measured(pathlib.Path(__file__).with_name("measured_narrow.json"), device)


def default_narrow(
    rows: int, weight: NarrowMatrix, *, gated: bool, library: bool, small: bool, streams: bool = False
) -> Way:
    """A way for a shape that was not measured; library: cuBLAS takes this type; small: little shared memory; streams:
    the copy engine takes it."""
    inner = weight.shape[1]
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    grouped = weight.group > 0 and not weight.blocks
    if INTERPRETED:
        if rows == 1:
            return "gemv", 2, 64, 1, 0
        return ("thin", 32, 64, 2, 1, 4, 0) if rows <= _FEW else ("widen",) if grouped else ("wide", 32, 32, 64, 1, 4)
    if rows == 1:
        return default_gemv(weight, gated=gated)
    if streams and rows <= _SOME:
        return default_stream(rows, width, inner, gated=gated)
    if rows > (2 * _FEW if grouped else _FEW):
        if grouped:
            return ("widen",)
        return ("library",) if library else ("wide", 64, 64, 64, 3, 4) if small else _WIDE
    block_k = BLOCK if weight.group else 256 if not gated and rows <= 32 else BLOCK
    tiles = -(-width // 64)
    chunks = -(-inner // block_k)
    most = max(1, min(8, chunks // 4, round(528 / tiles)))
    split = next(s for s in range(most, 0, -1) if chunks % s == 0)
    return ("thin", 64, BLOCK, 1, 2, 4, 2) if small else ("thin", 64, block_k, split, 4, 4, 2)


def _rows_by_gemv(x: Tensor, weight: NarrowMatrix) -> int:
    """So many rows are multiplied as one is: unpacking 4 bits is done once for all, and what is left to do for a row
    costs less than tensor cores' way does. Narrow groups have more to do for each row."""
    if weight.bits == 8 or x.shape[1] % 4:
        return 1
    return 4 if weight.group >= BLOCK else 2


def default_gemv(weight: NarrowMatrix, *, gated: bool, several: bool = False) -> Way:
    """Four bits: two rows a program of what is gated, or long with few scales; else four. several: rows of x."""
    if several:
        return ("gemv", 2, 256, 1, 0) if gated else ("gemv", 4, 256, 2, 0)
    if weight.bits == 8:
        return _gemv_of_rows(*weight.shape, gated=gated) if weight.plain else ("gemv", 4 if gated else 8, 256, 2, 0)
    long = weight.shape[1] >= 8192 and weight.group >= BLOCK
    return ("gemv", 2, 512, 2, 0) if gated or long else ("gemv", 4, 256, 2, 0)


def _gemv_of_rows(out: int, inner: int, *, gated: bool) -> Way:
    """Eight bits with a scale per row, by a sweep over the products of four models: long rows in long pieces by many
    programs; where there are few programs, a piece should leave little of a row."""
    if gated:
        return "gemv", 4, 128, 1, 0
    if inner >= 8192:
        return "gemv", 8, 512, 4, 16
    if out > 16384:
        return "gemv", 8, 256, 2, 0
    filled = inner / (-(-inner // 2048) * 2048)
    return ("gemv", 4, 512, 4, 0) if out <= 4096 or filled > 0.8 else ("gemv", 4, 256, 2, 0)


def default_stream(rows: int, width: int, inner: int, *, gated: bool) -> Way:
    """Few rows: tiles of 128 rows of the weight where these fill the device, else of 64. Many: tiles of 128 x 128, of
    which one program fits on a multiprocessor, or of 256 rows where only these fit all at once. More parts of K as long
    as the device has room for their programs."""
    blocks = -(-inner // BLOCK)
    if rows > _FEW:
        if gated:
            return ("stream", 256, 128, 1, 4, 8, 168) if rows <= 256 else ("stream", 128, 128, 1, 4, 4, 168)
        tall = -(-width // 128)
        if tall * -(-rows // 128) > _RESIDENT // 2 >= tall * -(-rows // 256):
            return "stream", 128, 256, 1, 3, 8, 168
        split = max(1, min(4, blocks // 16, _RESIDENT // 2 // (tall * -(-rows // 128))))
        return "stream", 128, 128, split, 4, 8, 104
    high = gated or width >= 128 * _RESIDENT
    tiles = -(-width // (64 if gated or not high else 128))
    split = _parts(tiles, blocks, _RESIDENT if rows <= 32 else _RESIDENT // 2)
    own = -(-blocks // split)  # a step takes two blocks where there are two
    stages = min(4 if high else 6 if rows <= 32 else 8, max(1, own // 2 * 2))
    return "stream", 128 if high else 64, 64, split, stages, 4, 104


def _parts(tiles: int, blocks: int, room: int) -> int:
    """Parts of K with which all programs, of which `room` are there at once, end first: one more than there is room for
    takes another round. To begin and to end takes a program as long as four blocks."""
    rounds = {split: -(-tiles * split // room) for split in range(1, max(1, min(8, blocks // 4)) + 1)}
    return min(rounds, key=lambda split: (rounds[split] * (-(-blocks // split) + 4), split))


def narrow_linear(
    launch: Launch,
    x: Tensor,
    weight: NarrowMatrix,
    norm: NormSpec | None,
    act: Act | None,
    residual: Tensor | None,
    way: Way,
) -> Tensor:
    """x [T, K] -> residual + act(norm(x) @ weight.T + bias) [T, N], by a kernel of ours: the ways "gemv", "thin",
    "stream" and "wide". The result of "gemv" may be SpreadRows."""
    pdl, scratch = launch.pdl, launch.scratch
    if way[0] == "gemv":
        return narrow_gemv(x, weight, norm, act, residual, pdl=pdl, config=way[1:])
    if way[0] == "stream" and weight.bits == 4:
        return narrow_stream(x, weight, act, residual, scratch=scratch, pdl=pdl, config=way[1:])
    if way[0] == "thin" and weight.group > 0 and not weight.blocks:
        return narrow_thin(x, weight, act, residual, x.dtype, scratch=scratch, pdl=pdl, config=way[1:])
    rounded = round_rows(x, weight.data.dtype, norm, pdl=pdl)
    if way[0] == "stream":
        from tokenmill.kernels.triton.products.stream import stream  # the interpreter cannot load it

        q, steps = rounded
        return stream(q, weight.data, weight.bias, act, residual, pdl=pdl, cut=way[1:], scales=(steps, weight.scales),
                      dtype=x.dtype)  # type: ignore[arg-type]  # fmt: skip
    if way[0] == "thin":
        return narrow_thin(rounded, weight, act, residual, x.dtype, scratch=scratch, pdl=pdl, config=way[1:])
    assert way[0] == "wide", "the other ways are not kernels of ours"
    return narrow_wide(*rounded, weight, act, residual, x.dtype, pdl=pdl, config=way[1:])


def _streams_rounded(x: Tensor, weight: NarrowMatrix) -> bool:
    """May stream.py multiply these, once x is rounded?"""
    typed = weight.plain and weight.data.dtype == torch.float8_e4m3fn
    return typed and 1 < x.shape[0] <= _FEW and weight.shape[1] % 16 == 0 and weight.data.data_ptr() % 16 == 0


def scaled_product(x: Tensor, weight: NarrowMatrix, norm: NormSpec | None, *, pdl: bool) -> Tensor:
    """norm(x) @ weight.T + bias [T, N] through cuBLAS: the way "library"."""
    q, steps = round_rows(x, weight.data.dtype, norm, pdl=pdl)
    scales = steps[:, None], weight.scales[None]
    return torch._scaled_mm(q, weight.data.t(), *scales, bias=weight.bias, out_dtype=x.dtype, use_fast_accum=True)


def norms_inside(way: Way, weight: NarrowMatrix, norm: NormSpec) -> bool:
    """Is the norm done on the way?"""
    inside = way[0] == "gemv" or (way[0] != "widen" and (weight.group == 0 or weight.blocks))
    return inside and norm.kind == "rms" and norm.bias is None


def narrow_way(launch: Launch, x: Tensor, weight: NarrowMatrix, act: Act | None) -> Way:
    """How x is multiplied."""
    gated = act_parts(act)[1]
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    library = (
        weight.plain
        and weight.data.dtype == torch.float8_e4m3fn
        and x.dtype == torch.bfloat16
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % 16 == 0
        and launch.hopper
    )
    if weight.row_steps is not None and x.shape[0] > _SOME_ROUNDED and x.shape[1] <= _WIDEST:
        return ("float8",)
    if x.shape[0] == 1 and x.shape[1] % 4:
        return ("widen",)
    if x.shape[1] > _WIDEST or (weight.blocks and gated and width % BLOCK):
        return ("widen",)  # a row that is not rounded in one pass; halves that share blocks of scales
    if 1 < x.shape[0] <= _rows_by_gemv(x, weight):
        return default_gemv(weight, gated=gated, several=True)
    found = _measured(launch.narrow_ways, x.shape[0], weight, act)
    if found is None and launch.hopper and launch.few_rows and _streams_rounded(x, weight):
        cut = stream_cut(x.shape[0], width, weight.shape[1], gated=gated, size=1)
        if cut is not None:
            return "stream", *cut
    streams = launch.hopper and can_stream(x, weight, gated=gated)
    cannot = found is not None and found[0] == "stream" and weight.bits == 4 and not streams
    if found is None or cannot or (found[0] == "library" and not library):
        return default_narrow(
            x.shape[0], weight, gated=gated, library=library, small=launch.small, streams=streams
        )  # fmt: skip
    return found
