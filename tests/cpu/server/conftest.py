"""`tokenmill serve` in a process of its own, with a tiny random model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tokenmill.testing.tiny import make_tiny

START_S = 150.0


@dataclass
class Running:
    """A served model. `url` has no path."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120))

    def post(self, path: str, body: dict) -> httpx.Response:
        return self.client.post(self.url + path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path)

    def children(self) -> list[int]:
        """Engine processes (others, such as the resource tracker and template workers, are left out)."""
        found = []
        for pid in _descendants(self.process.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            if "spawn_main" in command:
                found.append(pid)
        return found

    def family(self) -> list[int]:
        """Every process below the server's, however far down."""
        found = _descendants(self.process.pid)
        for pid in found:
            found += _descendants(pid)
        return found

    def metric(self, name: str) -> float:
        """The sum of a series over its labels."""
        lines = [line for line in self.get("/metrics").text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def _descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def launch(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Running]]:
    """launch("--flag", "value") -> Running; all are ended afterwards."""
    made: list[Running] = []

    def start(*flags: str, model: Path = tiny, faults: str = "", folder: Path | None = None) -> Running:
        log = tmp_path_factory.mktemp("log") / "server.log"
        code = "import sys; sys.path.remove(''); from tokenmill.cli.main import main; main()"  # the script's path
        fixed = ("--port", "0", "--served-model-name", "tiny", "--kv-cache-memory-bytes", "33554432")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENMILL_FAULTS": faults}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", code, "serve", str(model), *fixed, *flags],
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        running = Running(process, _wait_for_url(process, log), log)
        made.append(running)
        return running

    yield start
    for running in made:
        running.client.close()
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGKILL)
            running.process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        found = re.search(r"listening on (https?://\S+)/v1|listening on (unix:\S+)", log.read_text())
        if found:
            return found[1] or found[2]
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text()}")
