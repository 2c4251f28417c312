"""`plan` measures a machine once; a damaged or unfinished measurement is made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.plan import _device
from tokenmill.core.errors import ParameterError
from tokenmill.measure import calibrate, ceilings


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    runs: list[tuple[str, ...]] = []
    lengths: list[bool] = []
    unfinished: list[str] = []

    def measured(device: str, types: tuple[str, ...], **how: Any) -> dict[str, Any]:
        runs.append(types)
        lengths.append(how["short"])
        return {"number": len(runs), "calibration": {"unfinished": list(unfinished)}}

    def read(found: dict[str, Any], source: str) -> Any:
        if "number" not in found:
            raise ParameterError(f"{source} is damaged")
        return found["number"]

    monkeypatch.setattr(calibrate, "measure_calibrated", measured)
    monkeypatch.setattr(ceilings, "read_measured", read)
    monkeypatch.setattr(ceilings, "now_here", lambda device: device)
    types = ("float32", "bfloat16")
    assert [_device("cpu", types), _device("cpu", types), _device("cpu", ("float32",))] == [1, 1, 1]
    assert _device("cpu", types, again=True) == 2 and _device("cpu", types) == 2
    assert lengths == [True, False]
    assert _device("cpu", (*types, "int8")) == 3  # types that were not measured
    (place,) = (tmp_path / "tokenmill" / "measured").glob("*int8*.json")
    for file in place.parent.iterdir():
        file.write_text("{}")
    unfinished.append("host")
    assert [_device("cpu", types), _device("cpu", types)] == [4, 5]  # damaged; then never whole
