"""Energy counters, read from files and from a driver's library that are made here."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.device import energy


def zone(root: Path, number: str, name: str, used: int, span: int = 1_000_000) -> Path:
    made = root / f"intel-rapl:{number}"
    made.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", str(used)), ("max_energy_range_uj", str(span - 1))):
        (made / file).write_text(f"{text}\n")
    return made


def test_packages_and_memory_are_added_up_beyond_the_counters_end(tmp_path: Path) -> None:
    one, two = zone(tmp_path, "0", "package-0", 500_000), zone(tmp_path, "1", "package-1", 0)
    dram = zone(tmp_path, "0:1", "dram", 10)
    zone(tmp_path, "0:0", "core", 7)  # a part of the package
    zone(tmp_path, "2", "psys", 7)  # all of the machine
    read = energy.energy_reader("cpu", powercap=tmp_path)
    assert read is not None and read() == 0.0
    for place, used in ((one, 900_000), (two, 100_000), (dram, 20)):
        (place / "energy_uj").write_text(str(used))
    assert read() == pytest.approx(0.50001)
    (one / "energy_uj").write_text("100000")  # it began again
    assert read() == pytest.approx(0.70001)
    (one / "energy_uj").unlink()  # nobody may read it any more
    assert read() == pytest.approx(0.70001)


def test_nothing_where_nobody_may_know(tmp_path: Path) -> None:
    assert energy.energy_reader("cpu", powercap=tmp_path) is None
    (zone(tmp_path, "0", "package-0", 5) / "energy_uj").unlink()
    (zone(tmp_path, "1", "package-1", 5) / "energy_uj").write_text("lots")
    assert energy.energy_reader("cpu", powercap=tmp_path) is None
    assert energy.energy_reader("mps") is None and energy.energy_reader("cuda:0") is None


class Library:
    """What NVML does, for one GPU."""

    def __init__(self, *, fails: str = "") -> None:
        self.used, self.fails = 5000, fails

    def nvmlInit_v2(self) -> int:
        return int(self.fails == "init")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return int(uuid != b"GPU-1")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, found: Any) -> int:
        if self.fails == "energy":
            return 3
        found._obj.value = self.used
        return 0


def test_a_gpus_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    read = energy.energy_reader("cuda:0", "GPU-1")
    assert read is not None and read() == 0.0
    library.used += 2500
    assert read() == 2.5
    library.fails = "energy"  # it is lost: the total stays
    assert read() == 2.5
    assert energy.energy_reader("cuda:0", "GPU-1") is None and energy.energy_reader("cuda:0", "GPU-2") is None
    library.fails = "init"
    assert energy.energy_reader("cuda:0", "GPU-1") is None


def test_a_driver_that_is_absent_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise OSError(name)

    for found in (absent, lambda name: SimpleNamespace()):
        monkeypatch.setattr(ctypes, "CDLL", found)
        assert energy.energy_reader("cuda", "GPU-1") is None
