"""What this machine reaches, measured in seconds. Owns: plain reads, copies, and large products per type.

Must not know: models. On a GPU work is queued several times before it is waited for, so that launching costs nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.core.errors import ParameterError
from tokenmill.core.forward import StoredMatrix
from tokenmill.device.memory import describe, devices_like, total_bytes
from tokenmill.kernels import make_kernels
from tokenmill.measure.calibration import read_calibration
from tokenmill.measure.devices import Device, recognise, while_reading
from tokenmill.measure.files import read_json

_READ_BYTES = {"cpu": 256 << 20, "gpu": 2 << 30}
_LINK_BYTES = 256 << 20
_SIDE = {"cpu": 1024, "gpu": 8192}
_INTEGER_ROWS = 256
_ROUNDS = 5
_FLOATS = ("float32", "bfloat16", "float16")


def ceilings(device: str, dtypes: tuple[str, ...]) -> Device:
    """What a run on this device is compared with: its data sheet if it is in the table, else what is measured now."""
    known = recognise(describe(device)) if device.startswith("cuda") else None
    return known or measure_device(device, dtypes)


def measure_device(device: str, dtypes: tuple[str, ...] = ("float32", "bfloat16", "int8")) -> Device:
    """This machine's device, measured."""
    found = measure(device, dtypes)
    return read_measured(found, f"measured on {device}")


def measure(device: str, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Plain JSON: read and copy GB/s, TFLOP/s per type; a type that this device cannot multiply is left out."""
    kind = "cpu" if device == "cpu" else "gpu"
    tflops = {}
    for dtype in dtypes:
        rate = _products(device, kind, dtype)
        if rate is not None:
            tflops[dtype] = round(rate / 1e12, 5)
    data = torch.ones(_READ_BYTES[kind] // 4, device=device)
    read = data.nbytes / _best(lambda: data.sum(), data)
    half = len(data) // 2
    copied = 2 * 4 * half / _best(lambda: data[:half].copy_(data[half : 2 * half]), data)
    return {
        "device": device,
        "title": describe(device),
        "kind": kind,
        "memory_bytes": total_bytes(device),
        "read_gb_per_s": round(read / 1e9, 3),
        "copy_gb_per_s": round(copied / 1e9, 3),
        "tflops": tflops,
        "link": link(*devices_like(device)[:2]),
    }


def reading(device: str, seconds: float = 0.2) -> float:
    """Bytes per second that plain reads reach at this moment, the median over so many seconds; calibrations have it
    beside every curve, because a shared host gives more or less of its memory within minutes."""
    data = torch.ones(_READ_BYTES["cpu" if device == "cpu" else "gpu"] // 4, device=device)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _ROUNDS or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        data.sum().item()
        times.append(time.perf_counter() - start)
    return data.nbytes / statistics.median(times)


def link(here: str, there: str | None = None) -> dict[str, float] | None:
    """GB/s and microseconds of copies from one device to another; None: there is no other one."""
    if there is None:
        return None
    large, small = (torch.ones(count, device=here) for count in (_LINK_BYTES // 4, 1))
    into, probe = torch.empty_like(large, device=there), torch.empty_like(small, device=there)
    rate = large.nbytes / _best(lambda: into.copy_(large), into)
    return {"gb_per_s": round(rate / 1e9, 3), "us": round(1e6 * _best(lambda: probe.copy_(small), probe), 3)}


def read_measured(found: Mapping[str, Any], source: str) -> Device:
    """A device from what `measure` gave."""
    try:
        return Device(
            name="this",
            title=found["title"],
            kind=found["kind"],
            memory_bytes=int(found["memory_bytes"]),
            bytes_per_s=float(found["read_gb_per_s"]) * 1e9,
            flops={str(dtype): float(rate) * 1e12 for dtype, rate in found["tflops"].items()},
            link_bytes_per_s=1e9 * float((found.get("link") or {}).get("gb_per_s", 0.0)),
            calibration=read_calibration(found.get("calibration")),
            source=source if source.startswith("measured") else f"measured, from {source}",
        )
    except ParameterError as error:
        raise ParameterError(f"{source}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ParameterError(f"{source} is not what `tokenmill doctor --measure --json` prints ({error!r}).") from error


def load_measured(path: Path) -> Device:
    """A device from a file with the output of `tokenmill doctor --measure --json`."""
    found = read_json(path)
    found = found.get("measured", found) if isinstance(found, dict) else {}
    return read_measured(found, str(path))


def now_here(device: Device) -> Device:
    """A measured CPU that is this machine's, as its memory is read at this moment; others as they were."""
    known = device.calibration
    if device.kind != "cpu" or known is None or not known.reads or device.title != describe("cpu"):
        return device
    rate = reading("cpu")
    least, most = (f"{1e-9 * end:.0f}" for end in (known.reads[0], known.reads[-1]))
    then = f"{least} to {most}" if least != most else least
    note = f"plain reads reach {1e-9 * rate:.0f} GB/s now, and {then} while this was calibrated: predictions follow"
    return replace(while_reading(device, rate), note=note)


def _products(device: str, kind: str, dtype: str) -> float | None:
    """Operations per second of a large product; None: there is none in this type."""
    side = _SIDE[kind]
    if dtype in _FLOATS:
        a = torch.ones(side, side, dtype=getattr(torch, dtype), device=device)
        return 2.0 * side**3 / _best(lambda: a @ a, a)
    if dtype not in ("int8", "int4"):
        return None
    kernels, bits = make_kernels(device), 8 if dtype == "int8" else 4
    weight = torch.ones(4 * side, side, dtype=torch.float32, device=device)
    codes, scales = kernels.quantise(weight, bits, 32)
    parts = ("codes", codes), ("scales", scales)
    packed = kernels.pack(StoredMatrix(dtype, (4 * side, side), parts, lambda: weight))
    if packed is None:
        return None
    x = torch.ones(_INTEGER_ROWS, side, dtype=torch.bfloat16, device=device)
    return 2.0 * _INTEGER_ROWS * 4 * side * side / _best(lambda: kernels.product(x, packed), x)


def _best(work: Callable[[], object], probe: Tensor) -> float:
    """Seconds of one piece of work in the quickest of a few rounds, the first left out."""
    times = []
    inner = 1 if probe.device.type == "cpu" else 8
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        for _ in range(inner):
            work()
        probe.view(-1)[0].item()
        times.append((time.perf_counter() - start) / inner)
    return min(times[1:])
