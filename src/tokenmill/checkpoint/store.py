"""Stored models, under names that the user chooses. Owns: the folder of manifests, writing each completely or not at
all, and keeping two processes from undoing each other's changes. blobs.py keeps the files that clients send.

Must not know: Modelfiles, HTTP, engines, what a manifest's parameters mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tokenmill.checkpoint.entry import Entry, Source
from tokenmill.checkpoint.stored_names import file_name, full_name, may_be_name, short_name
from tokenmill.core.errors import BusyError, ModelError, UserError, why
from tokenmill.core.files import read_regular
from tokenmill.core.whole_file import write_whole

MOST_BYTES = 8 << 20
"""Most bytes of a manifest."""
MOST_MODELS = 10_000
STALE_S = 24 * 3600.0
"""Unfinished files older than this come from processes that were killed."""
PATIENCE_S = 60.0
"""How long a change waits for those of others, which take moments."""
LOOK_S = 0.02
_decode = msgspec.json.Decoder(Entry).decode


class NoSuchModelError(UserError):
    """The store has no model of that name."""


class Store:
    """The models in one folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.models = home / "models"
        self.blobs = home / "blobs"
        self.files = home / "files"

    def get(self, name: str) -> Entry:
        """The model of this name. A NoSuchModelError says that there is none."""
        full = full_name(name)
        path = self.models / file_name(full)
        if not os.path.lexists(path):
            raise NoSuchModelError(f"model {short_name(full)!r} not found: `tokenmill list` shows what is stored.")
        return _read(path, full)

    def find(self, name: str) -> Entry | None:
        """The model of this name, or None."""
        if not may_be_name(name) or not os.path.lexists(self.models / file_name(full_name(name))):
            return None
        return self.get(name)

    def entries(self) -> tuple[list[Entry], list[str]]:
        """All models, the most recently changed first, and one sentence for every manifest that cannot be read."""
        found, wrong = [], []
        for path in sorted(self.models.glob("*.json"))[:MOST_MODELS]:
            if path.name.startswith("."):
                continue
            try:
                found.append(_read(path, None))
            except ModelError as error:
                if os.path.lexists(path):  # a manifest that is missing now was removed meanwhile
                    wrong.append(str(error))
        return sorted(found, key=lambda entry: (-entry.changed, entry.name)), wrong

    def put(self, entry: Entry) -> Entry:
        """Store a model. It replaces a model of the same name."""
        full = full_name(entry.name)
        entry = msgspec.structs.replace(entry, name=full, changed=entry.changed or time.time())
        try:
            data = msgspec.json.format(msgspec.json.encode(entry), indent=1) + b"\n"
        except UnicodeEncodeError:
            raise UserError(f"{full}: the name of a folder or file is not UTF-8 text, which manifests are.") from None
        if len(data) > MOST_BYTES:
            raise UserError(f"{full}: its texts and parameters are more than {MOST_BYTES} bytes.")
        with self.changing():
            for digest in sorted(entry.blobs):
                if not self.blob(digest).is_file():
                    raise UserError(f"there is no file {digest} here: send it first (POST /api/blobs/{digest}).")
            path = self.models / file_name(full)
            if not path.exists() and len(os.listdir(self.models)) >= MOST_MODELS:
                raise UserError(f"{MOST_MODELS} models are stored; remove one first.")
            write_whole(path, data)
        return entry

    def remove(self, name: str) -> Entry | None:
        """Delete a model, and the clients' files that only it needs. Returns its record (None: it could not be
        read)."""
        full = full_name(name)
        path = self.models / file_name(full)
        with self.changing():
            entry = None
            with contextlib.suppress(ModelError):
                entry = self.get(full)
            try:
                path.unlink()
            except FileNotFoundError:
                raise NoSuchModelError(
                    f"model {short_name(full)!r} not found: `tokenmill list` shows what is stored."
                ) from None
            self._sweep(entry.blobs if entry is not None else set())
        return entry

    def copy(self, source: str, target: str) -> Entry:
        """Store the same model under another name."""
        return self.put(msgspec.structs.replace(self.get(source), name=full_name(target, "destination"), changed=0.0))

    def blob(self, digest: str) -> Path:
        """The path of the file with a checked digest, whether or not it exists."""
        return self.blobs / digest.replace(":", "-")

    def folder(self, source: Source) -> Path:
        """A folder with the files that clients sent, under the names that they gave."""
        target = self.files / _folder_name(source)
        if not target.is_dir():
            with self.changing():
                self._gather(source, target)
        return target

    def _gather(self, source: Source, target: Path) -> None:
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            partial.mkdir(parents=True)
            for name, digest in source.files.items():
                link(self.blob(digest), partial / name)
            with contextlib.suppress(FileExistsError, OSError):
                partial.rename(target)
            if not target.is_dir():
                raise OSError(f"{target.name} cannot be written")
        except FileNotFoundError as error:
            raise UserError("a file of this model is gone from the store: create the model again.") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def collect(self) -> None:
        """Delete what no model needs: files that were not used for a day, and leftovers of killed processes."""
        with self.changing():
            self._sweep(set())

    def _sweep(self, dropped: set[str]) -> None:
        entries, wrong = self.entries()
        if wrong:
            return  # the files that these manifests need are not known, so nothing is deleted
        needed = set[str]().union(*(entry.blobs for entry in entries))
        for path in self.blobs.iterdir():
            digest = path.name.replace("-", ":", 1)
            if digest not in needed and (digest in dropped or _is_old(path)):
                path.unlink(missing_ok=True)
        for path in self.models.glob(".*"):
            if _is_old(path):
                path.unlink(missing_ok=True)
        used = {_folder_name(s) for e in entries for s in (e.source, e.adapter) if s is not None and s.files}
        for path in self.files.iterdir():
            if path.name not in used and (not path.name.startswith(".") or _is_old(path)):
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock on the store against all other processes and threads."""
        try:
            for folder in (self.models, self.blobs, self.files):
                folder.mkdir(parents=True, exist_ok=True)
            # Non-blocking: somebody may have made a pipe of this name, and opening it would wait for ever.
            lock = os.open(self.home / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            try:
                _lock(lock)
                yield
            finally:
                os.close(lock)
        except OSError as error:
            raise unwritable(error) from error


def unwritable(error: OSError) -> BusyError:
    """The error for a full or write-protected disk, which is no request's fault. Clients read it, so it names no
    path."""
    return BusyError(f"the folder of stored models (TOKENMILL_HOME) cannot be changed now: {why(error)}.")


def link(file: Path, name: Path) -> None:
    """Give a file another name without copying it."""
    try:
        os.link(file, name)
    except FileNotFoundError:
        raise
    except OSError:  # this file system has no such links
        name.symlink_to(file.resolve(strict=True))


def _read(path: Path, full: str | None) -> Entry:
    """Read a manifest; a ModelError names its file."""
    data = read_regular(path, MOST_BYTES)
    try:
        entry = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: this is not the manifest of a stored model ({str(error)[:200]}); remove the file, and create or "
            "pull the model again."
        ) from None
    if file_name(entry.name) != path.name or (full is not None and file_name(full) != path.name):
        raise ModelError(f"{path}: the manifest is of {ascii(entry.name)[:80]}; remove the file.")
    return entry


def _folder_name(source: Source) -> str:
    return hashlib.sha256(msgspec.json.encode(source.files, order="sorted")).hexdigest()


def _is_old(path: Path) -> bool:
    try:
        return path.lstat().st_mtime < time.time() - STALE_S
    except FileNotFoundError:
        return False


def _lock(file: int) -> None:
    """Wait for the lock, but not for ever: its holder may be stopped. Closing the file releases it."""
    try:
        import fcntl
    except ImportError:  # this system has no such locks
        return
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise BusyError("another process is changing the stored models, and does not end; try again.") from None
            time.sleep(LOOK_S)
        else:
            return
