"""A model folder, or one of its files, that is written completely or not at all. Must not know: what is written.

Until it is whole it lies beside its target under a hidden name. Its writer holds a lock on it, which the system takes
back however the process ends. So what a dead process left is used again at once, and a second writer is refused.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import socket
import stat
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from tokenmill.core.errors import UserError

OLD_S = 3600.0
"""A folder of another machine whose newest file is older than this is no longer being written."""
MOST_NAME = 1000
"""Most characters of a name in a message."""
_OF_TORCH = "inline_container"
"""What torch's error of a full disk names: its own file, and no reason."""
_FLAGS = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_ENDS = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
"""Signals that end a process which does not handle them. A terminal that is closed sends the second."""


def check_free(target: Path) -> None:
    """Refuse a folder that holds something, and one that could not be made."""
    if os.path.lexists(target) and (not os.path.isdir(target) or _holds_something(target)):
        raise UserError(f"{target} exists already; name a folder that does not, or an empty one.")
    check_place(target)


def check_new(target: Path) -> None:
    """Refuse a file that exists, and one that could not be made."""
    if os.path.lexists(target):
        raise UserError(f"{target} exists already; name a file that does not.")
    check_place(target)


def check_place(target: Path) -> None:
    """Refuse a folder or file that nobody could make there, before any work is done."""
    for at, part in enumerate(target.parts):
        if part == os.pardir and at and not os.path.isdir(gone := Path(*target.parts[:at])):
            raise UserError(f"{target} cannot be written: there is no folder {gone}.")
    above = Path(os.path.abspath(target))
    try:
        above = above if os.path.isdir(above) else above.parent
        while not os.path.lexists(above):
            above = above.parent
        if not stat.S_ISDIR(above.stat().st_mode):
            raise UserError(f"{target} cannot be written: {above} is not a folder.")
    except OSError as error:
        raise UserError(f"{str(target)[:MOST_NAME]} cannot be written ({_reason(error)}).") from error
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{target} cannot be written: nothing can be made in {above}.")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A new folder that becomes `target` at the end. If the end is not reached, nothing stays. Only a process that is
    killed outright leaves its folder behind; the next one with the same target empties it."""
    _clear(target)
    # Other machines may share the disk without sharing locks, so each has a name of its own.
    machine = f"{zlib.crc32(socket.gethostname().encode()):08x}"
    with ended_in_order(), claimed(target, f"partial-{machine}") as partial:
        try:
            check_free(target)
            empty(partial)
            yield partial
            settle(partial, target)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{target} cannot be written ({_reason(error)}); nothing is left of it.") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def new_file(target: Path, *, fresh: bool = False) -> Iterator[Path]:
    """A file beside `target` that takes its place at the end: until then, and if that is not reached, what was there
    stays. One that is left by a process that was killed is written over by the next. fresh: nothing may be there."""
    with ended_in_order(), claimed(target, "partial", folder=False) as partial:
        try:
            if fresh:
                check_new(target)
            yield partial
            partial.replace(target)
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = _reason(error).splitlines()[0]
            reason = "the disk is full" if _OF_TORCH in reason else reason
            left = "what was there before stays" if os.path.lexists(target) else "nothing is left of it"
            raise UserError(f"{target} cannot be written ({reason}); {left}.") from error
        finally:
            partial.unlink(missing_ok=True)


def hidden(target: Path, ending: str, *, folder: bool = True) -> Path:
    """Where `target` lies until it is whole: beside it. A folder that exists already may be a mount, or lie where
    nothing else can be made, so its contents lie inside it."""
    whole = Path(os.path.abspath(target))
    return (whole if folder and os.path.isdir(whole) else whole.parent) / f".{whole.name}.{ending}"


def settle(partial: Path, target: Path) -> None:
    """Give a finished folder its name. If it lies inside of its target, its files move up, the config last: without
    that nobody takes the folder for a model."""
    if partial.parent != Path(os.path.abspath(target)):
        partial.rename(target)
        return
    moved: list[Path] = []
    try:
        for path in sorted(partial.iterdir(), key=lambda path: (path.name == "config.json", path.name)):
            path.rename(target / path.name)
            moved.append(target / path.name)
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        raise
    partial.rmdir()


@contextmanager
def claimed(target: Path, ending: str, *, folder: bool = True) -> Iterator[Path]:
    """The folder or file `.NAME.ending`, which only this process may write. It may hold what a dead process left."""
    partial = hidden(target, ending, folder=folder)
    with _refusing(target, "folder" if folder else "file", "; nothing is left of it"):
        partial.parent.mkdir(parents=True, exist_ok=True)
        lock = _claim(partial, folder=folder)
        if lock is None:  # there are no locks here
            partial = partial.with_name(f"{partial.name}-{os.getpid()}")
            _make(partial, folder=folder)
    try:
        yield partial
    finally:
        _release(lock)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Make a folder unless it is there, and be the only process that writes into it. What is in it stays. If nothing
    is in it after an error, a new folder goes."""
    new = not os.path.lexists(folder)
    with _refusing(folder, "folder"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = _claim(folder.resolve(), folder=True)
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):
                folder.rmdir()
        raise
    finally:
        _release(lock)


@contextmanager
def _refusing(target: Path, kind: str, left: str = "") -> Iterator[None]:
    """Say why a folder or file cannot be claimed. left: what is said of its remains."""
    try:
        yield
    except BlockingIOError:
        raise UserError(
            f"{target} is being written by another process now: wait for it, or name another {kind}."
        ) from None
    except OSError as error:
        raise UserError(f"{target} cannot be written ({_reason(error)}){left}.") from error


def _release(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def empty(folder: Path) -> None:
    """Delete what a folder holds."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _claim(partial: Path, *, folder: bool) -> int | None:
    """Make it unless it is there, and lock it. None: no locks. BlockingIOError: a living process has it."""
    try:
        import fcntl
    except ImportError:
        return None
    while True:
        _make(partial, folder=folder)
        number = os.open(partial, _FLAGS | (os.O_RDONLY if folder else os.O_RDWR))
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(partial, number):  # its last owner has not just moved or deleted it
                return number
        except BlockingIOError:
            os.close(number)
            raise
        except OSError:  # this file system has none
            os.close(number)
            return None
        os.close(number)


def _make(partial: Path, *, folder: bool) -> None:
    if folder:
        partial.mkdir(exist_ok=True)
    else:
        os.close(os.open(partial, _FLAGS | os.O_WRONLY | os.O_CREAT, 0o666))


def _is_still(path: Path, number: int) -> bool:
    try:
        return os.path.samestat(os.fstat(number), os.lstat(path))
    except FileNotFoundError:
        return False


def _holds_something(folder: Path) -> bool:
    ours = f".{Path(os.path.abspath(folder)).name}."
    try:
        return any(not each.name.removeprefix(ours).startswith("partial") for each in folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({_reason(error)}).") from error


def _clear(target: Path) -> None:
    """Delete old folders that processes of other machines, or without locks, have begun for this target. Whether such a
    process lives is not known here; so young folders stay."""
    example = hidden(target, "partial-*")
    for left in example.parent.glob(glob.escape(example.name[:-1]) + "*"):
        with suppress(OSError):
            number = left.name.rpartition("-")[2]
            gone = not (number.isdigit() and Path("/proc", number).exists())
            if gone and not _is_locked(left) and time.time() - left.stat().st_mtime > OLD_S:
                shutil.rmtree(left, ignore_errors=True)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _is_locked(folder: Path) -> bool:
    try:
        _release(_claim(folder, folder=True))
    except BlockingIOError:
        return True
    return False


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let the signals that end a process raise an exception, as Ctrl-C does, unless somebody else handles them."""
    here = threading.current_thread() is threading.main_thread()
    ours = [number for number in _ENDS if here and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
