"""Which way multiplies a shape: measured ones, the nearest of them, and what is cut to fit."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from tokenmill.kernels.triton import kernels
from tokenmill.kernels.triton.common import pow2
from tokenmill.kernels.triton.products import chosen, ways_by_shape
from tokenmill.kernels.triton.products.ways_by_shape import nearest_way, operation, samples
from tokenmill.kernels.triton.quantised.narrow_linear import rungs

TABLES = json.loads(pathlib.Path(ways_by_shape.__file__).with_name("measured.json").read_text())


@pytest.mark.parametrize("device", TABLES)
def test_every_measured_operation_is_well_formed(device: str) -> None:
    table = {name: tuple(way) for name, way in TABLES[device].items()}
    for sample in samples(table):
        assert sample.rung in ways_by_shape.RUNGS
        assert sample.way[0] in ("gemv", "thin", "wide", "blas")
        assert len(sample.way) == {"gemv": 4, "thin": 8, "wide": 1, "blas": 1}[str(sample.way[0])]
        assert sample.way[0] != "gemv" or (sample.rung == 1 and pow2(int(sample.way[2])) == sample.way[2])


@pytest.mark.parametrize("device", TABLES)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 33, 64])
def test_any_common_shape_finds_a_neighbour(device: str, rows: int) -> None:
    known = samples({name: tuple(way) for name, way in TABLES[device].items()})
    for out, inner in ((4000, 3000), (11000, 2304), (896, 4864), (65024, 4544), (5120, 27648)):
        for gated in (False, True)[: 1 + (out > inner)]:  # gates and their partners are never so few
            way = nearest_way(known, rows, (out, inner), gated=gated, normed=True)
            assert way is not None
            if way[0] == "gemv":
                assert rows == 1
                assert int(way[2]) <= pow2(inner)
            if way[0] == "thin":
                assert 1 <= int(way[3]) <= max(1, inner // int(way[2]) // 2)


def test_the_nearest_decides() -> None:
    table = {
        operation(1, (4096, 4096), None, False): ("gemv", 4, 2048, 8),
        operation(1, (1024, 1024), None, False): ("gemv", 2, 1024, 4),
        operation(1, (8192, 4096), "silu_mul", True): ("gemv", 1, 4096, 8),
        operation(32, (4096, 4096), None, False): ("thin", 64, 128, 8, 4, 4, 2, 0),
    }
    known = samples(table)
    assert nearest_way(known, 1, (4096, 4608), gated=False, normed=False) == ("gemv", 4, 2048, 8)
    assert nearest_way(known, 1, (900, 800), gated=False, normed=False) == ("gemv", 2, 1024, 4)
    assert nearest_way(known, 1, (900, 500), gated=False, normed=False) == ("gemv", 2, 512, 4), "no wider than a row"
    assert nearest_way(known, 20, (4096, 1024), gated=False, normed=False) == ("thin", 64, 128, 2, 4, 4, 2, 0)
    assert nearest_way(known, 20, (4096, 4096), gated=True, normed=False) is None
    assert nearest_way(known, 1, (1 << 20, 64), gated=False, normed=False) is None, "too far away"
    assert nearest_way([], 1, (64, 64), gated=False, normed=False) is None


@pytest.mark.parametrize("near", [("gemv", 2, 64, 1), None])
def test_the_nearest_way_of_an_operation_is_looked_up_once(
    near: ways_by_shape.Way | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def look(known: object, rows: int, shape: object, *, gated: bool, normed: bool) -> ways_by_shape.Way | None:
        asked.append(rows)
        return near

    monkeypatch.setattr(chosen, "nearest_way", look)
    backend, weight = kernels.TritonKernels(), torch.randn(64, 64, dtype=torch.float16)
    for rows in (1, 1, 2, 2):
        way = backend.ways.of(torch.randn(rows, 64, dtype=torch.float16), weight, None, None, None, fused=False)
        assert near is None or way == near
    assert asked == [1, 2]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("parts", [False, True])
def test_streams_fill_the_device_and_fit(monkeypatch: pytest.MonkeyPatch, parts: bool, gated: bool) -> None:
    monkeypatch.setattr(ways_by_shape, "multiprocessors", lambda: 132)
    monkeypatch.setattr(ways_by_shape, "shared_memory", lambda: 227 << 10)
    taken = 0
    for width in (64, 512, 896, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 8192, 14336, 29568, 152064):
        for inner in (64, 896, 2048, 4096, 14336, 29568):
            for rows in (2, 16, 17, 64):
                cut = ways_by_shape.stream_cut(rows, width, inner, gated=gated, parts=parts and not gated)
                if cut is None:
                    continue
                taken += 1
                block_n, height, split, stages = cut
                pieces, halves = -(-width // height) * split, 1 + gated
                assert pieces >= 40 and (split == 1 or pieces <= 132)
                assert height % 16 == 0 and height * halves <= block_n <= max(64, 2 * height * halves - 1)
                assert (split > 1) == (parts and not gated) and inner // split > 3 * 64 * (split > 1)
                ring = stages * 2 * 64 * (block_n + max(16, pow2(rows)))
                assert stages >= 3 and ring + block_n * max(16, pow2(rows)) < 227 << 10
    assert taken > 100


MEASURED = {  # output columns, columns, gated, parts: the fastest tiles of those that were measured on an H200, 32 rows
    (6144, 4096, False, False): (64, 64, 1, 12), (4096, 4096, False, True): (128, 128, 4, 8),
    (14336, 4096, True, False): (128, 64, 1, 8), (4096, 14336, False, True): (128, 128, 4, 8),
    (18944, 3584, True, False): (128, 48, 1, 11), (3584, 18944, False, True): (128, 112, 4, 10),
    (8192, 2048, True, False): (128, 64, 1, 8), (3072, 2048, False, False): (64, 64, 1, 12),
}  # fmt: skip


@pytest.mark.parametrize("product", MEASURED, ids=str)
def test_streams_are_cut_as_was_fastest(monkeypatch: pytest.MonkeyPatch, product: tuple[int, int, bool, bool]) -> None:
    monkeypatch.setattr(ways_by_shape, "multiprocessors", lambda: 132)
    monkeypatch.setattr(ways_by_shape, "shared_memory", lambda: 227 << 10)
    width, inner, gated, parts = product
    assert ways_by_shape.stream_cut(32, width, inner, gated=gated, parts=parts) == MEASURED[product]


def test_few_long_pieces_are_left_to_programs_that_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an 8B's last matrix of a layer, whose sum goes over ranks: 64 programs would copy for 25 us."""
    monkeypatch.setattr(ways_by_shape, "multiprocessors", lambda: 132)
    monkeypatch.setattr(ways_by_shape, "shared_memory", lambda: 227 << 10)
    assert ways_by_shape.stream_cut(32, 4096, 7168) is None
    assert ways_by_shape.stream_cut(32, 512, 4096) is None


ROUNDED = {  # output columns, columns, gated: the fastest tiles of float8 on an H200, 32 rows, or as fast within 4 %
    (6144, 4096, False): (64, 64, 1, 12), (12288, 4096, True): (128, 48, 1, 11), (4096, 12288, False): (64, 64, 1, 12),
    (14336, 4096, True): (128, 64, 1, 8), (18944, 3584, True): (128, 48, 1, 11), (8192, 3072, True): (128, 64, 1, 8),
    (3584, 3584, False): (64, 64, 1, 12), (151936, 4096, False): (128, 128, 1, 8),
}  # fmt: skip


@pytest.mark.parametrize("product", ROUNDED, ids=str)
def test_streams_of_float8_are_cut_as_was_fastest(monkeypatch: pytest.MonkeyPatch, product: Any) -> None:
    monkeypatch.setattr(ways_by_shape, "multiprocessors", lambda: 132)
    monkeypatch.setattr(ways_by_shape, "shared_memory", lambda: 227 << 10)
    width, inner, gated = product
    assert ways_by_shape.stream_cut(32, width, inner, gated=gated, size=1) == ROUNDED[product]


def test_what_is_good_for_many_rows_is_not_taken_for_few() -> None:
    """A packed product of 20 rows that was measured for 256 only has a way of its own."""
    assert rungs(1) == [1] and rungs(5) == [8, 16, 32, 64] and rungs(64) == [64]
    assert rungs(65) == [128, 256, 512, 0] and rungs(5000) == [0]
