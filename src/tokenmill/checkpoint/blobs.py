"""Files that clients send to the store, named by the digest of their bytes. Owns: receiving them piece by piece,
verifying them, and how many bytes are kept of files that no model needs.

Must not know: HTTP, what the files hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path

from tokenmill.checkpoint.store import Store, unwritable
from tokenmill.core.errors import BusyError, ParameterError, TooLargeError

_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
SPARE = 1 << 30
"""Bytes of the disk that uploads must leave free."""


def read_digest(given: object) -> str:
    """Read `sha256:...` (or `sha256-...`) and return it in one spelling. Anything else is refused."""
    found = _DIGEST.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise ParameterError("a digest must be sha256: and 64 lower-case hexadecimal digits.", param="digest")
    return f"sha256:{found[1]}"


def check_files(files: dict[str, str], param: str = "files") -> dict[str, str]:
    """Check file names with their digests. A name that leads out of its folder is refused."""
    for name in files:
        if not _FILE.fullmatch(name) or ".." in name:
            raise ParameterError(
                f"{param}: a file's name is 1 to 128 letters, digits and ._- without folders, not {ascii(name)[:80]}.",
                param=param,
            )
    if len({name.lower() for name in files}) < len(files):
        raise ParameterError(f"{param}: two names differ in case alone.", param=param)
    return {name: read_digest(digest) for name, digest in files.items()}


class Incoming:
    """A file that is being received. `most`: the ceiling of its bytes, and of the bytes of all files that no model
    needs."""

    def __init__(self, store: Store, digest: str, most: int, expected: int | None = None) -> None:
        self.store, self.digest, self.most = store, read_digest(digest), most
        self.size = 0
        self._hash = hashlib.sha256()
        with store.changing():
            needed = set[str]().union(*(entry.blobs for entry in store.entries()[0]))
            self.idle = sum(
                _size(path) for path in store.blobs.iterdir() if path.name.replace("-", ":", 1) not in needed
            )
            self._check(expected or 0)
            free = shutil.disk_usage(store.home).free
            if (expected or 0) > free - SPARE:
                raise BusyError("the disk has no room for this file now.", param="digest")
            self.path = store.blobs / f".{self.digest.replace(':', '-')}.{secrets.token_hex(4)}"
            self.file = self.path.open("xb")

    def write(self, piece: bytes) -> None:
        """Write the next piece."""
        self.size += len(piece)
        self._check(self.size)
        self._hash.update(piece)
        try:
            self.file.write(piece)
        except OSError as error:
            raise unwritable(error) from error

    def finish(self) -> Path:
        """Check the digest of a file that has arrived completely, and give the file its name."""
        if f"sha256:{self._hash.hexdigest()}" != self.digest:
            raise ParameterError("the file is not what its digest says: send it again.", param="digest")
        target = self.store.blob(self.digest)
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            os.replace(self.path, target)
        except OSError as error:
            raise unwritable(error) from error
        return target

    def close(self) -> None:
        """Delete the file if it was not finished."""
        with contextlib.suppress(OSError):
            self.file.close()
        self.path.unlink(missing_ok=True)

    def _check(self, size: int) -> None:
        if size > self.most:
            raise TooLargeError(f"a file may have at most {self.most} bytes here (--max-blob-bytes).", param="digest")
        if self.idle + size > self.most:
            raise TooLargeError(
                f"files that no model needs may have at most {self.most} bytes together (--max-blob-bytes): create "
                "models of those that were sent, or wait a day until they are removed.",
                param="digest",
            )


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
