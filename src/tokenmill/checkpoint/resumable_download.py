"""Resumable downloads of large files from a hub. Owns: the parts of incomplete files, and putting complete ones where
the hub's library looks for them.

The library resumes only within one process; when that ends, it drops its part of a file. Files that it downloads in
chunks of its own (Xet) are left to it. Must not know: formats, names of models.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

LARGE = (".safetensors", ".gguf", ".bin")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What the cache may call a file. The hub chooses it, and whoever pretends to be the hub as well."""
_PIECE = 1 << 22


class WrongFileError(OSError):
    """What the hub sends is not what it says, or says nothing that could be used. The next try begins anew."""


def fetch_large(repo: str, revision: str | None, allow: Sequence[str], ignore: Sequence[str], options: Any) -> None:
    """Download the matching weight files into the library's cache. Errors are left to the library, which words them;
    but it takes any name for a file in its cache, so the names of all files are looked at here."""
    import huggingface_hub as hub
    from huggingface_hub import constants, file_download

    helpers: Any = hub.utils
    if constants.HF_HUB_OFFLINE:
        return
    token = options.get("token")
    try:
        found = hub.HfApi(token=token).model_info(repo, revision=revision)
    except Exception:  # there is no such model, or no network: the library says so, or finds the model in its cache
        return
    names = [str(each.rfilename) for each in found.siblings or ()]
    root = Path(options.get("cache_dir") or constants.HF_HUB_CACHE)
    root /= file_download.repo_folder_name(repo_id=repo, repo_type="model")
    for name in helpers.filter_repo_objects(names, allow_patterns=list(allow), ignore_patterns=list(ignore)):
        if (root / "snapshots" / str(found.sha) / name).exists():
            continue
        url = hub.hf_hub_url(repo, name, revision=found.sha)
        about = hub.get_hf_file_metadata(url, token=token)
        for given in (about.etag, about.commit_hash):
            if given and not _BLOB.fullmatch(given):
                raise WrongFileError(f"the hub calls a file {ascii(given)[:80]}, which is no name for it")
        if not about.etag or about.size is None or getattr(about, "xet_file_data", None) is not None:
            continue
        blob = root / "blobs" / about.etag
        if name.endswith(LARGE) and not blob.exists():
            headers = helpers.build_hf_headers(token=token) if about.location == url else {}
            _fetch(about.location, headers, blob, about.size)


def _fetch(url: str, headers: dict[str, str], blob: Path, size: int) -> None:
    """Download the rest of one file."""
    from huggingface_hub import file_download

    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{blob.name}.part")
    with part.open("ab") as file, _alone(file) as mine:
        if not mine:
            return  # another process downloads this file, so the library makes a copy of its own
        have = file.tell()
        if have > size:
            file.truncate(0)
            have = 0
        file_download.http_get(url, file, resume_size=have, headers=headers, expected_size=size)
        file.flush()
        if _SHA256.fullmatch(blob.name) and _digest(part) != blob.name:
            part.unlink()
            raise WrongFileError(f"the file {blob.name[:12]} arrived changed, and was thrown away")
        os.replace(part, blob)


@contextlib.contextmanager
def _alone(file: BinaryIO) -> Iterator[bool]:
    """Is this the only process that writes the file?"""
    try:
        import fcntl
    except ImportError:  # this system has no such locks
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
        return
    yield True  # closing the file releases the lock


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()
