"""Pulling from the hub, against the server that stands in for it: names, progress, and what `rm` takes away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.checkpoint.hub_server import Hub, serving

SCRIPT = """
import json, sys
from tokenmill.checkpoint.hub import Hub
from tokenmill.checkpoint.pull import drop_files, pull_hub
from tokenmill.checkpoint.stored import find_stored, open_store
from tokenmill.core.errors import UserError
store, said = open_store(), []
for name in sys.argv[1:]:
    try:
        if name.startswith("rm="):
            said.append(drop_files(store, store.remove(name[3:])))
            continue
        steps = []
        entry = pull_hub(store, name, None, Hub(), steps.append)
        options = find_stored(name).options
        said.append([entry.name, entry.format, entry.size, entry.source.fetched, options["model"],
                     [[s.status, s.digest, s.total, s.completed] for s in steps]])
    except UserError as error:
        said.append(str(error))
print(json.dumps(said))
"""
_HEAD = json.dumps({"a": {"dtype": "U8", "shape": [3 << 20], "data_offsets": [0, 3 << 20]}}).encode()
LARGE = len(_HEAD).to_bytes(8, "little") + _HEAD + os.urandom(3 << 20)
_GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
FOUR, EIGHT = _GGUF + b"four", _GGUF + b"eight!!!"
FILES = {
    "mill/small": {"config.json": b"{}", "model.safetensors": LARGE, "README.md": b"x"},
    "mill/small-GGUF": {"a-Q4_K_M.gguf": FOUR, "a-Q8_0.gguf": EIGHT},
}


@pytest.fixture
def pull(tmp_path: Path) -> Any:
    """A function that pulls in a process of its own, as the hub's library reads its variables at import."""
    with serving(Hub(FILES)) as hub:

        def work(*names: str, **variables: str) -> list[Any]:
            kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
            own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
            own |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
            own["TOKENMILL_HOME"] = str(tmp_path / "home")
            done = subprocess.run([sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, timeout=300,
                                  env={**kept, **own, **variables}, check=False)  # fmt: skip
            assert done.returncode == 0, done.stderr
            found: list[Any] = json.loads(done.stdout.splitlines()[-1])
            return found

        yield work


def test_a_model_is_pulled_told_used_and_removed(pull: Any, tmp_path: Path) -> None:
    first, second, third, absent, dropped, kept = pull(
        "mill/small",
        "hf.co/mill/small-GGUF:Q8_0",
        "mill/small-GGUF",
        "mill/none",
        "rm=mill/small",
        "rm=mill/small-GGUF",
    )
    name, form, size, fetched, path, steps = first
    assert (name, form, size, fetched) == ("mill/small:latest", "safetensors", len(LARGE), True)
    assert [step[0] for step in steps[:1]] == ["pulling manifest"] and steps[-1][0] == "writing manifest"
    bars = [step for step in steps if step[2]]
    assert bars[-1][2:] == [len(LARGE), len(LARGE)] and bars[-1][0].startswith("pulling ")
    assert second[:4] == ["mill/small-GGUF:Q8_0", "gguf", len(EIGHT), True] and second[4].endswith("a-Q8_0.gguf")
    assert third[:4] == ["mill/small-GGUF:latest", "gguf", len(FOUR), True] and third[4].endswith("a-Q4_K_M.gguf")
    assert "there is no model 'mill/none'" in absent
    assert dropped >= len(LARGE) and not Path(path).exists() and kept == len(FOUR)
    assert Path(second[4]).read_bytes() == EIGHT


def test_what_was_there_before_stays(pull: Any) -> None:
    again = pull("mill/small-GGUF:Q8_0", "rm=mill/small-GGUF:Q8_0", "mill/small-GGUF:Q8_0", "mill/small-GGUF:Q8_0")
    assert again[1] == len(EIGHT) and again[2][3] and not again[3][3]  # the second time the file was there
    assert pull("mill/small-GGUF:Q8_0", HF_HUB_OFFLINE="1")[0][:3] == ["mill/small-GGUF:Q8_0", "gguf", len(EIGHT)]
    assert pull("rm=mill/small-GGUF:Q8_0") == [0]
