"""`bench latency`: one fixed batch, again and again. Owns: what is reported. Must not know: terminals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.measure.stats import summary_ms
from tokenmill.measure.throughput import Progress, measure
from tokenmill.measure.workloads import Uniform


def latency(
    options: Mapping[str, Any], batch: Uniform, *, repeat: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Run the same batch `repeat` times on one engine. The figures at the top are those of the median run."""
    found = measure(options, [batch] * repeat, progress=progress)
    runs = sorted(found["runs"], key=lambda run: run["seconds"])
    middle = runs[(len(runs) - 1) // 2]
    return {**found, **middle, "bench": "latency", "latency_ms": summary_ms([run["seconds"] for run in runs])}
