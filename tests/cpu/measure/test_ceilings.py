"""Ceilings of a CPU are what our own kernels can reach there; no share of them is above one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tokenmill.core.errors import ParameterError
from tokenmill.measure import ceilings, throughput
from tokenmill.measure.calibration import Speeds, reading_of
from tokenmill.measure.ceilings import read_measured
from tokenmill.measure.devices import NOISE, Device, highest, share
from tokenmill.measure.roofline import Cost, floor
from tokenmill.measure.server_work import fill_shares
from tokenmill.measure.throughput import SHARES
from tokenmill.measure.workloads import Uniform
from tokenmill.server.web import card

TYPES = ("float32", "bfloat16", "float16", "int8", "int4")
DEVICE = Device("this", "here", "cpu", 1 << 30, 10e9, {"bfloat16": 1e12}, 0.0, "measured here", sets=((1e6, 90e9),))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_SHAPE_S", 1e-3)
    monkeypatch.setattr(ceilings, "_SHAPES", ((64, 64, 16),))
    monkeypatch.setattr(ceilings, "_SETS", (1 << 20,))
    monkeypatch.setattr(ceilings, "_READ_BYTES", {"cpu": 4 << 20})


def test_a_type_that_torch_imitates_has_no_false_ceiling(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.Tensor.__matmul__

    def slow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.dtype == torch.float32, "torch's product of an imitated type says nothing of ours"
        return multiply(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", slow)
    found = ceilings.measure_device("cpu", ("bfloat16", "int8"))
    assert set(found.flops) == {"bfloat16", "int8"}


def test_no_type_is_slower_than_the_types_it_can_be_widened_to(quick: None) -> None:
    found = ceilings.measure_device("cpu", TYPES)
    assert set(found.flops) == set(TYPES)
    assert min(found.flops.values()) >= max(found.flops["float32"], found.flops["bfloat16"]) / 1.001


def test_sets_that_stay_in_caches_are_read_faster() -> None:
    assert [reading_of((), 10e9, size) for size in (1e3, 1e12)] == [10e9, 10e9]
    assert [DEVICE.reading(size) for size in (1.0, 1e6)] == pytest.approx([90e9, 90e9])
    assert 10e9 < DEVICE.reading(16e6) < 90e9 and DEVICE.reading(1e9) == 10e9
    assert replace(DEVICE, sets=((1e6, 5e9),)).reading(1e6) == 10e9  # caches are never slower
    cost = Cost()
    cost.weight_bytes["matrices"] = 1e6
    limits = Speeds(10e9, 1e12, sets=DEVICE.sets)
    assert floor(cost, limits).seconds == pytest.approx(1e6 / 90e9)
    served: dict[str, Any] = {"flops": 1.0, "bytes": {"read": 9e9, "written": 0.0}, "seconds": 1.0, "engines": 1}
    assert fill_shares(served, DEVICE, "bfloat16") and served["mbu"] == pytest.approx(0.1)  # the best of what may be
    assert fill_shares(served | {"steps": 9}, DEVICE, "bfloat16")
    assert not fill_shares(slow := {**served, "bytes": {"read": 99e9, "written": 0.0}, "steps": 1}, DEVICE, "bfloat16")
    assert slow["mbu"] is None and slow["mfu"] is not None


def test_a_share_above_one_is_measured_again_and_then_none(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert share(NOISE) == NOISE and share(0.1234567) == 0.123457 and share(66.262) is None
    assert highest(DEVICE, replace(DEVICE, bytes_per_s=20e9, flops={"bfloat16": 5e11})).flops == {"bfloat16": 1e12}
    measured: list[Device] = []

    def measure(device: str, dtypes: tuple[str, ...]) -> Device:
        measured.append(replace(DEVICE, flops=dict.fromkeys(dtypes, 1.0 if len(measured) < lies else 1e15)))
        return measured[-1]

    monkeypatch.setattr(ceilings, "measure_device", measure)
    for lies, times in ((0, 1), (1, 2), (9, 3)):
        measured.clear()
        found = throughput.measure({"model": "demo", "max_model_len": 64}, [Uniform(1, 8, 3)])
        assert len(measured) == times
        assert all(found[name] is None or found[name] <= NOISE for name in SHARES)
        assert (found["mfu"] is None) == (lies == 9) == any("no honest ceiling" in note for note in found["notes"])


def test_the_card_tells_the_ceilings_of_this_model(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = card.kept_ceilings.__globals__["KeptCeilings"](10e9, ((1e6, 90e9),), {"bfloat16": 1e12, "int8": 2e12})
    monkeypatch.setattr(card, "kept_ceilings", lambda device, title: kept)
    details = {"device": "cpu", "device_name": "CPU, 2 threads", "dtype": "bfloat16"}
    told = card._ceilings(details)
    assert told is not None and (told["bytes_per_s"], told["flops"]) == (10e9, 1e12)
    told = card._ceilings({**details, "weight_bytes": 1e6, "quantization": "int4"})
    assert told is not None and (told["bytes_per_s"], told["flops"]) == (pytest.approx(90e9), 2e12)
    told = card._ceilings({**details, "dtype": "float16"})
    assert told is not None and told["flops"] == 0.0  # not measured: none


@pytest.mark.parametrize(("part", "value", "said"), [
    ("read_gb_per_s", 0, "read_gb_per_s is 0, and must be positive"), ("read_gb_per_s", float("nan"), "nan is no"),
    ("memory_bytes", -1, "memory_bytes is -1"), ("memory_bytes", float("inf"), "inf is no measured number"),
    ("tflops", {"float32": 0.0}, "tflops is 0.0"), ("tflops", {"float32": True}, "tflops is True"),
    ("kind", "tpu", "kind is 'tpu', not cpu or gpu"), ("link", {"gb_per_s": float("nan")}, "nan is no"),
    ("title", None, "there is no 'title'"),
])  # fmt: skip
def test_measurements_that_are_none(part: str, value: object, said: str) -> None:
    found = {"title": "x", "kind": "cpu", "memory_bytes": 1 << 30, "read_gb_per_s": 9.0, "tflops": {"float32": 0.1}}
    assert read_measured(found, "here").bytes_per_s == 9e9
    told = {**found, part: value} if value is not None else {n: v for n, v in found.items() if n != part}
    with pytest.raises(ParameterError, match=f"here is not what .* prints: {said}"):
        read_measured(told, "here")
