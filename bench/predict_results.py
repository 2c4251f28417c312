"""Results of `bench throughput` against what is predicted from a calibration, on any machine. JSON on stdout.

python bench/predict_results.py CEILINGS.json MEASURED.json...

CEILINGS.json: what `tokenmill doctor --measure --json` printed on the device, or a device's name in the table. Each
MEASURED.json: a list of {"model": folder, "options": {...}, "workload": file, "output_tokens_per_s": ...}, with the
options that `bench throughput --json` notes. Nothing is run: this needs no device.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from typing import Any

from tokenmill.core.config import make_config
from tokenmill.measure.ceilings import load_measured
from tokenmill.measure.devices import efficiency_of, find_device
from tokenmill.measure.plan import Setup, read_model
from tokenmill.measure.simulate import simulate
from tokenmill.measure.workloads import read


def main(ceilings: str, files: list[str]) -> None:
    """Every entry predicted; the errors' median and worst on top."""
    device = load_measured(pathlib.Path(ceilings)) if ceilings.endswith(".json") else find_device(ceilings)
    setup = Setup(device, 1, efficiency_of(device))
    rows: list[dict[str, Any]] = []
    for entry in (entry for name in files for entry in json.loads(pathlib.Path(name).read_text())):
        planner = read_model(make_config({}, model=entry["model"], **entry["options"]), device.kind)
        found = simulate(planner, setup, read(pathlib.Path(entry["workload"])))
        hoped, true = found["output_tokens_per_s"], entry["output_tokens_per_s"]
        name = f"{pathlib.Path(entry['model']).name} {entry['options'].get('quantization') or planner.dtype}"
        error = true / hoped - 1  # of the time
        tpot = found["tpot_ms"]["p50"]
        row = {"what": f"{name} {pathlib.Path(entry['workload']).stem}", "predicted": round(hoped, 1), "measured": true}
        rows.append({**row, "time_off": round(error, 4), "tpot_ms": tpot, "steps": found["steps"]})
        print(json.dumps(rows[-1]), file=sys.stderr)
    errors = [abs(row["time_off"]) for row in rows]
    print(json.dumps({"median_error": statistics.median(errors), "worst_error": max(errors), "rows": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
