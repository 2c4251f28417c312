"""What `tokenmill plan` predicts against what is measured on this machine. JSON on stdout; wants a quiet machine.

python bench/predict.py CEILINGS.json [MODEL ...]      (models: demo 1b-none 1b-int8 1b-int4; default: all)

CEILINGS.json is what `tokenmill doctor --measure --json` wrote here: the prediction knows nothing else.
Each model runs in a process of its own, whose peak memory is compared as well.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from tokenmill.core.config import calm_threads, make_config

calm_threads()

sys.path.insert(0, str(pathlib.Path(__file__).parent / "cpu"))

from geometry import GEOMETRY  # noqa: E402

from tokenmill import LLM  # noqa: E402
from tokenmill.device.memory import peak_bytes  # noqa: E402
from tokenmill.measure.ceilings import load_measured  # noqa: E402
from tokenmill.measure.closed import closed_loop  # noqa: E402
from tokenmill.measure.devices import CONTEXT_BYTES, efficiency_of  # noqa: E402
from tokenmill.measure.plan import Setup, read_model  # noqa: E402
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
MODELS = ("demo", "1b-none", "1b-int8", "1b-int4")
FIGURES = ("seconds", "ttft_ms", "tpot_ms")


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


def run(model: str, ceilings: str) -> dict[str, Any]:
    """All loads on one engine, each predicted first."""
    device = load_measured(pathlib.Path(ceilings))
    setup = Setup(device, 1, efficiency_of(device))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options = options_of(model, pathlib.Path(folder))
        planner = read_model(make_config({}, **options), device.kind)
        with LLM(**options) as llm:
            pool = llm.engine.executor.runner.pool  # type: ignore[attr-defined]
            closed_loop(llm.engine, time.perf_counter, Uniform(4, 64, 8).jobs(None, 6000), 4)
            for users, inputs, outputs in LOADS:
                jobs = Uniform(users, inputs, outputs, seed=users).jobs(None, 6000)
                llm.reset_prefix_cache()
                found = closed_loop(llm.engine, time.perf_counter, jobs, users)
                hoped = predict(planner, setup, jobs, users)
                row = {"users": users, "input": inputs, "output": outputs}
                for name in FIGURES:
                    mine, theirs = (x[name] if name == "seconds" else x[name]["p50"] for x in (hoped, found))
                    row[name] = {"predicted": mine, "measured": theirs, "error": round(mine / theirs - 1, 4)}
                rows.append(row)
                print(model, json.dumps(row), file=sys.stderr, flush=True)
            used = pool.size_bytes
            peak = peak_bytes("cpu")
    hoped_bytes = planner.sheet.held_bytes + used + planner.sheet.activation_bytes + CONTEXT_BYTES["cpu"]
    return {"model": model, "rows": rows, "memory": {"predicted": hoped_bytes, "measured": peak}}


def main(ceilings: str, models: list[str]) -> None:
    """Every model in a fresh process; the errors' median and worst on top."""
    found = []
    for model in models:
        done = subprocess.run(
            [sys.executable, __file__, "--child", model, ceilings], stdout=subprocess.PIPE, check=True, text=True
        )
        found.append(json.loads(done.stdout))
    errors = [abs(row[name]["error"]) for one in found for row in one["rows"] for name in FIGURES]
    memory = [one["memory"]["predicted"] - one["memory"]["measured"] for one in found]
    summary = {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "memory_mib_off": [m >> 20 for m in memory],
    }
    print(json.dumps({**summary, "models": found}, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        print(json.dumps(run(*sys.argv[2:4])))
    else:
        main(sys.argv[1], sys.argv[2:] or list(MODELS))
