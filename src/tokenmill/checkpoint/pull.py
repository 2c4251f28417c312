"""Bringing a model into the store: from the hub, or as a reference to files on this machine. Owns: what has to be
downloaded, how much of it is there already, and which files are deleted with a model.

Must not know: terminals, HTTP answers, Modelfiles.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.checkpoint.beginnings import check_files
from tokenmill.checkpoint.entry import Entry, Source
from tokenmill.checkpoint.gguf_file import part_names
from tokenmill.checkpoint.hub import Hub, Wanted, chosen_files, download_model
from tokenmill.checkpoint.no_model import check_folder, no_model
from tokenmill.checkpoint.resumable_download import LARGE
from tokenmill.checkpoint.store import Store
from tokenmill.checkpoint.stored_names import LATEST, full_name, name_from, without_hub
from tokenmill.core.errors import UserError

LOOK_S = 0.25
_KINDS = ("*.safetensors", "*.gguf", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class Progress:
    """A pull's progress. digest: of one file, as the hub names it. total 0: a message without numbers."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


Tell = Callable[[Progress], None]


def pull_local(store: Store, path: Path, name: str | None = None) -> Entry:
    """Store a reference to a model on this machine. Its files stay where they are."""
    path = path.absolute()
    form, size = measured(path)
    full = full_name(name or name_from(path.name))
    return store.put(Entry(full, Source("path", path=str(path)), size=size, format=form))


def pull_hub(store: Store, given: str, revision: str | None, hub: Hub, tell: Tell, name: str | None = None) -> Entry:
    """Download a model from the hub, and store it under its own name or another one."""
    plain = without_hub(given)
    repo, _, tag = plain.partition(":")
    asked = repo if tag.lower() in ("", LATEST) else plain
    full = full_name(name or plain)
    tell(Progress("pulling manifest"))
    files, commit = chosen_files(asked, revision, hub)
    there = {file.blob for file in files if _have(hub, repo, file) >= file.size > 0}
    with _watched(hub, repo, files, tell):
        path = download_model(asked, revision, hub)
    tell(Progress("verifying sha256 digest"))
    form, size = measured(path)
    tell(Progress("writing manifest"))
    source = Source(
        "hub", path=str(path), repo=asked, revision=commit or revision or "", fetched=bool(files) and not there
    )
    return store.put(Entry(full, source, size=size, format=form))


def measured(path: Path) -> tuple[str, int]:
    """(format, bytes of weights). A model without weights is refused, as is one whose files are no model."""
    if path.is_file() and path.suffix == ".gguf":
        check_files("gguf", path.parent, parts_of(path))
        return "gguf", sum(file.stat().st_size for file in parts_of(path))
    if path.is_dir():
        check_folder(path)
        for pattern, form in zip(_KINDS, ("safetensors", "gguf", "pytorch"), strict=True):
            files = [file for file in path.glob(pattern) if file.is_file()]
            if files:
                check_files(form, path, files)
                return form, sum(file.stat().st_size for file in files)
        raise UserError(f"{path} holds no weights ({', '.join(_KINDS)}).")
    raise no_model(path)


def parts_of(path: Path) -> list[Path]:
    """The files of a GGUF model, which may be split, that are there."""
    return [file for name in part_names(path.name) if (file := path.with_name(name)).is_file()]


def drop_files(store: Store, entry: Entry) -> int:
    """Delete what a pull has downloaded for this model, except what another stored model needs. Returns the number of
    bytes."""
    source = entry.source
    if source.kind != "hub" or not source.fetched:
        return 0
    used = {other.source.path for other in store.entries()[0] if other.source.kind == "hub"}
    kept = {file for one in used for file in _files_of(Path(one))}
    return sum(_drop(file) for file in _files_of(Path(source.path)) if file not in kept)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return parts_of(path)
    return [file for file in path.rglob("*") if not file.is_dir() and file.suffix != ".gguf"]  # those are other models


def _drop(file: Path) -> int:
    """Delete a name from the hub's cache, and the file behind it if it has no other name."""
    target = file.resolve()
    try:
        size = target.stat().st_size
        file.unlink()
        if target != file and target.parent.name == "blobs":
            snapshots = target.parent.parent / "snapshots"
            if any(other.is_symlink() and other.resolve() == target for other in snapshots.rglob("*")):
                return 0
            target.unlink()
    except OSError:
        return 0
    with contextlib.suppress(OSError):
        file.parent.rmdir()  # it was the last file
    return size


@contextlib.contextmanager
def _watched(hub: Hub, repo: str, files: Sequence[Wanted], tell: Tell) -> Iterator[None]:
    """Report regularly how much of each large file has arrived, until the download ends."""
    large = [file for file in files if file.name.endswith(LARGE)]
    ended = threading.Event()
    told: dict[str, int] = {}

    def look() -> None:
        for file in large:
            have = min(file.size, _have(hub, repo, file))
            if told.get(file.name) != have and (have or ended.is_set()):
                told[file.name] = have
                short = file.blob[:12] if file.digest else file.name
                tell(Progress(f"pulling {short}", file.digest, file.size, have))

    def watch() -> None:
        while not ended.wait(LOOK_S):
            look()

    thread = threading.Thread(target=watch, daemon=True, name="tokenmill-pull")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    look()


def _have(hub: Hub, repo: str, file: Wanted) -> int:
    """The bytes of a complete or partial file in the hub's cache."""
    from huggingface_hub import constants, file_download

    if not file.blob:
        return 0  # the cache's name for this file is not known
    root = Path(hub.folder or constants.HF_HUB_CACHE)
    blobs = root / file_download.repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    sizes = [0]
    for found in (blobs / file.blob, blobs / f"{file.blob}.part", *blobs.glob(f"{file.blob}*.incomplete")):
        with contextlib.suppress(OSError):
            sizes.append(os.stat(found).st_size)
    return max(sizes)


def describe_source(entry: Entry) -> str:
    """Where a model comes from, for people to read."""
    source = entry.source
    if source.kind == "hub":
        return source.repo + (f"@{source.revision[:12]}" if source.revision else "")
    return source.path or f"{len(source.files)} files"
