"""What `make` installs: packages and constraints, decided by `nvidia-smi`, resolved by pip against wheels made here."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "install.py"
# What pip chooses from: the newest of each would be wrong.
OFFERED = {
    "torch": {
        "2.11.0": ["triton==3.6.0; platform_system == 'Linux'", "nvidia-cublas"],
        "2.13.0+cpu": [],
        "2.14.0": ["triton==3.8.0"],
    },
    "triton": {"3.6.0": [], "3.7.1": [], "3.8.0": []},
    "nvidia-cublas": {"13.1.0": []},
}


def load() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("install", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def make_wheel(folder: Path, name: str, version: str, requires: list[str]) -> None:
    plain = name.replace("-", "_")
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"{plain}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{plain}-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", head + "".join(f"Requires-Dist: {one}\n" for one in requires))
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty wheels of everything that the project asks for."""
    folder = tmp_path_factory.mktemp("wheels")
    for requirement in [*project()["dependencies"], *project()["optional-dependencies"]["dev"]]:
        name, floor = re.match(r"([\w.-]+)(?:[>=]=([\d.]+))?", requirement).groups()
        if name not in OFFERED:
            make_wheel(folder, name, floor or "1.0", [])
    for name, versions in OFFERED.items():
        for version, requires in versions.items():
            make_wheel(folder, name, version, requires)
    return folder


def stand_in(folder: Path, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def resolve(index: Path, path: Path, *arguments: str) -> tuple[str, set[str]]:
    """What the tool says, and the packages that pip would take, without a network and beside nothing installed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment = {
        **kept, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index),
        "PIP_CONFIG_FILE": os.devnull, "PIP_IGNORE_INSTALLED": "1",
    }  # fmt: skip
    command = [sys.executable, str(TOOL), "--dry-run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (would,) = re.findall(r"^Would install (.*)$", done.stdout, re.MULTILINE)
    return done.stdout, set(would.split())


def test_beside_a_gpu_the_packages_of_cuda_are_taken_and_that_is_said(index: Path, tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", 'echo "NVIDIA H200"; echo "NVIDIA H200"')
    said, taken = resolve(index, tmp_path / "bin")
    assert {"torch-2.11.0", "triton-3.6.0", "nvidia-cublas-13.1.0"} <= taken
    assert said.startswith("== NVIDIA H200 found: packages for CUDA")
    said, taken = resolve(index, tmp_path / "bin", "--constraints", str(ROOT / "constraints" / "cpu.txt"))
    assert "torch-2.13.0+cpu" in taken and "found" not in said


@pytest.mark.parametrize("script", ["exit 9", 'echo "No devices were found"; exit 6', "exit 0"])
def test_without_a_gpu_that_answers_the_cpus_packages_are_taken(index: Path, tmp_path: Path, script: str) -> None:
    """Its tool may be there without a driver or a card."""
    stand_in(tmp_path / "bin", script)
    said, taken = resolve(index, tmp_path / "bin")
    assert "torch-2.13.0+cpu" in taken and not any(re.match("triton|nvidia", name) for name in taken)
    assert "found: packages" not in said


def test_running_needs_few_packages_and_tests_add_theirs(index: Path, tmp_path: Path) -> None:
    _, running = resolve(index, tmp_path)
    _, testing = resolve(index, tmp_path, "--tests")
    named = {re.split(r"[><=!~; \[]", line)[0].lower().replace("_", "-") for line in project()["dependencies"]}
    assert {name.rsplit("-", 1)[0].lower().replace("_", "-") for name in running} == named and len(named) <= 20
    assert running < testing and len(testing) > len(running) + 15
    tools = ("pytest", "hypothesis", "mypy", "ruff", "transformers", "playwright", "openai")
    assert not [name for name in running if name.startswith(tools)]


def test_the_constraints_agree_with_what_the_project_asks_for() -> None:
    for file in (ROOT / "constraints").glob("*.txt"):
        for line in file.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[\w-]+==[\w.+]+", line), f"{file.name}: {line}"
    pins = (ROOT / "constraints" / "cpu.txt").read_text()
    assert "triton" not in pins  # each torch for CUDA demands its own, and some indexes have no other torch


def test_what_is_done_is_not_done_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second call runs nothing; another constraint, tests, a change of csrc or another processor each do what they
    need. Kernels for running are those of this machine alone."""
    install = load()
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.setattr(install, "WORK", tmp_path / "setup")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    install.site_packages().mkdir(parents=True)
    done: list[str] = []

    class Job:
        def __init__(self, name: str, *arguments: str) -> None:
            every = name == "native" and not any("THIS_MACHINE=ON" in argument for argument in arguments)
            done.append("native, all" if every else name)

        def demand(self, what: str) -> None:
            assert what

    monkeypatch.setattr(install, "Job", Job)
    monkeypatch.setattr(install, "follow", lambda *args: None)
    monkeypatch.setattr(install, "compile_all", lambda: done.append("compiled"))
    monkeypatch.setattr(install, "import_once", lambda: done.append("imported"))
    monkeypatch.setattr(install, "tell_native", lambda: None)
    cpu, cuda = ROOT / "constraints" / "cpu.txt", ROOT / "constraints" / "cuda.txt"

    def did(constraints: Path, tests: bool) -> list[str]:
        done.clear()
        install.set_up(constraints, tests)
        return list(done)

    assert did(cpu, False) == ["native", "packages", "imported"]
    assert did(cpu, False) == []
    monkeypatch.setattr(install, "processor", lambda: "another")
    assert did(cpu, False) == ["native"]
    assert did(cpu, True) == ["native, all", "packages", "tests", "compiled"]
    monkeypatch.setattr(install, "processor", lambda: "a third")
    assert did(cpu, True) == did(cpu, False) == []
    assert did(cuda, False) == ["packages", "tests", "compiled"]  # tests that were there stay usable
    monkeypatch.setattr(install, "compiler", lambda: "/another/c++")
    assert did(cuda, False) == ["native, all"]
    module, here = tmp_path / "module.py", install.site_packages() / "_editable_skbc_tokenmill.py"
    module.touch()
    here.write_text(f"install({{'tokenmill.module': {str(module)!r}}}, {{}})")
    assert did(cuda, False) == []
    module.unlink()  # or it has become a folder
    assert did(cuda, False) == ["native, all"]


def test_a_failure_says_what_and_shows_the_last_lines(tmp_path: Path) -> None:
    install = load()
    install.WORK = tmp_path
    install.python = lambda: sys.executable
    install.pip = lambda *arguments: ["-c", "print('ERROR: no such package'); raise SystemExit(1)"]
    job = install.Job("packages")
    with pytest.raises(install.Failure, match=r"could not install the packages(?s:.*)ERROR: no such package"):
        job.demand("the packages")


def test_sizes_are_read_from_what_pip_says(tmp_path: Path) -> None:
    install = load()
    file = tmp_path / "torch-2.13.0-py3-none-any.whl"
    file.write_bytes(b"x" * 1234)
    lines = {
        "  Downloading torch-2.13.0-cp311.whl (191.8 MB)": 191.8e6,
        "Using cached numpy-2.4.6-cp311.whl (17 kB)": 17e3,
        f"Processing {file}": 1234.0,
        f"Processing {file} (from torch)": 1234.0,
        "  Downloading torch-2.13.0-cp311.whl.metadata (5 kB)": None,
        "Collecting torch": None,
    }
    for line, size in lines.items():
        found = install.WHEEL.match(line)
        assert (found and install.wheel_bytes(found)) == size, line
