"""What this machine reaches, measured in seconds. Owns: reads, copies, and large products per type.

On a CPU this is what our own kernels reach, too, where it is more than torch's: torch may imitate a type that the CPU
lacks, a thousand times slower, and sets of weights that stay in caches are read faster than memory is.
Must not know: models. On a GPU work is queued several times before it is waited for, so that launching costs nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, Kernels, StoredMatrix, Weight
from tokenmill.core.errors import ParameterError
from tokenmill.device.memory import describe, devices_like, total_bytes
from tokenmill.kernels import make_kernels
from tokenmill.measure.calibration import read_calibration
from tokenmill.measure.devices import Device, highest, recognise, while_reading
from tokenmill.measure.result_files import read_json
from tokenmill.quant.detect import from_dense

_READ_BYTES = {"cpu": 256 << 20, "gpu": 2 << 30}
_LINK_BYTES = 256 << 20
_SIDE = {"cpu": 1024, "gpu": 8192}
_INTEGER_ROWS = 256
_ROUNDS = 5
_FLOATS = ("float32", "bfloat16", "float16")
_SHAPES = ((1024, 256, 512), (1024, 1024, 256), (4096, 1024, 256))
"""Out, in and rows of the products that are measured on a CPU. The best one counts."""
_SHAPE_S = 0.1
"""How long a shape is repeated. It runs at least three times, or once if a single product takes longer than this."""
_AGAIN = 2
"""How often ceilings are measured again if a run was faster than they are."""
_SETS = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Bytes of weights that are read over and over on a CPU, besides plain reads of memory."""


def ceilings(device: str, dtypes: tuple[str, ...], passed: Callable[[Device], bool] | None = None) -> Device:
    """The ceilings with which a run on this device is compared: from the data sheet if the device is in the table, else
    measured now. passed: was a run faster than these? Then they were measured while others used the machine, and are
    measured once more."""
    known = recognise(describe(device)) if device.startswith("cuda") else None
    if known is not None:
        return known
    found = measure_device(device, dtypes)
    for _ in range(_AGAIN):
        if passed is None or not passed(found):
            break
        found = highest(found, measure_device(device, dtypes))
    return found


def measure_device(device: str, dtypes: tuple[str, ...] = ("float32", "bfloat16", "int8")) -> Device:
    """Measure this machine's device."""
    found = measure(device, dtypes)
    return read_measured(found, f"measured on {device}")


def measure(device: str, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Plain JSON: read and copy GB/s, TFLOP/s per type. A type that this device cannot multiply is left out."""
    kind = "cpu" if device == "cpu" else "gpu"
    rates = _cpu_products(dtypes) if kind == "cpu" else {dtype: _products(device, dtype) for dtype in dtypes}
    tflops = {dtype: round(rate / 1e12, 5) for dtype, rate in rates.items() if rate is not None}
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
        "set_gb_per_s": _set_reads() if kind == "cpu" else [],
        "tflops": tflops,
        "link": link(*devices_like(device)[:2]),
    }


def reading(device: str, seconds: float = 0.2) -> float:
    """The bytes per second that plain reads reach at this moment, as the median over this many seconds. Calibrations
    have it with every curve, because a shared host's memory speed changes within minutes."""
    data = torch.ones(_READ_BYTES["cpu" if device == "cpu" else "gpu"] // 4, device=device)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _ROUNDS or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        data.sum().item()
        times.append(time.perf_counter() - start)
    return data.nbytes / statistics.median(times)


def link(here: str, there: str | None = None) -> dict[str, float] | None:
    """GB/s and microseconds of copies from one device to another. None: there is no other device."""
    if there is None:
        return None
    large, small = (torch.ones(count, device=here) for count in (_LINK_BYTES // 4, 1))
    into, probe = torch.empty_like(large, device=there), torch.empty_like(small, device=there)
    rate = large.nbytes / _best(lambda: into.copy_(large), into)
    return {"gb_per_s": round(rate / 1e9, 3), "us": round(1e6 * _best(lambda: probe.copy_(small), probe), 3)}


def read_measured(found: Mapping[str, Any], source: str) -> Device:
    """A device made from the result of `measure`."""
    try:
        if odd := next((number for number in _numbers(found) if not math.isfinite(number)), None):
            raise ValueError(f"{odd} is no measured number")
        if found["kind"] not in _READ_BYTES:
            raise ValueError(f"kind is {found['kind']!r}, not {' or '.join(_READ_BYTES)}")
        return Device(
            name="this",
            title=str(found["title"]),
            kind=found["kind"],
            memory_bytes=int(_positive(found["memory_bytes"], "memory_bytes")),
            bytes_per_s=_positive(found["read_gb_per_s"], "read_gb_per_s") * 1e9,
            flops={str(dtype): _positive(rate, "tflops") * 1e12 for dtype, rate in found["tflops"].items()},
            sets=tuple((float(size), 1e9 * float(rate)) for size, rate in found.get("set_gb_per_s", ())),
            link_bytes_per_s=1e9 * float((found.get("link") or {}).get("gb_per_s", 0.0)),
            calibration=read_calibration(found.get("calibration")),
            source=source if source.startswith("measured") else f"measured, from {source}",
        )
    except ParameterError as error:
        raise ParameterError(f"{source}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ParameterError(f"{source} is not what `tokenmill doctor --measure --json` prints: {said}.") from error


def _numbers(found: Any) -> Iterator[float]:
    """All fractions of a JSON value."""
    if isinstance(found, Mapping):
        found = list(found.values())
    for each in found if isinstance(found, list) else ():
        yield from _numbers(each)
    if isinstance(found, float):
        yield found


def _positive(number: Any, name: str) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
        raise ValueError(f"{name} is {number!r}, and must be positive")
    return float(number)


def load_measured(path: Path) -> Device:
    """A device from a file with the output of `tokenmill doctor --measure --json`."""
    found = read_json(path)
    found = found.get("measured", found) if isinstance(found, dict) else {}
    return read_measured(found, str(path))


def now_here(device: Device) -> Device:
    """A measured CPU with the present memory speed, if it is this machine's. Other devices are unchanged."""
    known = device.calibration
    if device.kind != "cpu" or known is None or not known.reads or device.title != describe("cpu"):
        return device
    rate = reading("cpu")
    least, most = (f"{1e-9 * end:.0f}" for end in (known.reads[0], known.reads[-1]))
    then = f"{least} to {most}" if least != most else least
    note = f"plain reads reach {1e-9 * rate:.0f} GB/s now, and {then} while this was calibrated: predictions follow"
    return replace(while_reading(device, rate), note=note)


def _products(device: str, dtype: str) -> float | None:
    """Operations per second of a large product on a GPU. None: not in this type."""
    side = _SIDE["gpu"]
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


def _cpu_products(dtypes: tuple[str, ...]) -> dict[str, float]:
    """Operations per second by type. What a CPU reaches in float32 and bfloat16, it can do for any type, because
    numbers may be widened first, and attention computes in these types whatever the weights are."""
    kernels, side = make_kernels("cpu"), _SIDE["cpu"]
    a = torch.ones(side, side)
    least = 2.0 * side**3 / _best(lambda: a @ a, a)
    own = {dtype: _own_product(kernels, dtype) for dtype in dict.fromkeys(("float32", "bfloat16", *dtypes))}
    least = max(least, own["float32"] or 0.0, own["bfloat16"] or 0.0)
    return {dtype: max(least, rate) for dtype in dtypes if (rate := own[dtype]) is not None}


def _own_product(kernels: Kernels, dtype: str) -> float | None:
    """Operations per second of our product with weights of this type. None: there is no such product."""
    compute = getattr(torch, dtype) if dtype in _FLOATS else torch.bfloat16
    if dtype not in (*_FLOATS, "int8", "int4"):
        return None
    found, ctx = 0.0, _context(kernels)
    with torch.inference_mode():
        for out, width, rows in _SHAPES:
            weight = _weight(kernels, (out, width), compute, None if dtype in _FLOATS else dtype)
            # (float16 is how weights are stored: a CPU computes such models in float32.)
            x = torch.ones(rows, width, dtype=torch.float32 if compute == torch.float16 else compute)
            times = _times(lambda w=weight, x=x: w.matmul(x, ctx))  # type: ignore[misc]
            found = max(found, 2.0 * out * width * rows / min(times))
    return found


def _set_reads() -> list[tuple[int, float]]:
    """(bytes, GB/s) of weights that one row multiplies in turn: how fast a set of this size is read again."""
    kernels, found = make_kernels("cpu"), []
    ctx = _context(kernels)
    with torch.inference_mode():
        for size in _SETS:
            side = 512 if size <= _SETS[0] else 1024
            weights = [_weight(kernels, (side, side), torch.float32, None) for _ in range(size // (4 * side * side))]
            x = torch.ones(1, side)

            def work(weights: list[Weight] = weights, x: Tensor = x) -> None:
                for weight in weights:
                    weight.matmul(x, ctx)

            found.append((size, round(1e-9 * size / min(_times(work)), 3)))
    return found


def _weight(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype, scheme: str | None) -> Weight:
    return from_dense(torch.ones(shape, dtype=dtype), None, scheme).settle(kernels)


def _context(kernels: Kernels) -> ForwardContext:
    """A context that is enough for products."""
    nothing = torch.zeros(1, dtype=torch.int64)
    return ForwardContext(kernels, nothing, nothing, nothing, 1, [], [])


def _times(work: Callable[[], object]) -> list[float]:
    """Seconds of this work on a CPU, repeated."""
    times: list[float] = []
    work()
    begin = time.perf_counter()
    while not times or (len(times) < 3 and times[0] < _SHAPE_S) or time.perf_counter() - begin < _SHAPE_S:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def _best(work: Callable[[], object], probe: Tensor) -> float:
    """Seconds of one piece of work, in the quickest of a few rounds. The first round does not count."""
    times = []
    inner = 1 if probe.device.type == "cpu" else 8
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        for _ in range(inner):
            work()
        probe.view(-1)[0].item()
        times.append((time.perf_counter() - start) / inner)
    return min(times[1:])
