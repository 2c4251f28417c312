"""From a model's name to its folder. Owns: telling folders from hub names, downloading only what is needed, and
explaining why a download failed. Must not know: formats, models."""

from __future__ import annotations

import re
from pathlib import Path

from tokenmill.core.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(?:/[A-Za-z0-9][\w.\-]{0,95})?")
_FILES = ["*.json", "*.jinja", "*.safetensors", "*.tiktoken", "tokenizer.model", "merges.txt"]
_TORCH_FILES = ["pytorch_model*.bin"]
_NOT = ["original/*", "consolidated*", "onnx/*", "openvino/*", "checkpoint-*/*"]


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The folder of a model: an existing path as it is, otherwise a hub name that is downloaded (or found cached)."""
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if not _NAME.fullmatch(name) or ".." in name or name.endswith(".gguf"):
        raise UserError(
            f"{name!r} is neither an existing folder or file nor a hub name (owner/model); check the spelling"
        )
    folder = _download(name, revision, _FILES)
    if not any(folder.glob("*.safetensors")):
        folder = _download(name, revision, _TORCH_FILES)
    return folder


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    version = f" at revision {revision!r}" if revision else ""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_NOT))
    except errors.GatedRepoError as error:
        raise UserError(f"{name} is gated: ask for access on its hub page, then log in with `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r}; check the branch, tag or commit") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"there is no model {name!r} on the hub, or it is private; check the name, or log in"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UserError(
            f"{name!r} is not a folder here, and {name}{version} is not in the download cache while the hub cannot be "
            "reached; give a folder, or download it once with a network"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[:1]
        raise UserError(f"downloading {name}{version} failed: {' '.join(reason)[:300]}") from error
