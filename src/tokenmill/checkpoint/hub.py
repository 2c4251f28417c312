"""From a model's name to its folder or file. Owns: telling folders from hub names, downloading only what is needed,
choosing one of several GGUF files, and explaining why a download failed.

The hub's own library downloads, and reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE. `resumable_download.py` keeps the
downloaded parts of large files. Must not know: formats, models.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from tokenmill.checkpoint.resumable_download import WrongFileError, fetch_large
from tokenmill.checkpoint.stored import find_stored
from tokenmill.checkpoint.stored_names import without_hub
from tokenmill.core.errors import UserError
from tokenmill.core.files import in_home

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(?:/[A-Za-z0-9][\w.\-]{0,95})?")
_TAG = re.compile(r"[A-Za-z0-9][\w.\-]{0,63}")
_FILES = ["*.json", "*.jinja", "*.safetensors", "*.tiktoken", "tokenizer.model", "merges.txt"]
_TORCH_FILES = ["pytorch_model*.bin"]
_NOT = ["original/*", "consolidated*", "onnx/*", "openvino/*", "checkpoint-*/*", "*mmproj*"]
_PART = re.compile(r"-(\d{5})-of-\d{5}(?=\.gguf$)")
_ANY_PART = "-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]"
"""All of a file's parts, in the hub's patterns, and no other file's."""
_USUAL = "Q4_K_M"
"""The file of a GGUF repository that is taken if none is named."""


@dataclass(frozen=True, slots=True)
class Hub:
    """How files are downloaded: into which folder (None: the hub's cache), and with which token."""

    folder: str | None = None
    token: str | None = None

    def options(self) -> dict[str, Any]:
        """Keywords of the hub's library."""
        return {
            **({} if self.folder is None else {"cache_dir": self.folder}),
            **({} if self.token is None else {"token": self.token}),
        }


@dataclass(frozen=True, slots=True)
class Wanted:
    """One file of a repository."""

    name: str
    size: int
    blob: str
    """How the hub's cache calls it: the digest of a large file."""

    @property
    def digest(self) -> str:
        """As Ollama writes it; "" for a small file."""
        return f"sha256:{self.blob}" if len(self.blob) == 64 else ""


def resolve_model(name: str, revision: str | None = None, hub: Hub | None = None) -> Path:
    """The folder or file of a model: an existing path as it is, a stored model's, otherwise a hub name, downloaded or
    found cached. `owner/model:Q4_K_M` names one of the GGUF files of a repository."""
    path = in_home(name)
    if name and os.path.exists(path):  # (Path's own raises for a name that is too long for a file)
        return path
    if revision is None and (stored := find_stored(name)) is not None:
        name, revision = stored.options["model"], stored.options.get("revision")
        if Path(name).exists():
            return Path(name)
    return download_model(without_hub(name), revision, hub)


def check_place(name: str) -> None:
    """Refuse a path that is not there, which no hub has either."""
    away = not os.path.exists(in_home(name))
    if away and (name.startswith((".", "~", "/")) or name.endswith(".gguf") or name.count("/") > 1):
        resolve_model(name)  # says what is wrong with it, if something is


def download_model(name: str, revision: str | None = None, hub: Hub | None = None) -> Path:
    """The same for a hub name alone."""
    repo, colon, tag = name.partition(":")
    right = _NAME.fullmatch(repo) and ".." not in name and not repo.endswith(".gguf")
    if not right or (colon and ("/" not in repo or not _TAG.fullmatch(tag))):
        raise UserError(
            f"{name[:300]!r} is neither an existing folder or file nor a stored model nor a hub name (owner/model, or "
            "owner/model:Q4_K_M); check the spelling"
        )
    hub = hub or Hub()
    if colon:
        return _tagged(repo, tag, revision, hub)
    folder = _download(repo, revision, _FILES, hub)
    if any(folder.glob("*.safetensors")):
        return folder
    folder = _download(repo, revision, _TORCH_FILES, hub)
    return folder if any(folder.glob(_TORCH_FILES[0])) else _untagged(repo, revision, hub, folder)


def _tagged(repo: str, tag: str, revision: str | None, hub: Hub) -> Path:
    """The GGUF file (the first of its parts) whose name ends with this kind of quantisation."""
    folder = _download(repo, revision, gguf_patterns(tag), hub)
    found = models_of([file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")])
    if tag.lower() not in found:
        names = _try(repo, revision, lambda: _names(repo, revision, hub))
        there = models_of(names)
        shown = f"it has {', '.join(there[kind][0] for kind in sorted(there))}" if there else "it has no GGUF files"
        raise UserError(f"{repo} has no GGUF file for {tag!r}: {shown}")
    return folder / found[tag.lower()][1]


def _untagged(repo: str, revision: str | None, hub: Hub, folder: Path) -> Path:
    """The one GGUF file, or the usual one, of a repository without other weights; else what was found."""
    there = models_of(_try(repo, revision, lambda: _names(repo, revision, hub)))
    if not there:
        return folder
    kind = next(iter(there)) if len(there) == 1 else _USUAL.lower()
    if kind not in there:
        shown = ", ".join(f"{repo}:{there[each][0]}" for each in sorted(there))
        raise UserError(f"{repo} holds several GGUF models; name one of them: {shown}")
    file = there[kind][1]
    return _download(repo, revision, [_all_parts(file)], hub) / file


def chosen_files(name: str, revision: str | None, hub: Hub) -> tuple[list[Wanted], str]:
    """The files that `download_model` would fetch, and the commit; nothing without a network."""
    import huggingface_hub
    from huggingface_hub import constants

    repo, _, tag = name.partition(":")
    if constants.HF_HUB_OFFLINE:
        return [], ""
    api = huggingface_hub.HfApi(token=hub.token)
    try:
        return _chosen_of(api.model_info(repo, revision=revision, files_metadata=True), tag)
    except Exception:  # the download says what is wrong, or finds the model in the cache
        return [], ""


def _chosen_of(about: Any, tag: str) -> tuple[list[Wanted], str]:
    import huggingface_hub

    sizes = {each.rfilename: each for each in about.siblings or ()}
    kinds = models_of(list(sizes))
    if tag or not any(fnmatch(file, "*.safetensors") or fnmatch(file, _TORCH_FILES[0]) for file in sizes):
        kind = tag.lower() or (next(iter(kinds)) if len(kinds) == 1 else _USUAL.lower())
        patterns = [_all_parts(kinds[kind][1])] if kind in kinds else []
    else:
        plain = any(fnmatch(file, "*.safetensors") for file in sizes)
        patterns = _FILES if plain else [*_FILES, *_TORCH_FILES]
    helpers: Any = huggingface_hub.utils
    names = helpers.filter_repo_objects(list(sizes), allow_patterns=patterns, ignore_patterns=_NOT) if patterns else ()
    return [_wanted(sizes[file]) for file in names], str(about.sha or "")


def _wanted(sibling: Any) -> Wanted:
    large = sibling.lfs
    digest = (large.get("sha256") if isinstance(large, dict) else getattr(large, "sha256", None)) if large else None
    return Wanted(sibling.rfilename, sibling.size or 0, digest or sibling.blob_id or "")


def gguf_patterns(tag: str) -> list[str]:
    """Which files hold this kind, in any spelling of it."""
    spelled = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in tag)
    return [f"{before}{spelled}{after}" for before in ("*[-._/]", "") for after in (".gguf", f"{_ANY_PART}.gguf")]


def _all_parts(file: str) -> str:
    return _PART.sub(_ANY_PART, glob.escape(file))


def models_of(names: list[str]) -> dict[str, tuple[str, str]]:
    """kind in small letters -> (kind as it is written, first file) of the GGUF models among these files."""
    found: dict[str, tuple[str, str]] = {}
    for name in sorted(names):
        if not name.endswith(".gguf") or "mmproj" in name.lower():
            continue
        stem = _PART.sub("", name).removesuffix(".gguf").rsplit("/", 1)[-1]
        kind = _kind(stem)
        found.setdefault(kind.lower(), (kind, name))  # parts come in order
    return found


def _kind(stem: str) -> str:
    """`model-7b.Q4_K_M` -> Q4_K_M; a name without a known kind as it is."""
    kinds = r"I?Q\d\w*|TQ\d_\d|B?F(?:16|32|P16|P32)|(?:MX|NV)FP4\w*"
    known = re.search(rf"(?:^|[-.])((?:UD-)?(?:{kinds}))$", stem, re.IGNORECASE)
    return known[1] if known else stem


def _names(repo: str, revision: str | None, hub: Hub) -> list[str]:
    """Every file of a repository; without a network, those that were downloaded."""
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, **hub.options()))
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    return list(huggingface_hub.HfApi(token=hub.token).list_repo_files(repo, revision=revision))


def _download(name: str, revision: str | None, patterns: list[str], hub: Hub) -> Path:
    from huggingface_hub import snapshot_download

    options = {"revision": revision, "allow_patterns": patterns, "ignore_patterns": _NOT, **hub.options()}

    def download() -> Path:
        fetch_large(name, revision, patterns, _NOT, hub.options())
        return Path(snapshot_download(name, **options))

    return _try(name, revision, download)


def _try(name: str, revision: str | None, ask: Callable[[], T]) -> T:
    """Ask the hub; what goes wrong becomes a sentence that says what to do."""
    from huggingface_hub import errors

    version = f" at revision {revision!r}" if revision else ""
    try:
        return ask()
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name} is gated: ask for access on its hub page, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r}; check the branch, tag or commit") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"there is no model {name!r} on the hub, or it is private; check the name, or log in (HF_TOKEN)"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UserError(
            f"{name!r}{version} is neither a folder here nor in the download cache, and the hub cannot be reached; "
            "check the name, give a folder, or download the model once with a network"
        ) from error
    except (WrongFileError, *_NONSENSE) as error:
        raise UserError(
            f"downloading {name}{version} failed: what the hub answers is wrong ({_told(error)})"
        ) from error
    except Exception as error:
        known = isinstance(error, (errors.HfHubHTTPError, OSError))
        if not known and not type(error).__module__.startswith("httpx"):  # what the hub's library speaks HTTP with
            raise
        raise UserError(
            f"downloading {name}{version} failed: {_told(error)}; the next try goes on where it broke off"
        ) from error


_NONSENSE = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""What the hub's library raises about answers that are none: a page of a proxy in place of JSON, impossible names."""


def _told(error: Exception) -> str:
    """The first line of an error, without characters that steer a terminal. Clients of a server read it, so an error of
    the system names no file."""
    said = getattr(error, "strerror", None) or str(error)
    line = next(iter(said.strip().splitlines()), type(error).__name__)
    return "".join(char if char.isprintable() else "?" for char in line[:300]).rstrip(".")
