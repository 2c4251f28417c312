"""What `make` sets up: .venv, the packages of a constraints file, and the native module; with progress, once.

Owns: which packages (what running needs; --tests adds what tests and checks need), which constraints (those of CUDA
where `nvidia-smi` shows a GPU), and the record in .venv that makes the next call free. Packages are fetched while the
compiler works. Runs before anything is installed, so it must import the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
WORK = VENV / "setup"  # logs, what pip downloads, and the record of what was done
PIP_FLAGS = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
LARGE = 5e6  # bytes: packages of this size are named while they come
TELL_S = 10  # between lines of progress where there is no terminal
WHEEL = re.compile(
    r"^\s*(?:Downloading|Using cached|Processing)\s+"
    r"(?P<file>\S+\.whl)(?!\S)(?: \((?P<size>[\d.]+) (?P<unit>[kMG]?B)\))?"
)
UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def main(arguments: list[str] | None = None) -> int:
    """Set up what is missing; 1 if a package could not be had, with pip's last lines."""
    parser = argparse.ArgumentParser(description="sets up .venv: packages and the native module")
    parser.add_argument("--tests", action="store_true", help="add what tests and checks need")
    parser.add_argument("--constraints", type=Path, help="instead of constraints/cpu.txt, or cuda.txt beside a GPU")
    parser.add_argument("--dry-run", action="store_true", help="only say which packages pip would take")
    options = parser.parse_args(arguments)
    if sys.version_info < (3, 11):
        say(f"tokenmill needs Python 3.11 or newer, and this is {sys.version.split()[0]}: make run PYTHON=python3.12")
        return 1
    constraints = options.constraints or choose_constraints()
    if options.dry_run:
        return subprocess.call([sys.executable, *pip("install", "--dry-run", *packages(constraints, options.tests))])
    try:
        set_up(constraints, options.tests)
    except Failure as failure:
        say(str(failure))
        return 1
    return 0


class Failure(Exception):
    """What could not be done, for the person who asked."""


def set_up(constraints: Path, tests: bool) -> None:
    record = read_record()
    wanted = digest(project_text(), constraints.read_text(), str(ROOT))
    tests = tests or bool(record.get("tests"))
    sources = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "csrc").iterdir()))
    native = digest(*sources, project_text(), str(ROOT), str(compiler()), "all" if tests else processor())
    missing = record.get("packages") != wanted or tests != bool(record.get("tests"))
    built = record.get("native") == native and not map_is_stale()
    if not missing and built:
        return
    began = time.monotonic()
    make_venv()
    say(f"== setting up .venv ({constraints.name}); the first time takes about a minute")
    compiling = None if built else Job("native", "install", "--no-deps", *kernels(tests), "-e", str(ROOT))
    if missing:
        fetch(constraints, tests, compiling, began)
        write_record(packages=wanted, tests=tests)
    if compiling is not None:
        follow(None, compiling, began)
        compiling.demand("the package tokenmill")
        tell_native()
        write_record(native=native)
    shutil.rmtree(WORK / "tmp", ignore_errors=True)
    took = time.monotonic() - began
    say(f"== .venv is ready: {count_packages()} packages, {size_of(VENV) / 1e9:.2f} GB, {took:.0f} s")


def fetch(constraints: Path, tests: bool, compiling: Job | None, began: float) -> None:
    """Packages for running, then those of the tests on top."""
    job = Job("packages", "install", "--no-compile", *packages(constraints))
    follow(job, compiling, began)
    job.demand("the packages that running needs")
    if tests:
        job = Job("tests", "install", *packages(constraints, tests=True))
        follow(job, compiling, began)
        job.demand("the packages that tests need")
        say("   byte code of all of it")
        compile_all()
    else:
        say("   byte code of what a server imports")
        import_once()


def import_once() -> None:
    """So that the first start writes none; the compiler has the other core. What fails here is told at that start."""
    modules = (
        "import tokenmill.cli.verbs, tokenmill.server.app, tokenmill.server.listener, tokenmill.engine.running.loop"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.call([python(), "-c", modules], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compile_all() -> None:
    """Byte code of everything: a test would take a warning about somebody's source for an error of its own."""
    subprocess.call([python(), "-m", "compileall", "-qq", "-j", "0", str(site_packages())])


# ------------------------------------------------------------------ what is wanted


def gpu() -> str | None:
    """The name of the first NVIDIA GPU that this machine shows, if any."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    ask = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        shown = subprocess.run(ask, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = shown.stdout.strip().splitlines()
    return names[0].strip() if shown.returncode == 0 and names else None


def choose_constraints() -> Path:
    name = gpu()
    if name is not None:
        say(f"== {name} found: packages for CUDA (make run CONSTRAINTS=constraints/cpu.txt takes the CPU's)")
    return ROOT / "constraints" / ("cuda.txt" if name is not None else "cpu.txt")


def kernels(tests: bool) -> list[str]:
    """What pip is told of the native module: tests compare all instruction sets, running needs this machine's alone."""
    return [] if tests else ["--config-settings=cmake.define.TOKENMILL_THIS_MACHINE=ON"]


def processor() -> str:
    """What decides which instruction set that is: .venv may come to another machine."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            told = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        told = ""
    known = ("avx", "fma", "f16c", "asimd", "bf16")
    return " ".join([platform.machine(), *(word for word in told.split() if word.startswith(known))])


def project() -> dict[str, Any]:
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def project_text() -> str:
    """What of pyproject.toml decides an installation; settings of tools do not."""
    known = project()
    return json.dumps([known["project"], known["build-system"], known["tool"]["scikit-build"]], sort_keys=True)


def packages(constraints: Path, tests: bool = False) -> list[str]:
    """pip's arguments: what the project needs to run; with `tests`, also its extra `dev`."""
    known = project()["project"]
    wanted = [*known["dependencies"], *(known["optional-dependencies"]["dev"] if tests else [])]
    given = ["-c", str(constraints)]
    if tests and not list(site_packages().glob("triton-*.dist-info")):  # a torch for CUDA has brought its own
        given += ["-c", str(ROOT / "constraints" / "tests.txt")]
    return [*given, *wanted]


# ------------------------------------------------------------------ .venv and its record


def python() -> str:
    return str(VENV / "bin" / "python")


def pip(*arguments: str) -> list[str]:
    verb, *rest = arguments
    return ["-m", "pip", verb, *PIP_FLAGS, *rest]


def site_packages() -> Path:
    return VENV / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def count_packages() -> int:
    return sum(1 for _ in site_packages().glob("*.dist-info"))


def map_is_stale() -> bool:
    """The package is found by a map of its modules that was written at its installation: one that has moved since, or
    become a folder, is looked for where it was."""
    maps = site_packages().glob("_editable_*tokenmill.py")
    return any(not Path(name).exists() for each in maps for name in re.findall(r"'([^']+\.py)'", each.read_text()))


def make_venv() -> None:
    """A virtual environment of this Python's version, unless it stands."""
    if not (os.access(python(), os.X_OK) and site_packages().is_dir()):
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
        if made.returncode != 0:
            raise Failure(
                f"{sys.executable} cannot make a virtual environment (on Debian: apt-get install python3-venv)\n"
                + tail(made.stdout + made.stderr)
            )
    shutil.rmtree(WORK / "tmp", ignore_errors=True)
    (WORK / "tmp").mkdir(parents=True, exist_ok=True)


def read_record() -> dict[str, Any]:
    try:
        return dict(json.loads((WORK / "done.json").read_text())) if os.access(python(), os.X_OK) else {}
    except (OSError, ValueError, TypeError):
        return {}


def write_record(**done: Any) -> None:
    (WORK / "done.json").write_text(json.dumps({**read_record(), **done}))


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def size_of(folder: Path) -> int:
    """Bytes on the disk."""
    files = (os.lstat(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)
    return sum(512 * file.st_blocks for file in files)


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def tell_native() -> None:
    """Says why the kernels are not there, if they are not."""
    if subprocess.run([python(), "-c", "import tokenmill._native"], capture_output=True).returncode == 0:
        return
    if compiler() is None:
        say("== NOTE: no C++ compiler here, so torch does the work of the native kernels")
    else:
        say("== NOTE: csrc did not compile, so torch does the work; see: .venv/bin/pip install -v --no-deps -e .")


# ------------------------------------------------------------------ pip at work


class Job:
    """One pip in .venv. Its words go to a log; `news` are those that have come since."""

    def __init__(self, name: str, *arguments: str) -> None:
        self.log = WORK / f"{name}.log"
        self.read = 0
        environment = {**os.environ, "TMPDIR": str(WORK / "tmp"), "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python(), *pip(*arguments)], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environment, cwd=ROOT,
            )  # fmt: skip

    def runs(self) -> bool:
        return self.process.poll() is None

    def news(self) -> Iterator[str]:
        with self.log.open(errors="replace") as log:
            log.seek(self.read)
            while (line := log.readline()).endswith("\n"):
                self.read = log.tell()
                yield line.rstrip()

    def demand(self, what: str) -> None:
        if self.process.wait() != 0:
            raise Failure(f"pip could not install {what} (all of it: {self.log}):\n{tail(self.log.read_text())}")


def follow(fetching: Job | None, compiling: Job | None, began: float) -> None:
    """Until `fetching` has ended (without one: `compiling`): what comes, how large it is, and how far it is."""
    job = fetching or compiling
    assert job is not None
    told, total, noted = time.monotonic(), 0.0, False
    while True:
        ended = not job.runs()
        for line in job.news() if fetching else ():
            if wheel := WHEEL.match(line):
                size = wheel_bytes(wheel)
                total += size
                if size >= LARGE:
                    say(f"   {'-'.join(Path(wheel['file']).name.split('-')[:2]):40} {size / 1e6:6.0f} MB")
                if not noted and "nvidia_" in line and gpu() is None:
                    noted = True
                    say("== NOTE: pip's index has only torch's CUDA build, gigabytes more than the CPU's: see README")
            elif line.startswith("Installing collected packages:"):
                say(f"   unpacking {line.count(',') + 1} packages, {total / 1e6:.0f} MB")
        if ended:
            break
        if sys.stdout.isatty() or time.monotonic() - told >= TELL_S:
            told = time.monotonic()
            say(f"   {told - began:3.0f} s: {state(fetching, compiling)}", passing=True)
        time.sleep(0.5)
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)


def state(fetching: Job | None, compiling: Job | None) -> str:
    parts = []
    if fetching:
        parts.append(f"{count_packages()} packages are there")
        if coming := size_of(WORK / "tmp"):
            parts.append(f"{coming / 1e6:.0f} MB under way")
    if compiling and compiling.runs():
        parts.append(f"kernels: {sum(1 for _ in (ROOT / 'build').glob('*/CMakeFiles/**/*.o'))} files compiled")
    return ", ".join(parts)


def wheel_bytes(wheel: re.Match[str]) -> float:
    if wheel["size"]:
        return float(wheel["size"]) * UNITS[wheel["unit"]]
    file = Path(wheel["file"].removeprefix("file://"))
    return file.stat().st_size if file.is_file() else 0.0


def tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-15:])


def say(line: str, passing: bool = False) -> None:
    """A line; on a terminal, one that passes is written over by the next."""
    if sys.stdout.isatty():
        print("\r\033[K" + line, end="" if passing else "\n", flush=True)
    else:
        print(line, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; the next make goes on where this one stopped")
        sys.exit(130)
