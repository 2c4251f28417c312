"""Measurements of this machine are kept by device and types, for a while, and never believed when damaged."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tokenmill.measure import kept_measurements

FOUND: dict[str, Any] = {"read_gb_per_s": 20.0, "set_gb_per_s": [[1e6, 50.0]], "tflops": {"bfloat16": 0.5}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    return tmp_path


def test_what_was_measured_is_found_again() -> None:
    assert kept_measurements.read_kept("cpu", "CPU, 2 threads", ()) is None
    kept_measurements.keep_measurement(FOUND, "cpu", "CPU, 2 threads", ("float32", "bfloat16"))
    assert kept_measurements.read_kept("cpu", "CPU, 2 threads", ("bfloat16",)) == FOUND
    assert kept_measurements.read_kept("cpu", "CPU, 2 threads", ("bfloat16", "int8")) is None
    assert kept_measurements.read_kept("cpu", "CPU, 4 threads", ()) is None
    found = kept_measurements.kept_ceilings("cpu", "CPU, 2 threads")
    assert found == kept_measurements.KeptCeilings(20e9, ((1e6, 50e9),), {"bfloat16": 0.5e12})


def test_what_was_measured_in_another_way_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_measurements.keep_measurement(FOUND, "cpu", "x", ("bfloat16",))
    monkeypatch.setattr(kept_measurements, "FORM", kept_measurements.FORM + 1)
    assert kept_measurements.kept_ceilings("cpu", "x") is None


def test_a_long_measurement_counts_before_a_short_one() -> None:
    short = {**FOUND, "calibration": {"short": True}}
    kept_measurements.keep_measurement(FOUND, "cpu", "x", ("bfloat16", "int8"))
    kept_measurements.keep_measurement(short, "cpu", "x", ("bfloat16",))
    assert kept_measurements.read_kept("cpu", "x", ("bfloat16",)) == FOUND
    kept_measurements.keep_measurement(short, "cpu", "x", ("bfloat16", kept_measurements.EXPERTS))
    assert kept_measurements.read_kept("cpu", "x", ("bfloat16", kept_measurements.EXPERTS)) == short


def test_old_and_damaged_ones_are_not() -> None:
    place = kept_measurements.keep_measurement(FOUND, "cuda:0", "a GPU", ("bfloat16",))
    assert place is not None
    old = time.time() - kept_measurements.LASTS_S - 1
    os.utime(place, (old, old))
    assert kept_measurements.read_kept("cuda:0", "a GPU", ()) is None
    for text in ("", "[]", "{", "null"):
        place.write_text(text)
        assert (
            kept_measurements.read_kept("cuda:0", "a GPU", ()) is None
            and kept_measurements.kept_ceilings("cuda:0", "a GPU") is None
        )
    place.write_text('{"read_gb_per_s": "fast"}')
    assert kept_measurements.kept_ceilings("cuda:0", "a GPU") is None


def test_a_place_that_cannot_be_written_is_no_trouble(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "tokenmill").write_text("a file")
    assert (
        kept_measurements.keep_measurement(FOUND, "cpu", "x", ("int8",)) is None
        and kept_measurements.read_kept("cpu", "x", ()) is None
    )
