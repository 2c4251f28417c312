"""Opening what lies in a model folder. Owns: that it is a regular file of bounded size, and how failures are worded.

A folder comes from strangers: a name may be a pipe, a device, a socket, a folder, or a link to one of these, and
reading such would wait or never end. Must not know: what the bytes mean.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from tokenmill.core.errors import ModelError, why
from tokenmill.core.nesting import deeper_than

MAX_DEPTH = 64
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def present(path: Path) -> bool:
    """Is there anything of this name? A link that leads nowhere counts: it is damage, not absence."""
    return os.path.lexists(path)


def open_regular(path: Path | str, most: int | None = None) -> BinaryIO:
    """A regular file of at most `most` bytes, open for reading; raises ModelError that names it."""
    try:
        _check(path, os.stat(path), most)
        # Not blocking, in case it has become a pipe since then.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file; the model folder is incomplete") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({why(error)})") from error
    try:
        _check(path, os.fstat(file.fileno()), most)
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: Path | str, most: int) -> bytes:
    """All bytes of a regular file; raises ModelError that names it."""
    with open_regular(path, most) as file:
        try:
            data = file.read(most + 1) or b""
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({why(error)})") from error
    if len(data) > most:  # some file systems state sizes that are not so
        raise ModelError(f"{path}: more than {most} bytes, the limit for such a file")
    return data


def read_object(path: Path | str, most: int) -> dict[str, Any]:
    """The JSON object in a file; raises ModelError that names the file."""
    data = read_regular(path, most)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ModelError(f"{path}: not valid JSON ({said}); download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    if deeper_than(value, MAX_DEPTH):
        raise ModelError(f"{path}: nested deeper than {MAX_DEPTH} levels")
    return value


def _check(path: Path | str, found: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise ModelError(f"{path}: is {kind}, not a file; the model folder is damaged")
    if most is not None and found.st_size > most:
        raise ModelError(f"{path}: {found.st_size} bytes is over the limit of {most} for such a file")
