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


CASES = [("8b-fp8-kv8", "none."), ("30b-a3b", "route_few.")]
if os.environ.get("TOKENMILL_FAMILIES"):
    CASES.append(("30b-a3b", "wide.,route_few.,hopper."))
NAMES = {"wide.": "wide._wide_kernel", "route_few.": "route_few._pick_few_kernel", "hopper.": "hopper._hopper_kernel"}


@pytest.mark.parametrize(("case", "only"), CASES)
def test_on_a_standin(case, only, tmp_path):
    """Without a GPU and without the interpreter, so in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "bench/gpu_compile.py", case, "--quick", "--layers=1", f"--only={only}"]
    command.append(f"--json={tmp_path / 'out'}")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "out").read_text())[0]
    assert not found["problems"]
    assert case != "8b-fp8-kv8" or not found["late"], "while a request waits"
    assert found["launches"] > 500
    names = {kernel["name"] for kernel in found["kernels"]}
    assert names == {NAMES[part] for part in only.split(",") if part in NAMES}
    assert not any(kernel["spilled"] for kernel in found["kernels"])
