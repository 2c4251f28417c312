"""A worker belongs to its parent from its first moment, also while it still imports what it needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLOW = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C is the parent's to handle
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = """
import time
from tokenmill.process.start import start_process

start_process("slow_to_import", "slow")
time.sleep(600)
"""


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_imports_ends_with_its_parent(sent: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    try:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert lives(worker)
    finally:
        parent.send_signal(sent)
        parent.wait()
    deadline = time.monotonic() + 60
    while lives(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives(worker)


def test_a_worker_imports_nothing_from_the_folder_in_which_it_is_started(tmp_path: Path) -> None:
    """A stranger's folder may hold a types.py or a json.py, and a model's folder anything."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "quick_to_import.py").write_text("print('imported', flush=True)\ndef run_worker(): pass")
    (tmp_path / "here").mkdir()
    for name in ("types", "json", "struct", "socket", "re"):
        (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit('another module of this name')")
    paths = os.pathsep.join([str(tmp_path / "modules"), *filter(None, sys.path)])
    start = "from tokenmill.process.start import start_process\nstart_process('quick_to_import', 'quick')[0].wait(60)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", start], capture_output=True, text=True, cwd=tmp_path / "here", timeout=60,
        env=os.environ | {"PYTHONPATH": paths}, check=False,
    )  # fmt: skip
    assert done.stdout == "imported\n" and not done.stderr


def test_python_m_imports_nothing_from_the_folder_in_which_it_is_started(tmp_path: Path) -> None:
    for name in ("platform", "uuid", "secrets", "queue", "typer", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('another module of this name')")
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "plan", "--help"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip
    assert "python -m tokenmill plan" in done.stdout and not done.returncode, done.stderr
