"""Some of the schemas that bench/structured/fuzz.py answers: what ends is valid by another validator, nothing dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parents[3] / "bench" / "structured" / "fuzz.py"
SIZE = {"--first": 10_000, "--schemas": 25, "--walks": 6, "--most": 160, "--vocabulary": 1500}


def test_lookalikes_of_public_schemas(tmp_path):
    """In a process of its own: modules of bench have names that others have, too."""
    options = [str(part) for pair in SIZE.items() for part in pair]
    done = subprocess.run(
        [sys.executable, str(FUZZ), *options, "--json", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["wrong"]
    counts = found["counts"]
    assert counts["valid"] == counts["finished"] > 100 and counts.get("refused", 0) < 4, found
