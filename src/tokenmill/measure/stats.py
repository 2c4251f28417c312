"""Numbers about numbers. Owns: percentiles and their rounding. Must not know: engines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokenmill.core.errors import ParameterError

PERCENTILES = (50, 90, 95, 99)
SAMPLES = 2000


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the neighbours. `ordered` ascends and is not empty."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def read_percentiles(text: str) -> tuple[float, ...]:
    """Read `50,90,99.9`, which must ascend."""
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 <= percent <= 100 for percent in found):
        raise ParameterError(f"--percentiles takes numbers from 0 to 100, such as 50,90,99.9; got {text!r}.")
    return tuple(found)


def summary_ms(seconds: Sequence[float], more: Sequence[float] = ()) -> dict[str, float | None]:
    """p50, p90, p95, p99, `more` percentiles and the mean in milliseconds. Null: there are no values."""
    every = sorted({*map(float, PERCENTILES), *more})
    if not seconds:
        return {**{f"p{p:g}": None for p in every}, "mean": None}
    ordered = sorted(seconds)
    found: dict[str, float | None] = {f"p{p:g}": round(1000 * percentile(ordered, p), 4) for p in every}
    found["mean"] = round(1000 * sum(ordered) / len(ordered), 4)
    return found


def thin(seconds: Sequence[float]) -> list[float]:
    """At most SAMPLES of these times in milliseconds: all, or evenly spaced ones of the sorted times."""
    ordered = sorted(seconds)
    if len(ordered) > SAMPLES:
        ordered = [percentile(ordered, 100 * i / (SAMPLES - 1)) for i in range(SAMPLES)]
    return [round(1000 * value, 4) for value in ordered]
