"""How fast the hardware could be. Owns: the roofline's two numbers, from data sheets (GPU) or measured here (CPU)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenmill.device.memory import describe

# Data sheets: bytes per second of memory, dense bfloat16 and float16 operations per second. First match counts.
_SHEETS: tuple[tuple[str, float, float], ...] = (
    ("H200", 4.8e12, 989e12),
    ("H100 80GB HBM3", 3.35e12, 989e12),
    ("A100-SXM4-80GB", 2.039e12, 312e12),
    ("A100-SXM4-40GB", 1.555e12, 312e12),
    ("L40S", 0.864e12, 362e12),
    ("RTX 4090", 1.008e12, 165e12),
)
_READ_BYTES = 256 << 20
_SIDE = 1024
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and operations per second at best; None where unknown. `notes` say where the numbers come from."""

    bytes_per_s: float | None
    flops_per_s: float | None
    notes: tuple[str, ...]


def ceilings(device: str, dtype: str) -> Ceilings:
    """What this device reaches in this compute type."""
    return _of_gpu(describe(device), dtype) if device.startswith("cuda") else _of_cpu(getattr(torch, dtype))


def _of_gpu(name: str, dtype: str) -> Ceilings:
    for known, rate, flops in _SHEETS:
        if known in name:
            if dtype in ("bfloat16", "float16"):
                return Ceilings(rate, flops, (f"ceilings of {known} from its data sheet",))
            return Ceilings(rate, None, (f"mfu is null: no ceiling is known for {dtype} on {name}",))
    return Ceilings(None, None, (f"mbu and mfu are null: the ceilings of {name} are not known",))


def _of_cpu(dtype: torch.dtype) -> Ceilings:
    """Measured by torch, best of a few: a large sum, and a product of two matrices."""
    data = torch.ones(_READ_BYTES // 4)
    a = torch.ones(_SIDE, _SIDE, dtype=dtype)
    rate = _READ_BYTES / _best(lambda: data.sum())
    flops = 2 * _SIDE**3 / _best(lambda: a @ a)
    note = (
        f"ceilings measured on this CPU by torch: reads {rate / 1e9:.1f} GB/s, "
        f"{str(dtype).removeprefix('torch.')} products {flops / 1e9:.0f} GFLOP/s"
    )
    return Ceilings(rate, flops, (note,))


def _best(work: Callable[[], object]) -> float:
    """Seconds of the quickest of a few rounds, the first left out."""
    work()
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
