"""The search for the fastest way (kernel and tiles) of a product. Owns: the candidates, what counts as right and as
faster, the budget, and the file of what was found on this device.

Each operation (`ways_by_shape.py`) is searched by itself, on weights of the same shape that rotate through more
memory than the L2 cache holds. A way that does not compile, does not fit or differs from the default's result is left
out; a way that is kept must beat the default twice. Must not know: models, requests, when searching is allowed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from tokenmill.core.whole_file import write_whole
from tokenmill.kernels.triton.products.ways_by_shape import FEW, RUNGS, Way, default_way, is_way, operation

GAIN = 1.02
"""A way must be so much faster than the default: less is noise."""
WRONG = 0.02
"""Relative difference of results from which one of them is wrong: orders of addition differ by much less."""
_FILES = pathlib.Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Asked:
    """A product that a model makes: rows, the weight's shape, what is fused, and how it is multiplied now."""

    rows: int
    shape: tuple[int, int]
    act: str | None
    gated: bool
    normed: bool
    added: bool
    dtype: object
    now: Way

    @property
    def name(self) -> str:
        return operation(self.rows, self.shape, self.act, self.normed)

    @property
    def weight(self) -> int:
        """How much there is to gain: numbers of the matrix."""
        return self.shape[0] * self.shape[1]


class Bench(Protocol):
    """Where products are tried."""

    def result(self, asked: Asked, way: Way) -> Tensor:
        """What it gives; whatever is raised: this way cannot be taken."""
        ...

    def seconds(self, asked: Asked, way: Way) -> float:
        """How long one call takes."""
        ...


@dataclass(slots=True)
class Report:
    """What came of a search: found ways, how much faster they are; operations tried, ways tried, of these unusable."""

    found: dict[str, Way] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)
    operations: int = 0
    left: int = 0
    tried: int = 0
    unusable: int = 0


def rung_of(rows: int) -> int:
    """The most rows that share a way with so many."""
    return next((rung for rung in RUNGS if rows <= rung), rows)


def candidates(asked: Asked, room: int) -> Iterator[Way]:
    """What might be the fastest, of what fits so much shared memory."""
    out, inner = asked.shape
    rows, double = rung_of(asked.rows), 2 if asked.gated else 1
    yield ("blas",)
    if rows == 1:
        for block_k in (256, 512, 1024, 2048, 4096):
            for block_n in (1, 2, 4, 8):
                for warps in (2, 4, 8):
                    each = double * block_n * block_k // (32 * warps)
                    if 16 <= each <= 64 and block_k < 2 * inner:
                        yield "gemv", block_n, block_k, warps
        return
    width, block_m = out // double, max(16, 1 << (rows - 1).bit_length())
    for block_n, block_k, warps in ((32, 128, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 8)):
        tiles, chunks = -(-width // block_n), -(-inner // block_k)
        stage = 2 * block_k * (double * block_n + block_m)
        deep = min(6, int(0.9 * room) // stage)
        if deep < 2:
            continue
        for split in (1, 2, 3, 4, 6):
            if chunks < 3 * split or (split > 1 and tiles * split > 1200):
                continue
            for stages in sorted({deep, min(deep, 3)}):
                yield "thin", block_n, block_k, split, stages, warps, 2, 0


def default_of(asked: Asked, *, small: bool) -> Way:
    """The way of a shape that nobody measured."""
    width = asked.shape[0] // 2 if asked.gated else asked.shape[0]
    return default_way(asked.rows, width, asked.shape[1], gated=asked.gated, small=small)


def search(
    every: list[Asked],
    bench: Bench,
    seconds: float,
    clock: Callable[[], float],
    *,
    room: int,
    small: bool = False,
    report: Report | None = None,
) -> Report:
    """Look for `seconds`, the largest matrices first; each operation gets its share of what is left. report: what is
    found goes there at once, so that it is known if the search is broken off."""
    report, end = report or Report(), clock() + seconds
    todo = sorted((one for one in every if one.rows <= FEW), key=lambda one: (-one.weight, one.rows, one.name))
    for i, asked in enumerate(todo):
        now = clock()
        if now >= end:
            report.left += 1
            continue
        report.operations += 1
        _search_one(asked, bench, report, (clock, now + (end - now) / (len(todo) - i)), (room, small))
    return report


def _search_one(
    asked: Asked,
    bench: Bench,
    report: Report,
    until: tuple[Callable[[], float], float],
    device: tuple[int, bool],
) -> None:
    clock, stop = until
    base = asked.now if asked.now else default_of(asked, small=device[1])
    try:
        expected, least = bench.result(asked, base), bench.seconds(asked, base)
    except Exception:
        report.unusable += 1
        return
    best, fastest = base, least
    for way in candidates(asked, device[0]):
        if clock() >= stop:
            break
        if way == base:
            continue
        report.tried += 1
        took = _tried(asked, way, bench, expected)
        if took is None:
            report.unusable += 1
        elif took < fastest:
            best, fastest = way, took
    if best == base or fastest * GAIN > least:
        return
    again, then = bench.seconds(asked, base), bench.seconds(asked, best)
    if then * GAIN <= again:
        report.found[asked.name], report.gains[asked.name] = best, again / then


def _tried(asked: Asked, way: Way, bench: Bench, expected: Tensor) -> float | None:
    """Seconds of one call; None: it fails, or its result is another one."""
    try:
        if not _same(bench.result(asked, way), expected):
            return None
        took = bench.seconds(asked, way)
    except Exception:
        return None
    return took if math.isfinite(took) and took > 0.0 else None


def _same(y: Tensor, expected: Tensor) -> bool:
    if y.shape != expected.shape:
        return False
    apart = (y.float() - expected.float()).norm().item()
    return apart <= WRONG * expected.float().norm().item()  # false for NaN, too


@dataclass(frozen=True, slots=True)
class WayFile:
    """What was found on one kind of device by these kernels. The table of measured ways is what it begins with."""

    path: pathlib.Path

    def read(self) -> dict[str, Way]:
        """Found ways; nothing of a file that holds anything else."""
        try:
            held = json.loads(self.path.read_text())
            ways = {str(name): tuple(way) for name, way in held.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}
        return {name: way for name, way in ways.items() if is_way(name, way)}

    def add(self, found: Mapping[str, Way]) -> None:
        """Keep these as well; another process may read or write the file meanwhile."""
        held = {**self.read(), **{name: way for name, way in found.items() if is_way(name, way)}}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(held, indent=0, sort_keys=True).encode())


def way_file(folder: pathlib.Path, device: str, driver: str) -> WayFile:
    """The file of a device's name, its driver, Triton, and the source of these kernels."""
    import triton

    digest = hashlib.blake2b(f"{device} {driver} {triton.__version__}".encode(), digest_size=12)
    for source in sorted(_FILES.glob("products/*.py")) + [_FILES / "common.py"]:
        digest.update(source.read_bytes())
    plain = "".join(letter if letter.isalnum() else "-" for letter in device).lower()
    return WayFile(folder / "ways" / f"{plain}-{digest.hexdigest()}.json")


def once_each(every: list[Asked]) -> list[Asked]:
    """One of each operation, with as many rows as it is meant for."""
    found: dict[str, Asked] = {}
    for asked in every:
        found.setdefault(asked.name, replace(asked, rows=rung_of(asked.rows)))
    return list(found.values())
