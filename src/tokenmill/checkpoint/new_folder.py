"""A model folder that is written whole or not at all. Must not know: what is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tokenmill.core.errors import UserError


def check_free(target: Path) -> None:
    """Refuse a folder that holds something."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already; name a folder that does not, or an empty one.")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place at the end; nothing is left of it if that is not reached."""
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        yield partial
        if target.exists():
            target.rmdir()  # it is empty
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{target} cannot be written ({reason}); nothing is left of it.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
