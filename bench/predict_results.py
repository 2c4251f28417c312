"""Results of `bench throughput` against what is predicted from a calibration, on any machine. JSON on stdout.

python bench/predict_results.py CEILINGS RESULT.json... [--workloads FOLDER] [--models FOLDER] [--only NAME]

CEILINGS: what `tokenmill doctor --measure --json` printed on the device, or a device's name in the table. RESULT.json:
what `bench throughput --json` wrote there, with all of its runs. FOLDER: where the files of the workloads are, and the
models' folders, if not where they were. Nothing is run: this needs no device. Lines on standard error: the time of a
run, its first tokens and the time of a token, p50, predicted and measured; then memory.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from tokenmill.core.config import make_config
from tokenmill.measure.ceilings import load_measured
from tokenmill.measure.devices import efficiency_of, find_device
from tokenmill.measure.plan import Planner, Setup, peak_in_all, read_model
from tokenmill.measure.simulate import simulate
from tokenmill.measure.workloads import read_workload

FIGURES = ("seconds", "ttft_ms", "tpot_ms")


def figures(found: dict[str, Any]) -> dict[str, float]:
    """Seconds in all, and medians over requests."""
    return {name: found[name] if name == "seconds" else found[name]["p50"] for name in FIGURES}


def compared(found: dict[str, Any], planner: Planner, setup: Setup, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Every run of a result, predicted: alike ones (another seed) once."""
    kinds: dict[str, list[dict[str, float]]] = {}
    files: dict[str, str] = {}
    for run in found["runs"]:
        kind = pathlib.Path(run["workload"]).stem.rsplit("-", 1)[0]
        kinds.setdefault(kind, []).append(figures(run))
        files.setdefault(kind, run["workload"])
    for kind, runs in kinds.items():
        hoped = figures(simulate(planner, setup, read_workload(folder / files[kind])))
        true = {name: statistics.median(run[name] for run in runs) for name in FIGURES}
        row: dict[str, Any] = {"load": kind, "runs": len(runs)}
        for name in FIGURES:
            row[name] = {"predicted": hoped[name], "measured": true[name], "error": hoped[name] / true[name] - 1}
        yield row


def main() -> None:
    """Every result predicted; the errors' median and worst on top."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ceilings")
    parser.add_argument("results", nargs="+", type=pathlib.Path)
    parser.add_argument("--workloads", type=pathlib.Path, default=pathlib.Path("/tmp"))
    parser.add_argument("--models", type=pathlib.Path)
    parser.add_argument("--only", default="", help="loads, with commas between")
    args = parser.parse_args()
    name = args.ceilings
    device = load_measured(pathlib.Path(name)) if name.endswith(".json") else find_device(name)
    setup = Setup(device, 1, efficiency_of(device))
    rows: list[dict[str, Any]] = []
    memory = []
    for path in args.results:
        found = json.loads(path.read_text())
        if args.only:
            found["runs"] = [run for run in found["runs"] if run["workload"].rsplit("-", 1)[0] in args.only.split(",")]
        model = args.models / pathlib.Path(found["model"]).name if args.models else found["model"]
        planner = read_model(make_config({}, **{**found["options"], "model": str(model)}), device.kind)
        held, peak = peak_in_all(planner, device), found["peak_memory_bytes"]
        memory.append(
            {"result": path.stem, "predicted_mib": held >> 20, "measured_mib": peak >> 20, "error": held / peak - 1}
        )
        for row in compared(found, planner, setup, args.workloads):
            rows.append({"result": path.stem, **row})
            shown = (
                f"{n} {v['predicted']:9.3f} {v['measured']:9.3f} {v['error']:+7.1%}"
                for n, v in row.items()
                if n in FIGURES
            )
            print(f"{path.stem:8} {row['load']:8} {'   '.join(shown)}", file=sys.stderr, flush=True)
        print(
            f"{path.stem:8} memory   {held >> 20} {peak >> 20} MiB {held / peak - 1:+.1%}", file=sys.stderr, flush=True
        )
    errors = [abs(row[name]["error"]) for row in rows for name in FIGURES]
    whole = {"figures": len(errors), "median_error": statistics.median(errors), "worst_error": max(errors)}
    print(json.dumps(whole), file=sys.stderr)
    print(json.dumps({**whole, "rows": rows, "memory": memory}, indent=1))


if __name__ == "__main__":
    main()
