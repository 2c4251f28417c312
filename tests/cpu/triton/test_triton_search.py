"""The search for faster products: it finds what is planted, keeps its budget, and never keeps nonsense."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass, field

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.products import ways_by_shape
from tokenmill.kernels.triton.products.search import (
    Asked,
    Report,
    WayFile,
    candidates,
    default_of,
    once_each,
    search,
    way_file,
)
from tokenmill.kernels.triton.products.ways_by_shape import Way, is_way, operation

ROOM = 227 << 10
BASE: Way = ("thin", 64, 128, 1, 4, 4, 2, 0)


def asked(rows: int = 32, shape: tuple[int, int] = (4096, 4096), act: str | None = None, now: Way = BASE) -> Asked:
    return Asked(rows, shape, act, act is not None, False, False, torch.bfloat16, now)


@dataclass
class Planted:
    """A device on which one way is best. Its clock moves with what is tried."""

    best: Way
    broken: set[Way] = field(default_factory=set)
    wrong: set[Way] = field(default_factory=set)
    each_s: float = 0.1
    now: float = 0.0
    tried: list[tuple[str, Way]] = field(default_factory=list)
    gain: float = 2.0
    fails_now: bool = False

    def result(self, one: Asked, way: Way) -> torch.Tensor:
        self.tried.append((one.name, way))
        if way in self.broken:
            raise OutOfResources(263168, 232448, "shared memory")
        if self.fails_now and way == one.now:
            raise RuntimeError("not even the default")
        y = torch.ones(4)
        return y * (1.1 if way in self.wrong else 1.001 if way != one.now else 1.0)

    def seconds(self, one: Asked, way: Way) -> float:
        self.now += self.each_s
        return 1e-5 / self.gain if way == self.best else 1e-5

    def clock(self) -> float:
        return self.now


def run(device: Planted, every: list[Asked], seconds: float = 1e6) -> Report:
    return search(every, device, seconds, device.clock, room=ROOM)


def test_what_is_found_is_known_if_the_search_is_broken_off() -> None:
    every = [asked(8, (4096, 4096)), asked(8, (2048, 2048))]
    best = next(way for way in candidates(every[0], ROOM) if way != every[0].now)
    device, report = Planted(best), Report()
    seen: list[str] = []

    class Broken(Planted):
        def result(self, one: Asked, way: Way) -> torch.Tensor:
            seen.append(one.name)
            if len(set(seen)) == 2:
                raise KeyboardInterrupt
            return device.result(one, way)

    with pytest.raises(KeyboardInterrupt):
        search(every, Broken(best), 1e6, device.clock, room=ROOM, report=report)
    assert report.found == {seen[0]: best}


@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize("act", [None, "silu_mul"])
def test_the_planted_way_is_found(rows: int, act: str | None) -> None:
    one = asked(rows, act=act, now=default_of(asked(rows, act=act), small=False))
    every = [way for way in candidates(one, ROOM) if way != one.now]
    assert len(every) == len(set(every)) > 5
    for best in (every[0], every[len(every) // 2], every[-1]):
        report = run(Planted(best), [one])
        assert report.found == {one.name: best}
        assert report.gains[one.name] == pytest.approx(2.0)
        assert is_way(one.name, best), "what may be found can be kept"


def test_what_fails_or_is_wrong_is_not_kept() -> None:
    every = [way for way in candidates(asked(), ROOM) if way != BASE]
    for device in (Planted(every[3], broken={every[3]}), Planted(every[3], wrong={every[3]})):
        report = run(device, [asked()])
        assert not report.found and report.unusable == 1 and report.tried == len(every)
    assert run(Planted(every[3], broken=set(every[:3])), [asked()]).found == {asked().name: every[3]}
    failing = run(Planted(every[3], fails_now=True), [asked()])
    assert not failing.found and failing.unusable == 1, "nothing to compare with"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_times_that_are_none_do_not_win(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Planted(("blas",))
    plain = device.seconds
    monkeypatch.setattr(device, "seconds", lambda one, way: plain(one, BASE) if way == BASE else seconds)
    assert not run(device, [asked()]).found


def test_noise_is_not_a_gain() -> None:
    assert not run(Planted(("blas",), gain=1.01), [asked()]).found
    device = Planted(("blas",))
    plain, lucky = device.seconds, [True]

    def once(one: Asked, way: Way) -> float:
        took = plain(one, BASE)
        return took / 3 if way == ("blas",) and lucky and lucky.pop() else took

    device.seconds = once  # type: ignore[method-assign]
    assert not run(device, [asked()]).found, "it was faster only once"


def test_the_budget_is_kept_and_shared() -> None:
    every = [asked(shape=(4096, 1024 * n)) for n in (1, 4, 2, 8, 3)]
    device = Planted(("none",))
    report = run(device, every, seconds=5.0)
    assert device.now <= 5.0 + 5 * 3 * device.each_s
    order = list(dict.fromkeys(name for name, _ in device.tried))
    assert order == [operation(32, (4096, 1024 * n), None, False) for n in (8, 4, 3, 2, 1)], "the largest first"
    assert report.operations == 5 and report.left == 0
    late = run(Planted(("none",), each_s=3.0), every, seconds=1.0)
    assert late.operations == 1 and late.left == 4
    assert run(Planted(("none",)), every, seconds=0.0).left == 5


@pytest.mark.parametrize("room", [99 << 10, 163 << 10, ROOM])
@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 42), (152064, 3584), (28672, 576)])
def test_candidates_fit(room: int, shape: tuple[int, int]) -> None:
    for rows in (1, 5, 16, 33, 64):
        for way in candidates(asked(rows, shape), room):
            assert is_way(operation(rows, shape, None, False), way), way
            if way[0] == "thin":
                _, block_n, block_k, _, stages, *_ = (int(n) if n != "thin" else 0 for n in way)
                rung = next(r for r in ways_by_shape.RUNGS if rows <= r)
                assert 2 * block_k * (block_n + max(16, rung)) * stages <= room


def test_one_search_serves_all_rows_of_a_rung() -> None:
    found = once_each([asked(17), asked(20), asked(32), asked(33)])
    assert [one.rows for one in found] == [32, 64]


GOOD = operation(32, (64, 64), None, False)


def test_the_file_keeps_what_is_sound(tmp_path: pathlib.Path) -> None:
    file = WayFile(tmp_path / "deep" / "ways.json")
    assert file.read() == {}
    file.add({GOOD: BASE})
    file.add({operation(1, (64, 64), None, True): ("gemv", 2, 512, 4)})
    assert file.read()[GOOD] == BASE and len(file.read()) == 2
    file.add({GOOD: ("thin", 3, 128, 1, 4, 4, 2, 0)})
    assert file.read()[GOOD] == BASE, "nonsense is not written"
    for text in ("", "[]", "{", '{"x": 3}', json.dumps({GOOD: ["gemv", 2, 512, 4]}), json.dumps({"a b": ["blas"]})):
        file.path.write_text(text)
        assert file.read() == {}, text
    assert not list(file.path.parent.glob("ways.[0-9]*")), "nothing is left of writing"


@pytest.mark.parametrize("changed", ["device", "driver"])
def test_another_device_or_driver_has_its_own(tmp_path: pathlib.Path, changed: str) -> None:
    named = {"device": "NVIDIA H200", "driver": "13000"}
    assert way_file(tmp_path, **named) == way_file(tmp_path, **named)
    assert way_file(tmp_path, **named) != way_file(tmp_path, **{**named, changed: "other"})


def test_the_table_is_sound() -> None:
    tables = json.loads(pathlib.Path(ways_by_shape.__file__).with_name("measured.json").read_text())
    for table in tables.values():
        assert all(is_way(name, tuple(way)) for name, way in table.items() if way != ["wide"])


def test_a_model_asks_and_forced_ways_are_taken() -> None:
    """In the interpreter: what was multiplied is known, and each way of it gives the same numbers."""
    kernels = TritonKernels()
    x, weight = torch.randn(3, 128).half(), torch.randn(64, 128).half()
    kernels.product(x, weight)
    (one,) = kernels.ways.asked.values()
    assert (one.rows, one.shape, one.now[0]) == (3, (64, 128), "thin")
    forced = kernels._forced(one.name, ("blas",), x, weight, None, None, None)
    torch.testing.assert_close(forced, kernels.product(x, weight), atol=0.05, rtol=0.02)
    assert one.name not in kernels.ways.known, "as it was before"


def test_steady_kernels_are_not_searched() -> None:
    kernels = TritonKernels(steady=True)
    kernels.ways.asked["some"] = asked()
    report = search(once_each([]), Planted(("blas",)), 1.0, lambda: 0.0, room=ROOM)
    assert report == Report() and kernels.ways.found is None


def test_ways_of_other_ranks_are_taken() -> None:
    kernels = TritonKernels()
    ways = kernels.ways
    ways.table, ways.own = {"linear:1:8x8": ("blas",)}, {}
    name = operation(1, (32, 64), None, False)
    kernels.take_ways({name: ["gemv", 1, 256, 2], "nonsense": ["no way"]})  # as messages bring them
    assert kernels.found_ways() == {name: ("gemv", 1, 256, 2)}
    assert ways.known[name] == ("gemv", 1, 256, 2) and ways.known["linear:1:8x8"] == ("blas",)
    kernels.take_ways({})
    assert name not in ways.known and ways.known["linear:1:8x8"] == ("blas",)
