"""Which way multiplies a shape: measured ones, the nearest of them, and what is cut to fit."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

pytest.importorskip("triton")

from tokenmill.kernels.triton import kernels
from tokenmill.kernels.triton.common import pow2
from tokenmill.kernels.triton.products import chosen, ways_by_shape
from tokenmill.kernels.triton.products.ways_by_shape import nearest_way, operation, samples

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
