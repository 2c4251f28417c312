"""Numbers about numbers. Owns: percentiles and their rounding. Must not know: engines."""

from __future__ import annotations

import math
from collections.abc import Sequence

PERCENTILES = (50, 90, 95, 99)
SAMPLES = 2000


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the neighbours; `ordered` ascends and is not empty."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p95, p99 and mean in milliseconds; null where there is nothing to sum up."""
    if not seconds:
        return {**{f"p{p}": None for p in PERCENTILES}, "mean": None}
    ordered = sorted(seconds)
    found: dict[str, float | None] = {f"p{p}": round(1000 * percentile(ordered, p), 4) for p in PERCENTILES}
    found["mean"] = round(1000 * sum(ordered) / len(ordered), 4)
    return found


def thin(seconds: Sequence[float]) -> list[float]:
    """At most SAMPLES of these times in milliseconds: all, or evenly spaced ones of the sorted times."""
    ordered = sorted(seconds)
    if len(ordered) > SAMPLES:
        ordered = [percentile(ordered, 100 * i / (SAMPLES - 1)) for i in range(SAMPLES)]
    return [round(1000 * value, 4) for value in ordered]
