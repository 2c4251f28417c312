"""Two results side by side. Owns: ratios, and their confidence by bootstrap. Must not know: engines, terminals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.core.errors import ParameterError
from tokenmill.measure.result_files import read_json

RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
RESAMPLES = 2000
CONFIDENCE = 0.95


def read_result(path: Path) -> dict[str, Any]:
    """Read a result that `bench --json` wrote."""
    found = read_json(path)
    if not isinstance(found, dict) or not (found.get("bench") == "startup" or any(name in found for name in RATES)):
        raise ParameterError(f"{path} is not a result of `tokenmill bench`.")
    return found


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of metric, old, new, ratio = new / old, and its confidence interval if there are samples.

    If both files hold several runs of the load, the runs are resampled (basis "runs"). Otherwise latencies are
    resampled over requests, which says nothing about how much one run differs from the next."""
    kinds = [result.get("bench", "throughput") for result in (old, new)]
    if kinds[0] != kinds[1]:
        raise ParameterError(
            f"These are results of `bench {kinds[0]}` and `bench {kinds[1]}`: their figures do not mean the same."
        )
    if kinds[0] == "startup":
        return _stages(old, new)
    rows = []
    for name in RATES:
        if old.get(name) and new.get(name):
            a, b = ([float(run[name]) for run in _runs(result)] for result in (old, new))
            rows.append(_row(name, old[name], new[name], _interval(a, b, 50), "runs"))
    for name in TIMES:
        for percent in (50, 99):
            before, after = (result.get(name, {}).get(f"p{percent}") for result in (old, new))
            if not before or not after:
                continue
            a, b = ([float(run[name][f"p{percent}"]) for run in _runs(result)] for result in (old, new))
            sure, basis = _interval(a, b, 50), "runs"
            if sure is None:
                a, b = (result.get("samples", {}).get(name) or [] for result in (old, new))
                sure, basis = _interval(a, b, percent), "requests"
            rows.append(_row(f"{name} p{percent}", before, after, sure, basis))
    return rows


def _stages(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds from the start of a process to each stage, resampled over processes."""
    rows = []
    for stage, before in old["stages_s"].items():
        a, b = ([float(run[stage]) for run in result["runs"]] for result in (old, new))
        rows.append(_row(f"{stage} s", before, new["stages_s"][stage], _interval(a, b, 50), "runs"))
    return rows


def _interval(old: Sequence[float], new: Sequence[float], percent: float) -> tuple[float, float] | None:
    """The interval, if both sides have more than one value."""
    return ratio_interval(old, new, percent) if min(len(old), len(new)) > 1 else None


def ratio_interval(old: Sequence[float], new: Sequence[float], percent: float) -> tuple[float, float] | None:
    """The 95 % confidence interval of percentile(new) / percentile(old). None: old is 0."""
    source = np.random.default_rng(0)
    tops, bottoms = (_resampled(np.asarray(values, dtype=float), percent, source) for values in (new, old))
    if not np.all(bottoms > 0):
        return None
    ratios = tops / bottoms
    edge = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, (edge, 100 - edge))
    return float(low), float(high)


def _resampled(values: np.ndarray, percent: float, source: np.random.Generator) -> np.ndarray:
    """The percentile of each of RESAMPLES samples drawn with replacement, in bounded slices."""
    found = []
    for _ in range(RESAMPLES // 100):
        picks = source.integers(0, len(values), size=(100, len(values)))
        found.append(np.percentile(values[picks], percent, axis=1))
    return np.concatenate(found)


def _runs(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of one load. Empty: the runs differ in their requests."""
    runs = result.get("runs", [])
    return runs if len({run.get("workload") for run in runs}) == 1 else []


def _row(name: str, old: float, new: float, sure: tuple[float, float] | None, basis: str) -> dict[str, Any]:
    low, high = (None, None) if sure is None else (round(sure[0], 4), round(sure[1], 4))
    certain = None if sure is None else not sure[0] <= 1.0 <= sure[1]
    found = {"metric": name, "old": old, "new": new, "ratio": round(new / old, 4), "low": low, "high": high}
    return {**found, "sure": certain, "basis": None if sure is None else basis}
