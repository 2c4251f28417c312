"""Folders that are written whole or not at all, however their writer ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.checkpoint.new_folder import OLD_S, check_free, check_new, new_file, new_folder, sole_writer
from tokenmill.core.errors import UserError

PROGRAM = """
import signal, sys
from pathlib import Path
from tokenmill.checkpoint.new_folder import new_folder
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background is deaf to it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup's to this
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("x")
    print("begun", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_is_left_by_a_writer_that_is_told_to_end(number: signal.Signals, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"begun\n"
        assert list(tmp_path.iterdir())
        child.send_signal(number)
    assert child.returncode in (128 + number, -number) and not list(tmp_path.iterdir())


def begun(program: str, target: Path) -> subprocess.Popen[bytes]:
    """A process that has begun to write this target, and waits."""
    child = subprocess.Popen([sys.executable, "-c", program, str(target)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"begun\n"
    return child


HEAD = "from tokenmill.checkpoint.new_folder import "
FILE = PROGRAM.replace("with new_folder", f"{HEAD}new_file\nwith new_file").replace('(folder / "half")', "folder")
SOLE = PROGRAM.replace("with new_folder", f"{HEAD}sole_writer\nwith sole_writer").replace(
    "(folder /", "(Path(sys.argv[1]) /"
)
WRITERS = {"folder": (PROGRAM, new_folder), "file": (FILE, new_file), "what is in it stays": (SOLE, sole_writer)}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_a_killed_writer_left_is_used_again_at_once(kind: str, tmp_path: Path) -> None:
    program, writing = WRITERS[kind]
    target = tmp_path / "out"
    with begun(program, target) as child:
        with pytest.raises(UserError, match="out is being written by another process now"), writing(target):
            pass
        assert len([*tmp_path.iterdir()]) == 1
        child.kill()
    with writing(target) as partial:
        if kind == "folder":
            assert partial is not None and not list(partial.iterdir())
        if kind == "file":
            assert partial is not None and partial.write_text("whole")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    if kind == "what is in it stays":
        assert (target / "half").read_text() == "x"


def test_what_other_machines_may_be_writing_stays_for_an_hour(tmp_path: Path) -> None:
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


def test_an_empty_folder_that_exists_is_filled_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a mount, or lie where nothing can be made beside it."""
    target = tmp_path / "out"
    target.mkdir()
    before = target.stat().st_ino
    monkeypatch.chdir(target)
    with pytest.raises(RuntimeError), new_folder(Path()) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert not list(target.iterdir())
    with new_folder(Path()) as folder:
        assert folder.parent == target
        check_free(Path())  # what is hidden there is no model
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text("x")
    assert sorted(each.name for each in target.iterdir()) == ["config.json", "model.safetensors"]
    assert target.stat().st_ino == before
    with pytest.raises(UserError, match="exists already"):
        check_free(Path())


def test_what_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "pipe", "loop"):
        for check in (check_free, check_new):
            with pytest.raises(UserError, match=f"{name} exists already"):
                check(tmp_path / name)
            with pytest.raises(UserError, match="cannot be written"):
                check(tmp_path / name / "below" / "it")
    with pytest.raises(UserError, match="cannot be written"), new_folder(tmp_path / ("a" * 300)):
        pass
    for name in ("new", "new/deep", "with space", "new\nline", "\udcff"):
        check_free(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_forbids_writing_is_refused_before_any_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="nothing can be made in"):
        check_free(tmp_path / "out")


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


def test_a_full_disk_in_the_words_of_torch(tmp_path: Path) -> None:
    """Its error names a line of its own source."""
    for before, left in ((None, "nothing is left of it"), (b"old", "what was there before stays")):
        if before is not None:
            (tmp_path / "file").write_bytes(before)
        with pytest.raises(UserError, match=rf"cannot be written \(the disk is full\); {left}"):
            with new_file(tmp_path / "file"):
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 115904 vs 115792")
        assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_way_through_a_folder_that_is_not_there_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for check in (check_free, check_new):
        check(tmp_path / "there" / ".." / "new" / "target")
        with pytest.raises(UserError, match=r"there is no folder .*gone"):
            check(tmp_path / "gone" / ".." / "target")
