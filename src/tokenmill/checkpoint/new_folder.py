"""A model folder, or one of its files, that is written completely or not at all. Must not know: what is written."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tokenmill.core.errors import UserError

OLD_S = 3600.0
"""A folder whose newest file is older than this is no longer being written."""


def check_free(target: Path) -> None:
    """Refuse a folder that holds something."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already; name a folder that does not, or an empty one.")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, which is moved there at the end. If the end is not reached, nothing stays. Only a
    process that is killed outright leaves its folder behind; the next process deletes it."""
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        _clear(target)
        partial.mkdir(parents=True)
        with _ended_in_order():
            yield partial
        if target.exists():
            target.rmdir()  # it is empty
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{target} cannot be written ({reason}); nothing is left of it.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A file beside `target` that takes its place at the end: until then, and if that is not reached, what was there
    stays. One that is left by a process that was killed is written over by the next."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        yield partial
        partial.replace(target)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch's own of a full disk
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"{target} cannot be written ({reason}); what was there before stays.") from error
    finally:
        partial.unlink(missing_ok=True)


def _clear(target: Path) -> None:
    """Delete folders that ended processes have begun for this target. Another machine that shares the disk may write
    one, and its processes are not visible here; so young folders stay."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        number = left.name.rpartition("-")[2]
        gone = number.isdigit() and Path("/proc/self").exists() and not Path("/proc", number).exists()
        if gone and time.time() - left.stat().st_mtime > OLD_S:
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM raise an exception, as Ctrl-C does, unless somebody else handles it."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
