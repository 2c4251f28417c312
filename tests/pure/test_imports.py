"""Modules know each other one way, and the half that needs no torch does not load it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.cycles import ROOT, find_cycles, find_modules

TORCH_FREE = (
    "compute.forward",
    "compute.drafting",
    "core.drafting",
    "core.execution",
    "process.client",
    "text.build",
    "scheduler.scheduler",
    "kvcache.allocation",
)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert find_cycles(find_modules(ROOT / "tokenmill")) == []


def test_a_cycle_of_annotations_within_functions_is_found(tmp_path: Path) -> None:
    package = tmp_path / "made"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def f():\n    from made.inner import b\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "inner" / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .. import c\n"
    )
    (package / "c.py").write_text("import made.a\n")
    (package / "d.py").write_text("import made.a, made.c\n")
    assert find_cycles(find_modules(package)) == [["made.a", "made.c", "made.inner.b"]]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_no_torch_is_loaded(module: str) -> None:
    script = f"import sys, tokenmill.{module}\nprint([m for m in ('torch', 'numpy') if m in sys.modules])\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
