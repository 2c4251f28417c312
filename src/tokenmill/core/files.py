"""Opening what lies in a model folder. Owns: only regular files of bounded size are opened, and how failures are
worded.

A folder comes from strangers. A name may be a pipe, a device, a socket, a folder or a link to one of these; reading it
would wait or never end. Must not know: what the bytes mean.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tokenmill.core.errors import ModelError, UserError, why
from tokenmill.core.nesting import deeper_than

log = logging.getLogger("tokenmill.files")

MAX_DEPTH = 64
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def present(path: Path) -> bool:
    """Does anything with this name exist? A link that leads nowhere counts: that is damage, not absence."""
    return os.path.lexists(path)


def in_home(name: str | Path) -> Path:
    """A path that a person typed. `~` is a home, unless nobody has it: then it is a name like others, as in a shell."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def home() -> Path:
    """The home of whoever runs this."""
    try:
        return Path.home()
    except RuntimeError:
        raise UserError("This user has no home folder: set HOME, or TOKENMILL_CACHE and TOKENMILL_HOME.") from None


_FIRST: tuple[tuple[bytes, str], ...] = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the file itself: run `git lfs pull` there, or download it again",
    ),
    (b"GGUF", "a GGUF file: its name must end in .gguf"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes them (pytorch_model.bin)"),
    (b"\x1f\x8b", "compressed (gzip): unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed (zstd): unpack it"),
    (b"BZh", "compressed (bzip2): unpack it"),
    (b"\xfd7zXZ", "compressed (xz): unpack it"),
    (b"\x89HDF", "an HDF5 file, as Keras writes them"),
)
_PAGE = re.compile(rb"\s*(<!--|<!doctype html|<html|<head|<\?xml)", re.IGNORECASE)
LOOK = 64
"""How many first bytes of a file are read to find out what it is."""


def told_by(first: bytes) -> str | None:
    """What a file really is, judged by its first bytes, if its name says otherwise; None: not known."""
    for magic, what in _FIRST:
        if first.startswith(magic):
            return what
    if _PAGE.match(first):
        return "a web page, not a model's file: the download was answered by an error or a login page"
    if first[:1] == b"\x80" and first[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle, as older versions of torch.save write them (pytorch_model.bin)"
    if len(first) > 9 and first[8:9] == b"{" and int.from_bytes(first[:8], "little") < 1 << 30:
        return "a safetensors file: its name must end in .safetensors"
    if first and not first.strip(b"\0"):
        return "nothing but zeros: download it again"
    return None


def open_regular(path: Path | str, most: int | None = None) -> BinaryIO:
    """Open a regular file of at most `most` bytes for reading; raises a ModelError that names it."""
    try:
        _check(path, os.stat(path), most)
        # Non-blocking, in case it has become a pipe since the check.
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
    """Read a regular file whole; raises a ModelError that names it."""
    with open_regular(path, most) as file:
        try:
            data = file.read(most + 1) or b""
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({why(error)})") from error
    if len(data) > most:  # some file systems report wrong sizes
        raise ModelError(f"{path}: more than {most} bytes, the limit for such a file")
    return data


def read_object(path: Path | str, most: int, *, once: bool = False) -> dict[str, Any]:
    """Read the JSON object in a file; raises a ModelError that names the file. Of a name with two values the last one
    counts, as for all who read such files, and the log says so. once: it is refused."""
    data = read_regular(path, most)
    twice: list[str] = []
    try:
        value = json.loads(data, object_pairs_hook=partial(_object, twice))
    except (ValueError, RecursionError) as error:
        if other := told_by(data[:LOOK]):
            raise ModelError(f"{path}: is {other}") from error
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ModelError(f"{path}: not valid JSON ({reason}); download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    if deeper_than(value, MAX_DEPTH):
        raise ModelError(f"{path}: nested deeper than {MAX_DEPTH} levels")
    if twice and once:
        raise ModelError(f"{path}: {twice[0][:200]!r} is there twice, with two values")
    if twice:
        log.warning("%s: %r is there twice, with two values: the last one counts.", path, twice[0][:200])
    return value


def _object(twice: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. twice: is told the names that have two values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice += [name for name, value in pairs if value != found[name]]
    return found


def _check(path: Path | str, found: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise ModelError(f"{path}: is {kind}, not a file; the model folder is damaged")
    if most is not None and found.st_size > most:
        raise ModelError(f"{path}: {found.st_size} bytes is over the limit of {most} for such a file")
