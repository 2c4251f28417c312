"""Stored measurements of this machine, so that nobody waits for them twice. Owns: where they lie, for which machine,
program and types they hold, and until when. Must not know: torch, how anything is measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenmill
from tokenmill.core.config import cache_dir
from tokenmill.core.cores import usable_cores
from tokenmill.core.whole_file import write_whole
from tokenmill.measure.calibration import Points

FORM = 2
"""The version of measurements. Other versions are not read, because their numbers may mean something else."""
EXPERTS = "experts"
"""The name beside the types if mixtures of experts were measured, too."""
_SHORT = ".short.json"
LASTS_S = 30 * 86400.0
"""How long a measurement is used. Machines get other neighbours, drivers and clocks."""


def machine(title: str) -> str:
    """The facts that identify a machine and its device as far as speed goes."""
    names: list[str] = []
    cores = usable_cores()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return "; ".join([title, f"{cores} cores", *sorted(set(names)), f"tokenmill {tokenmill.__version__}, {FORM}"])


def _stem(device: str, title: str) -> str:
    return f"{device.replace(':', '-')}-{hashlib.sha256(machine(title).encode()).hexdigest()[:16]}"


def read_kept(device: str, title: str, types: tuple[str, ...]) -> dict[str, Any] | None:
    """The last measurement here of at least these types; a complete one is preferred to a short one. None: there is
    none, or it is too old or damaged."""
    found: list[tuple[bool, float, Path]] = []
    with contextlib.suppress(OSError):
        for place in (cache_dir() / "measured").glob(f"{_stem(device, title)}.*.json"):
            if set(types) <= set(place.name.split(".")[1].split("+")):
                found.append((not place.name.endswith(_SHORT), place.stat().st_mtime, place))
    for _, at, place in sorted(found, reverse=True):
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(place.read_text(encoding="utf-8"))
            if 0 <= time.time() - at < LASTS_S and isinstance(kept, dict):
                return kept
    return None


def keep_measurement(found: dict[str, Any], device: str, title: str, types: tuple[str, ...]) -> Path | None:
    """Store a complete measurement. None: nothing can be written there."""
    kind = _SHORT if (found.get("calibration") or {}).get("short") else ".json"
    place = cache_dir() / "measured" / f"{_stem(device, title)}.{'+'.join(sorted(types))}{kind}"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps(found).encode())
    except OSError:
        return None
    return place


@dataclass(frozen=True, slots=True)
class KeptCeilings:
    """What a machine reached: bytes per second from memory, and for sets by their size; operations by type."""

    bytes_per_s: float
    sets: Points
    flops: dict[str, float]


def kept_ceilings(device: str, title: str) -> KeptCeilings | None:
    """What this machine reached. None: it was never measured."""
    found = read_kept(device, title, ()) or {}
    try:
        return KeptCeilings(
            1e9 * float(found["read_gb_per_s"]),
            tuple((float(size), 1e9 * float(rate)) for size, rate in found.get("set_gb_per_s", ())),
            {dtype: 1e12 * float(rate) for dtype, rate in found["tflops"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
