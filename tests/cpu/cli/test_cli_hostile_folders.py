"""Every verb that opens a model folder tells in one sentence what is wrong with it, and never waits."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cpu_time import hanging_fails
from typer.testing import CliRunner

from tokenmill.cli.verbs import app
from tokenmill.testing.tiny import make_tiny

CPU_S = 5.0
WALL_S = 120


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, heads=2, kv_heads=1)


@pytest.fixture(autouse=True)
def never_for_ever() -> Iterator[None]:
    with hanging_fails(WALL_S):
        yield


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


VERBS: dict[str, Callable[[str, Path], list[str]]] = {
    "generate": lambda model, out: ["generate", model, "--prompt", "x", "--max-tokens", "1"],
    "chat": lambda model, out: ["chat", model],
    "serve": lambda model, out: ["serve", model, "--port", "0", "--engines", "0"],
    "plan": lambda model, out: ["plan", model, "--device", "h200"],
    "quantize": lambda model, out: ["quantize", model, str(out), "--format", "int8"],
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_verb_tells_what_is_wrong_with_a_file(verb, name, tiny, tmp_path):
    for kind in (pipe, device) if name == "config.json" else (pipe, deep):
        folder = Path(shutil.copytree(tiny, tmp_path / kind.__name__))
        (folder / name).unlink()
        kind(folder / name)
        started = time.thread_time()
        result = CliRunner().invoke(app, VERBS[verb](str(folder), tmp_path / f"out-{kind.__name__}"), input="hi\n")
        said = [line for line in result.stderr.splitlines() if name in line]
        assert result.exit_code not in (0, None) and said, (kind.__name__, result.stderr, result.exception)
        assert "Traceback" not in result.stderr and len(said[0]) < 400
        assert time.thread_time() - started < CPU_S
