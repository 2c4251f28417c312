"""The search at load: when it is made, what is recorded again, and what is said."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.core.config import make_config
from tokenmill.core.errors import ParameterError
from tokenmill.engine.load.kernel_search import warm


@dataclass
class Runner:
    """One that notes what is done to it."""

    found: dict[str, Any] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorders = [SimpleNamespace(forget_all=lambda: self.done.append("forget"))]
        self.ways: dict[str, Any] = {}
        self.kernels = SimpleNamespace(search=self.search, found_ways=lambda: self.ways, take_ways=self.take)

    def warm(self) -> None:
        self.done.append("warm")

    def search(self, seconds: float) -> SimpleNamespace:
        self.done.append(f"search {seconds}")
        self.ways |= self.found
        gains = dict.fromkeys(self.found, 1.5)
        return SimpleNamespace(found=self.found, gains=gains, operations=3, tried=40, unusable=2, left=1)

    def take(self, ways: dict[str, Any]) -> None:
        self.ways = dict(ways)


def run(runner: Runner, **options: Any) -> list[str]:
    reasons: list[str] = []
    warm(make_config(**options).tuning, runner, reasons)  # type: ignore[arg-type]
    return reasons


def test_off_costs_nothing() -> None:
    runner = Runner()
    assert run(runner) == []
    assert runner.done == ["warm"]


def test_what_is_found_is_recorded() -> None:
    runner = Runner({"an operation": ("blas",)})
    (said,) = run(runner, kernel_search="load", kernel_search_seconds=3)
    assert runner.done == ["warm", "search 3", "forget", "warm"]
    assert "1 of 3 products are faster now, up to 1.50 times" in said and "2 unusable" in said
    nothing = Runner()
    run(nothing, kernel_search="load")
    assert nothing.done == ["warm", "search 10.0"], "recordings stay"


def test_ranks_take_the_same_ways() -> None:
    """Only one of two finds anything, and each began with another file: both end with the same, and record again."""
    runners = [Runner({"a": ("blas",)}), Runner()]
    runners[0].ways, runners[1].ways = {"b": ("gemv", 1)}, {"b": ("gemv", 2), "c": ("blas",)}
    told: list[list[Any]] = []
    met = threading.Barrier(2, timeout=60)

    def load(number: int) -> None:
        turn = iter(range(9))

        def share(said: Any) -> list[Any]:
            n = next(turn)
            met.wait()
            if not number:
                told.append([None, None])
            met.wait()
            told[n][number] = said if not isinstance(said, dict) else dict(said)
            met.wait()
            return told[n]

        warm(make_config(kernel_search="load").tuning, runners[number], [], share)  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(load, range(2)))
    assert runners[0].ways == runners[1].ways == {"a": ("blas",), "b": ("gemv", 1), "c": ("blas",)}
    assert [runner.done for runner in runners] == [["warm", "search 10.0", "forget", "warm"]] * 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
def test_no_endless_search(seconds: float) -> None:
    with pytest.raises(ParameterError, match="kernel_search_seconds must"):
        make_config(kernel_search="load", kernel_search_seconds=seconds)
    with pytest.raises(ParameterError, match="kernel_search must be one of"):
        make_config(kernel_search="always")


def test_a_cpu_has_nothing_to_search() -> None:
    runner = Runner()
    runner.kernels = SimpleNamespace()
    (said,) = run(runner, kernel_search="load")
    assert "only products of NVIDIA" in said and runner.done == ["warm"]
