"""What each optimisation is worth on a GPU, over several workloads in one process.

python bench/gpu_ablate.py MODEL FILE.jsonl... [--json OUT] [--only NAME,...]      (dummy weights; table on stdout)
"""

from __future__ import annotations

import argparse
import json
import pathlib

from tokenmill.core.config import make_config
from tokenmill.measure.ablate import switches
from tokenmill.measure.throughput import measure
from tokenmill.measure.workloads import read_workload

WANTED = (
    "recorded steps", "overlapped planning", "fused operations", "dependent launch", "shared prefix read once",
    "own products of many rows", "chunked prefill",
)  # fmt: skip
DETERMINISTIC = ("results that depend on company", {"deterministic": True})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--json", default="")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    options = {
        "model": args.model, "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 32768,
        "max_num_seqs": 512,
    }  # fmt: skip
    found = {switch.name: switch.off for switch in switches(make_config(**options)) if switch.name in WANTED}
    ways = [("everything", {}), *((name, found[name]) for name in WANTED if name in found), DETERMINISTIC]
    if args.only:
        ways = [way for way in ways if way[0] in args.only.split(",")]
    plans = [read_workload(path) for path in args.files]
    rows = []
    for name, off in ways:
        result = measure({**options, **off}, plans, roofline=False)
        row = {"without": name, "off": off, "start": result["startup_s"]}
        row |= {run["workload"]: round(run["seconds"], 4) for run in result["runs"]}
        row["itl_p99_ms"] = {run["workload"]: run["itl_ms"]["p99"] for run in result["runs"]}
        rows.append(row)
        print(" ".join(f"{key}={value}" for key, value in row.items() if key != "off"), flush=True)
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
