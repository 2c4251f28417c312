"""Whole models on an H200 that is not there (bench/gpu_standin.py): recordings, plans in flight, what is launched; and
kernels that the interpreter cannot load are compiled for it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
pytest.importorskip("triton.backends.nvidia")


WHOLE = ("8b-fp8-kv8", "20b-mxfp4")
"""Nothing is compiled while a request waits; the second one has sequences that leave their window."""
CASES = [*((case, "none.") for case in WHOLE), ("30b-a3b", "route_few.")]
if os.environ.get("TOKENMILL_FAMILIES"):
    CASES += [("30b-a3b", "wide.,route_few.,hopper."), ("8b-medusa-tree", "trees."), ("8b-tree-deterministic", "none.")]
NAMES = {
    "wide.": ["wide._wide_kernel"], "route_few.": ["route_few._pick_few_kernel"], "hopper.": ["hopper._hopper_kernel"],
    "trees.": ["trees._accept_tree_kernel", "trees._move_kernel"],
}  # fmt: skip


@pytest.mark.parametrize(("case", "only"), CASES)
def test_on_a_standin(case, only, tmp_path):
    """Without a GPU and without the interpreter, so in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "bench/gpu_compile.py", case, "--quick", "--layers=2", f"--only={only}"]
    command.append(f"--json={tmp_path / 'out'}")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "out").read_text())[0]
    assert not found["problems"]
    assert case not in WHOLE or not found["late"], "while a request waits"
    assert found["launches"] > 500
    names = {kernel["name"] for kernel in found["kernels"]}
    assert names == {name for part in only.split(",") for name in NAMES.get(part, ())}
    assert not any(kernel["spilled"] for kernel in found["kernels"])


def test_what_a_load_launches_is_compiled_ahead(tmp_path):
    """By the process that an engine starts: one kernel is compiled, all others are only found, by a few layers of each
    kind; they are those of a load with all layers."""
    program = f"""
import json, os, pathlib, sys
sys.path.insert(0, "bench")
from geometries import GEOMETRIES, few_layers
from gpu_standin import DEVICES, installed
from tokenmill.core.config import make_config
from tokenmill.engine.load.compile_ahead import Order
from tokenmill.engine.load.loading import load_runner
from tokenmill.engine.load.ahead_worker import CACHED, COMPILED, compile_kernel, compile_order, place_of

def work(kernel):
    if "_norm_kernel" not in kernel.name:
        return COMPILED
    return compile_kernel(kernel) if os.path.isfile(place_of(kernel)) is False else CACHED

folder = pathlib.Path({str(tmp_path)!r})
(folder / "config.json").write_text(json.dumps(few_layers(GEOMETRIES["gemma-3-1b"], 13)))
options = {{"max_model_len": 256, "max_num_seqs": 2, "compile_ahead": False, "enforce_eager": True}}
config = make_config(model=str(folder), load_format="dummy", skip_tokenizer_init=True, device="cuda", **options)
steps = []
told = compile_order(Order(config, DEVICES["sm_90"], 2), work, lambda: steps.append(1))
there = [place for place in told.places if os.path.isfile(place)]
with installed(device=DEVICES["sm_90"]) as whole:
    load_runner(config)
every = sorted(place_of(kernel) for kernel in whole.kernels.values())
print(json.dumps([told.kernels, told.compiled, told.failed, told.failure, len(told.places), there]))
assert steps == [1] and "torch._dynamo.config" not in sys.modules
assert every == sorted(told.places), set(every) ^ set(told.places)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels, compiled, failed, failure, places, there = json.loads(done.stdout.splitlines()[-1])
    assert kernels == places > 5 and compiled == kernels and not failed and not failure
    assert len(there) >= 1 and all("_norm_kernel" in place for place in there), "where Triton will look for it"
