"""What a reader pastes: blocks of the documents run as they stand, curl lines ask a server that a document starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.docs.docs_helpers import DOCUMENTS, ROOT, blocks

from tokenmill import LLM, SamplingParams
from tokenmill.core.config import make_server_config
from tokenmill.demo import demo_dir
from tokenmill.server.many_models.models_file import read_models

pytestmark = pytest.mark.skipif(not (demo_dir("main") / "config.json").exists(), reason="the demo model is not here")
ELSEWHERE = {
    "README.md": "test_docs.py",
    "docs/structured.md": "tests/cpu/program/test_programs.py",
    **{f"docs/add-a-{what}.md": "test_docs.py" for what in ("model", "kernel", "drafter", "weight-format")},
}
"""Documents whose Python another test runs."""
PYTHON = {"docs/adapters.md": "Paris", "docs/sleep.md": ""}
"""Documents whose Python runs here, and what it prints."""
OTHER = {"docs/many-models.md": "yaml", "docs/structured.md": "json"}
ADDRESS = re.compile(r"(?:127\.0\.0\.1|localhost):8000")
START_S = 240.0


def test_no_block_is_left_out() -> None:
    """A block of a language has a test; one without is text, or commands that test_docs.py takes apart."""
    for document in DOCUMENTS:
        languages = set(re.findall(r"^```(\w+)$", (ROOT / document).read_text(), re.MULTILINE)) - {"text"}
        known = {"python"} & languages if document in {**ELSEWHERE, **PYTHON} else set()
        known |= {OTHER.get(document, "bash")}
        assert languages <= known, f"{document}: {languages - known}"


@pytest.mark.parametrize("document", PYTHON)
def test_python_runs_as_it_stands(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(document)
    found: dict[str, Any] = {}
    try:
        exec(compile(code, document, "exec"), found)
    finally:
        if "llm" in found:
            found["llm"].close()
    assert PYTHON[document] in capsys.readouterr().out


def test_the_file_of_models_is_one(tmp_path: Path) -> None:
    (text,) = blocks("docs/many-models.md", "yaml")
    file = tmp_path / "models.yaml"
    file.write_text(text)
    specs, rights, keys = read_models(file, {}, make_server_config({}))
    assert len(specs) == text.count("\n  ") - text.count("\n    ") - len(keys) and len(rights) == len(keys) == 2
    assert sorted(each.manage for each in rights.values()) == [False, True]


def test_the_tree_of_tags_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = blocks("docs/structured.md", "json")
    params = SamplingParams(structured_outputs={"structural_tag": {"format": json.loads(text)}}, max_tokens=16)
    with LLM("demo", num_blocks=64, max_num_seqs=2) as llm:
        (output,) = llm.generate(["One"], params, use_tqdm=False)
    assert output.outputs[0].token_ids


# ---------------------------------------------------------------- curl


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server that docs/adapters.md starts, which README's lines ask as well, on a free port."""
    (line,) = (line for line in blocks("docs/adapters.md", "bash")[0].splitlines() if line.startswith("tokenmill"))
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(demo_dir("lora-pirate"), folder / "folder-in-there")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [*line.split()[1:], "--port", address.split(":")[1], "--lora-folder", str(folder)]
    child = subprocess.Popen(
        [sys.executable, "-c", "from tokenmill.cli.main import main; main()", *words],
        env={**os.environ, "TOKENMILL_KV_CACHE_MEMORY_BYTES": str(64 << 20)},
    )
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and child.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{address}/health", timeout=5):
                break
        except OSError:
            time.sleep(0.1)
    yield address
    child.send_signal(signal.SIGTERM)
    child.wait(START_S)


def pasted() -> dict[str, list[str]]:
    """The curl commands of each document that has some, their lines joined."""
    found = {}
    for document in DOCUMENTS:
        text = (ROOT / document).read_text().replace("\\\n", " ")
        if lines := re.findall(r"^curl .*$", text, re.MULTILINE):
            found[document] = lines
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("document", pasted())
def test_curl_lines_are_answered(server: str, document: str) -> None:
    """In their order: what one loads another unloads."""
    for line in pasted()[document]:
        assert ADDRESS.search(line), f"{document}: {line}"
        asked = ADDRESS.sub(server, line).replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "error" not in done.stdout.lower(), (line, done.stdout, done.stderr)
        if "capital of France" in line:
            assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]
