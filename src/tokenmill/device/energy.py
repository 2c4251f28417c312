"""How much energy a device uses. Owns: the energy counters of NVIDIA's GPUs (NVML) and of CPU packages (RAPL).

It needs neither torch nor a package: NVML is the driver's own library, RAPL is files of Linux. RAPL counts the whole
package with its memory, whatever uses it, and many systems let only root read it. Must not know: tokens, prices.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"

Reader = Callable[[], float]
"""Joules since some moment in the past."""


def energy_reader(device: str, uuid: str = "", *, powercap: Path = POWERCAP) -> Reader | None:
    """Joules that the device has consumed since now; None where nobody may know. uuid: a GPU's, as NVML names it."""
    if device.startswith("cpu"):
        return _packages(powercap)
    return _nvidia(uuid) if uuid else None


def _packages(powercap: Path) -> Reader | None:
    """All packages of the machine and the memory that is counted apart from them."""
    zones = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if _name(zone).startswith(("package", "dram"))]
    counters = [made for zone in zones if (made := _counter(zone)) is not None]
    return (lambda: sum(read() for read in counters)) if counters else None


def _name(zone: Path) -> str:
    try:
        return (zone / "name").read_text().strip()
    except OSError:
        return ""


def _counter(zone: Path) -> Reader | None:
    """One zone's joules; its own counter begins again at 0 now and then."""
    try:
        last, span = _whole(zone / "energy_uj"), _whole(zone / "max_energy_range_uj") + 1
    except (OSError, ValueError):
        return None
    total = 0

    def read() -> float:
        nonlocal last, total
        with contextlib.suppress(OSError, ValueError):
            now = _whole(zone / "energy_uj")
            total, last = total + (now - last) % span, now
        return total / 1e6

    return read


def _whole(path: Path) -> int:
    return int(path.read_text())


def _nvidia(uuid: str) -> Reader | None:
    try:
        library: Any = ctypes.CDLL(_NVML)
        handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None
        if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)):
            return None
    except (OSError, AttributeError):  # no driver, or one too old
        return None
    first = energy.value

    def read() -> float:
        library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy))  # upon an error: as before
        return (energy.value - first) / 1000

    return read
