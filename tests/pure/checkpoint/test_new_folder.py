"""Folders that are written whole or not at all, however their writer ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.checkpoint.new_folder import OLD_S, new_file, new_folder
from tokenmill.core.errors import UserError

PROGRAM = """
import signal, sys
from pathlib import Path
from tokenmill.checkpoint.new_folder import new_folder
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background is deaf to it
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("x")
    print("begun", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_by_a_writer_that_is_told_to_end(number: signal.Signals, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"begun\n"
        assert list(tmp_path.iterdir())
        child.send_signal(number)
    assert child.returncode in (128 + number, -number) and not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_taken_away(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    number = int(gone.stdout)
    old, young, ours = tmp_path / f".out.partial-{number}", tmp_path / ".out.partial-0", tmp_path / ".other.partial-0"
    living = tmp_path / f".out.partial-{os.getppid()}"
    for folder in (old, young, ours, living):
        folder.mkdir()
        (folder / "half").write_text("x")
        if folder is not young:
            os.utime(folder, (0, OLD_S))
    before = signal.getsignal(signal.SIGTERM)
    with new_folder(tmp_path / "out") as folder:
        (folder / "whole").write_text("x")
    assert {each.name for each in tmp_path.iterdir()} == {"out", young.name, ours.name, living.name}
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64"), KeyboardInterrupt()], ids=repr
)
def test_a_file_stays_until_its_successor_is_whole(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "training.pt"
    with new_file(target) as file:
        file.write_text("first")
    with pytest.raises(UserError if isinstance(error, Exception) else KeyboardInterrupt), new_file(target) as file:
        file.write_text("sec")
        raise error
    assert target.read_text() == "first" and list(tmp_path.iterdir()) == [target]
