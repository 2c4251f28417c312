"""The API process is small: what answers HTTP runs without torch and numpy, which take 170 MiB and a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"


def test_the_server_imports_no_torch() -> None:
    script = "import sys, tokenmill.server.run\nprint([m for m in ('torch', 'numpy') if m in sys.modules])\n"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
