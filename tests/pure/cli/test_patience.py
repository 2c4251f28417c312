"""Nobody waits in silence: what takes long is told, on a terminal by a moving line, elsewhere by lines now and then."""

from __future__ import annotations

import ast
import queue
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill.cli
from tokenmill.cli import loading
from tokenmill.cli.bench_common import BenchProgress
from tokenmill.cli.loading import Heartbeat, progress, show_waiting

CLI = Path(tokenmill.cli.__file__).parent
TOLD = {"show_waiting", "progress", "BenchProgress", "Heartbeat"}


def first_imports(file: Path) -> set[str]:
    """Modules of ours that verbs import before somebody is told to wait: what comes later is loaded by then."""
    found: set[str] = set()
    for verb in ast.parse(file.read_text()).body:
        if not isinstance(verb, ast.FunctionDef) or verb.name.startswith("_"):
            continue
        told = [node.lineno for node in ast.walk(verb) if isinstance(node, ast.With) and names(node) & TOLD]
        for node in ast.walk(verb):
            if isinstance(node, ast.ImportFrom) and node.lineno < min(told, default=1 << 30):
                module = str(node.module)
                found |= {f"{module}.{each.name}" if is_module(module, each.name) else module for each in node.names}
    return {module for module in found if module.startswith("tokenmill")}


def is_module(package: str, name: str) -> bool:
    place = CLI.parent.joinpath(*package.split(".")[1:])
    return (place / f"{name}.py").is_file() or (place / name).is_dir()


def names(node: ast.With) -> set[str]:
    return {each.id for item in node.items for each in ast.walk(item.context_expr) if isinstance(each, ast.Name)}


WITHOUT_TORCH = """
import importlib, sys

class Wanted(BaseException):
    "Not to be taken for a package that is missing."

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise Wanted

sys.meta_path.insert(0, Guard())
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Wanted:
        print(name)
"""


def heavy(modules: list[str]) -> set[str]:
    """Which of them import torch, each asked beside what the others leave."""
    asked = [sys.executable, "-c", WITHOUT_TORCH, *modules]
    return set(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split())


def test_heavy_imports_are_told() -> None:
    places = {file.name: first_imports(file) for file in sorted(CLI.glob("*.py"))}
    assert "tokenmill.measure.workloads" in places["bench.py"]  # they are found at all
    assert heavy(["tokenmill.core.config", "tokenmill.measure.throughput"]) == {"tokenmill.measure.throughput"}
    slow = heavy(sorted(set().union(*places.values())))
    assert not slow, {file: found & slow for file, found in places.items() if found & slow}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeat.__init__, "__defaults__", (0.001,))
    monkeypatch.setattr(loading, "OFTEN_S", 0.001)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    lines: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(loading, "say", lines.put)
    return lines


def hear(said: queue.Queue[str], pattern: str) -> None:
    """Waits for such a line."""
    while not re.fullmatch(pattern, said.get(timeout=60)):
        pass


@pytest.mark.usefixtures("often")
def test_stages_and_how_far_they_are(said: queue.Queue[str]) -> None:
    with BenchProgress() as bar:
        hear(said, r"tokenmill: still measuring \(\d+ s\)")
        bar.start("warming up", 1)
        hear(said, r"tokenmill: still measuring \(\d+ s\); warming up")
        bar.start("8 requests", 8)
        bar.advance()
        hear(said, r"tokenmill: still measuring \(\d+ s\); 8 requests, 1 of 8")
    with progress("Rounding") as tell:
        tell("model.layers.0", 3, 9)
        hear(said, r"tokenmill: still rounding \(\d+ s\); 3 of 9")


def test_lines_end_with_the_work_and_never_come_more_rarely(
    said: queue.Queue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 1 + loading.FIRST_S < 2 and loading.OFTEN_S < 2
    monkeypatch.setattr(loading, "OFTEN_S", 0.001)
    with Heartbeat("working", 0.001) as beat:
        for _ in range(20):
            hear(said, r"tokenmill: still working \(\d+ s\)")
    beat._thread.join()
    said.queue.clear()
    with show_waiting("Quick", first=3600):
        pass
    assert said.empty()
