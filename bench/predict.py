"""What `tokenmill plan` predicts against what is measured on this machine. Wants a quiet machine.

python bench/predict.py run MODEL --out OUT.json [--loads 0,1,2] [--ceilings CEILINGS.json]
python bench/predict.py join OUT.json ...             the errors' median and worst over all pieces, as JSON

MODEL: demo, 1b-none, 1b-int8 or 1b-int4. A piece measures the machine first, as `tokenmill doctor --measure` does (or
takes what that printed). What a shared host gives of its memory changes within minutes, so each piece does it anew, and
plain reads are timed for 0.2 s before each load, as `tokenmill plan` does on the machine that was calibrated: nothing
else is known ("before": predicted without these reads). Loads that take less than SPENT seconds are repeated; the
median counts. Before memory is compared, the whole K/V pool is written: a CPU hands out pages at the first write.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tokenmill.core.config import calm_threads, make_config

calm_threads()

sys.path.insert(0, str(pathlib.Path(__file__).parent / "cpu"))

from geometry import GEOMETRY  # noqa: E402

from tokenmill import LLM  # noqa: E402
from tokenmill.device.memory import peak_bytes  # noqa: E402
from tokenmill.measure.calibrate import measure_calibrated  # noqa: E402
from tokenmill.measure.ceilings import read_measured, reading  # noqa: E402
from tokenmill.measure.closed_loop import closed_loop  # noqa: E402
from tokenmill.measure.devices import efficiency_of, while_reading  # noqa: E402
from tokenmill.measure.plan import Setup, held_in_all, read_model, speed_types  # noqa: E402
from tokenmill.measure.simulate import predict  # noqa: E402
from tokenmill.measure.workloads import Uniform  # noqa: E402

LOADS = (
    (1, 128, 64),
    (1, 512, 64),
    (1, 2000, 48),
    (8, 128, 64),
    (8, 1000, 32),
    (32, 64, 48),
    (32, 500, 24),
    (1, 8000, 32),
)
"""(users, prompt tokens, output tokens)"""
FIGURES = ("seconds", "ttft_ms", "tpot_ms")
SPENT, LONGEST, MOST = 1.5, 8.0, 7
TRIES = 2
"""Calibrations, until one is not disturbed."""
CALM = 0.15
"""Cores that others may have in a run that counts."""


def options_of(model: str, folder: pathlib.Path) -> dict[str, Any]:
    """Keywords of LLM."""
    if model == "demo":
        return {"model": "demo", "kv_cache_memory_bytes": 192 << 20, "max_model_len": 8192}
    (folder / "config.json").write_text(json.dumps(GEOMETRY))
    scheme = model.removeprefix("1b-")
    more = {} if scheme == "none" else {"quantization": scheme}
    return {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 8192,
        "kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 32, **more,
    }  # fmt: skip


def run(model: str, loads: list[int]) -> dict[str, Any]:
    """Loads on one engine; nothing is predicted in this process, whose memory counts."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, reader() as read:
        with LLM(**options_of(model, pathlib.Path(folder))) as llm:
            closed_loop(llm.engine, time.perf_counter, Uniform(4, 64, 8).jobs(None, 6000), 4)
            for users, inputs, outputs in (LOADS[i] for i in loads):
                jobs = Uniform(users, inputs, outputs, seed=users).jobs(None, 6000)
                rate = read()
                found = measured(llm, jobs, users)
                rows.append({"users": users, "input": inputs, "output": outputs, "read": rate, **found})
                print(model, json.dumps(rows[-1]), file=sys.stderr, flush=True)
            for storage in llm.engine.executor.runner.pool.storage:  # type: ignore[attr-defined]
                storage.zero_()
            peak = peak_bytes("cpu")
    return {"model": model, "rows": rows, "memory": {"measured": peak}}


def compared(found: dict[str, Any], ceilings: dict[str, Any]) -> dict[str, Any]:
    """What was measured, beside what a calibration predicts of it."""
    device = read_measured(ceilings, "measured here")
    setup = Setup(device, 1, efficiency_of(device))
    with tempfile.TemporaryDirectory() as folder:
        options = options_of(found["model"], pathlib.Path(folder))
        planner = read_model(make_config({}, **options), device.kind)
    rows = []
    for run in found["rows"]:
        users = run["users"]
        jobs = Uniform(users, run["input"], run["output"], seed=users).jobs(None, 6000)
        row = {name: run[name] for name in ("users", "input", "output", "others", "read")}
        now = replace(setup, device=while_reading(device, run["read"]))
        before, hoped = (figures(predict(planner, one, jobs, users)) for one in (setup, now))
        for name, value in hoped.items():
            error = round(value / run[name] - 1, 4)
            row[name] = {"predicted": value, "measured": run[name], "error": error, "before": before[name]}
        rows.append(row)
    memory = {"predicted": held_in_all(planner, device), **found["memory"]}
    return {**found, "rows": rows, "memory": memory, "ceilings": ceilings}


def measured(llm: LLM, jobs: list[Any], users: int) -> dict[str, float]:
    """The medians of as many undisturbed runs as fit into SPENT seconds; `others`: cores that other programs had."""
    runs: list[dict[str, float]] = []
    begin = time.perf_counter()
    while len(runs) < 3 or (time.perf_counter() - begin < SPENT and len(runs) < MOST):
        llm.reset_prefix_cache()
        before = time.perf_counter(), busy(), time.process_time()
        one = figures(closed_loop(llm.engine, time.perf_counter, jobs, users))
        after = time.perf_counter(), busy(), time.process_time()
        spent, every, mine = (b - a for a, b in zip(before, after, strict=True))
        runs.append({**one, "others": (every - mine) / spent})
        if time.perf_counter() - begin > LONGEST:
            break
    calm = [one for one in runs if one["others"] < CALM] or [min(runs, key=lambda one: one["others"])]
    return {name: statistics.median(one[name] for one in calm) for name in (*FIGURES, "others")}


@contextlib.contextmanager
def reader() -> Iterator[Callable[[], float]]:
    """Bytes per second that plain reads reach when it is called, in a process of its own, because they take memory."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, __file__, "read", "now"], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def read() -> float:
            print(file=process.stdin, flush=True)
            return float(process.stdout.readline())  # type: ignore[union-attr]

        yield read
        process.stdin.close()


def busy() -> float:
    """Seconds that all cores together have worked, for whatever program."""
    fields = list(map(int, pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def wait_for_calm() -> None:
    """Until nobody else works for a second, or half a minute has passed."""
    for _ in range(30):
        before = busy()
        time.sleep(1.0)
        if busy() - before < CALM:
            return


def figures(found: dict[str, Any]) -> dict[str, float]:
    """Seconds in all, and medians over requests."""
    return {name: found[name] if name == "seconds" else found[name]["p50"] for name in FIGURES}


def calibrate(model: str, path: pathlib.Path) -> float:
    """What doctor measures, of the formats that this model holds; -> cores that other programs had meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        types = speed_types(make_config({}, **options_of(model, pathlib.Path(folder))))
    wanted = [t for t in dict.fromkeys((*types, *(("int8",) if "int4" in types else ()))) if t != "float32"]
    before = time.perf_counter(), busy(), cpu_seconds()
    found = measure_calibrated("cpu", tuple(wanted), mixture=False)
    after = time.perf_counter(), busy(), cpu_seconds()
    spent, every, mine = (b - a for a, b in zip(before, after, strict=True))
    others = (every - mine) / spent
    path.write_text(json.dumps({**found, "others": round(others, 3), "seconds": round(spent, 1)}))
    return others


def cpu_seconds() -> float:
    """Seconds that this process and its children have worked."""
    return sum(os.times()[:4])


def child(*words: str) -> str:
    """This file in a fresh process; -> what it printed."""
    return subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, check=True, text=True).stdout


def summary(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors over all pieces, and by model."""

    def of(some: list[dict[str, Any]]) -> dict[str, Any]:
        errors = [abs(row[name]["error"]) for one in some for row in one["rows"] for name in FIGURES]
        off = [one["memory"]["predicted"] - one["memory"]["measured"] for one in some]
        return {
            "figures": len(errors),
            "median_error": round(statistics.median(errors), 4),
            "worst_error": max(errors),
            "memory_mib": [(o["memory"]["predicted"] >> 20, o["memory"]["measured"] >> 20) for o in some],
            "memory_mib_off": [m >> 20 for m in off],
        }

    models = dict.fromkeys(one["model"] for one in pieces)
    each = {model: of([one for one in pieces if one["model"] == model]) for model in models}
    return {"all": of(pieces), **each, "pieces": pieces}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("run", "join", "child", "read"))
    parser.add_argument("names", nargs="+")
    parser.add_argument("--loads", default=",".join(map(str, range(len(LOADS)))))
    parser.add_argument("--ceilings", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    loads = [int(i) for i in args.loads.split(",")]
    if args.verb == "join":
        print(json.dumps(summary([json.loads(pathlib.Path(name).read_text()) for name in args.names]), indent=1))
    elif args.verb == "read":
        for _ in sys.stdin:
            print(reading("cpu"), flush=True)
    elif args.verb == "child":
        print(json.dumps(run(args.names[0], loads)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            ceilings = args.ceilings or str(pathlib.Path(folder) / "ceilings.json")
            for _ in range(TRIES if not args.ceilings else 0):
                wait_for_calm()
                if calibrate(args.names[0], pathlib.Path(ceilings)) < CALM:
                    break
            measured_here = json.loads(child("child", args.names[0], "--loads", args.loads))
            machine = json.loads(pathlib.Path(ceilings).read_text())
            found = compared(measured_here, machine.get("measured", machine))
        pathlib.Path(args.out or f"predict-{args.names[0]}.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
