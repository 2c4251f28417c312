"""What devices can do. Owns: the hardware table (data/devices.json), and how much of a ceiling an engine reaches.

A device is one of the table, or this machine as measured (ceilings.py). Must not know: models.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.measure.calibration import Calibration, Points, Speeds, reading_of

TABLE = Path(__file__).parent / "data" / "devices.json"
CONTEXT_BYTES = {"gpu": 600 << 20, "cpu": 400 << 20}
"""Memory that the process takes before it loads anything: libraries and the device's context."""


@dataclass(frozen=True, slots=True)
class Price:
    """The usual price of an hour of a device, and its date."""

    usd_per_hour: float
    date: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device: memory, ceilings per second, price. `source` says where the numbers come from. sets: measured (bytes,
    bytes per second) of weights that are read over and over and stay in caches."""

    name: str
    title: str
    kind: str
    memory_bytes: int
    bytes_per_s: float
    flops: Mapping[str, float]
    link_bytes_per_s: float
    source: str
    price: Price | None = None
    note: str = ""
    calibration: Calibration | None = None
    sets: Points = ()

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars per hour. None: not known."""
        return self.price.usd_per_hour if self.price else None

    @property
    def price_date(self) -> str:
        """The date of that price."""
        return self.price.date if self.price else ""

    def flops_in(self, dtype: str) -> float | None:
        """Operations per second in this type. None: not known."""
        return self.flops.get(dtype)

    def reading(self, set_bytes: float) -> float:
        """Bytes per second while a step goes through this many bytes."""
        return reading_of(self.sets, self.bytes_per_s, set_bytes)


ABOVE = "a share that is null was above 1: no honest ceiling is known for it here"
NOISE = 1.05
"""A higher share than this shows that the ceiling is too low to be one."""


def share(part: float) -> float | None:
    """A share of a ceiling, rounded. None: it is above 1, so the true ceiling is not known."""
    return round(part, 6) if part <= NOISE else None


def highest(one: Device, other: Device) -> Device:
    """The higher figures of two measurements of a device."""
    sets = zip(one.sets, other.sets, strict=False)
    return replace(
        one,
        bytes_per_s=max(one.bytes_per_s, other.bytes_per_s),
        flops={dtype: max(rate, other.flops.get(dtype, 0.0)) for dtype, rate in one.flops.items()},
        sets=tuple((size, max(rate, again)) for (size, rate), (_, again) in sets),
    )


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The shares of the ceilings that an engine reaches, and the seconds around each step. `source` says why."""

    memory: float
    compute: float
    step_s: float
    source: str
    link: float = 1.0
    link_s: float = 0.0
    calibrated: bool = False


PERFECT = Efficiency(1.0, 1.0, 0.0, "the ceilings themselves")


@dataclass(frozen=True, slots=True)
class Table:
    """Everything in the file."""

    devices: dict[str, Device]
    matches: list[tuple[str, str]]
    efficiency: dict[str, Efficiency]
    notes: list[str] = field(default_factory=list)


@cache
def table() -> Table:
    """The hardware table."""
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    devices = {entry["name"]: _device(entry) for entry in data["devices"]}
    matches = [(entry["match"], entry["name"]) for entry in data["devices"] if "match" in entry]
    shares = {
        kind: Efficiency(e["memory"], e["compute"], e["step_ms"] / 1e3, e["source"], e["link"], e["link_us"] / 1e6)
        for kind, e in data["efficiency"].items()
    }
    return Table(devices, matches, shares, data["notes"])


def find_device(name: str) -> Device:
    """The device of this name in the table."""
    devices = table().devices
    if name.lower() in devices:
        return devices[name.lower()]
    close = difflib.get_close_matches(name.lower(), devices, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ParameterError(
        f"No device is called {name!r}.{hint} Known: {', '.join(devices)}; or cpu, cuda and auto for this machine.",
        param="device",
    )


def recognise(title: str) -> Device | None:
    """The table's entry for a GPU with this name."""
    return next((table().devices[name] for part, name in table().matches if part in title), None)


def efficiency_of(device: Device, given: str | None = None) -> Efficiency:
    """The shares to assume for this device, or `given`: `MEMORY,COMPUTE` or one number for both, in (0, 1]."""
    assumed = table().efficiency["measured" if device.source.startswith("measured") else device.kind]
    if given is None and device.calibration is not None:
        return replace(assumed, source="measured: this engine's kernels by rows, attention, host", calibrated=True)
    if given is None:
        return assumed
    shares = read_shares(given)
    return replace(assumed, memory=shares[0], compute=shares[-1], source="given with --efficiency")


def read_shares(given: str) -> list[float]:
    """The one or two numbers of --efficiency."""
    try:
        shares = [float(part) for part in given.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 2 or not all(math.isfinite(share) and 0 < share <= 1 for share in shares):
        raise ParameterError(
            f"--efficiency takes one or two shares in (0, 1], such as 0.8 or 0.85,0.6 (memory, compute); got {given!r}."
        )
    return shares


def while_reading(device: Device, rate: float) -> Device:
    """The device for a time when plain reads reach this many bytes per second."""
    known = device.calibration
    return replace(device, bytes_per_s=rate, calibration=None if known is None else known.while_reading(rate))


def products_in(kind: str, dtype: str, quantization: str | None) -> str:
    """The type whose speed limits the products: the type of the weights if activations are rounded to it."""
    scheme = (quantization or "").split(",")[0].split("-")[0]
    if kind == "cpu":
        return "int8" if scheme in ("int8", "int4") else dtype
    return scheme if scheme in ("int8", "fp8") else dtype


def speeds(device: Device, dtype: str, efficiency: Efficiency = PERFECT) -> Speeds:
    """What an engine with this efficiency reaches on the device, with products in `dtype`."""
    flops = device.flops_in(dtype)
    if flops is None:
        known = ", ".join(device.flops)
        raise ParameterError(f"{device.title} has no known speed in {dtype} (known: {known}); choose another --dtype.")
    return Speeds(
        bytes_per_s=device.bytes_per_s * efficiency.memory,
        flops_per_s=flops * efficiency.compute,
        link_bytes_per_s=device.link_bytes_per_s * efficiency.link,
        link_s=(device.calibration.link_s if device.calibration else 0.0) or efficiency.link_s,
        step_s=efficiency.step_s,
        sets=tuple((size, rate * efficiency.memory) for size, rate in device.sets),
        calibration=device.calibration if efficiency.calibrated else None,
    )


def _device(entry: Mapping[str, Any]) -> Device:
    return Device(
        name=entry["name"],
        title=entry["title"],
        kind=entry["kind"],
        memory_bytes=entry["memory_mib"] << 20,
        bytes_per_s=entry["gb_per_s"] * 1e9,
        flops={dtype: value * 1e12 for dtype, value in entry["tflops"].items()},
        link_bytes_per_s=entry["link_gb_per_s"] * 1e9,
        source=entry["source"],
        price=Price(entry["usd_per_hour"], entry["price_date"]) if entry["usd_per_hour"] is not None else None,
        note=entry.get("note", ""),
    )
