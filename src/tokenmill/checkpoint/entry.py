"""The manifest of a stored model. Owns: its records, and the digest over them.

Must not know: where manifests lie, how models are loaded.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec


class Source(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where the weights lie: in a folder or file of this machine, in the hub's cache, or in files that clients sent."""

    kind: Literal["path", "hub", "files"]
    path: str = ""
    """The folder or file. For a hub model: where it was when it was pulled."""
    repo: str = ""
    """owner/model, or owner/model:Q4_K_M."""
    revision: str = ""
    files: dict[str, str] = {}
    """Name -> sha256:..., of files that clients sent."""
    fetched: bool = False
    """The pull downloaded the files, so they are deleted with the model."""


class Words(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The texts around a conversation: system message, template, first messages."""

    system: str = ""
    template: str = ""
    """In Jinja."""
    written: str = ""
    """The template as it was given, which may be a Go template."""
    messages: list[dict[str, str]] = []
    license: list[str] = []


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One stored model."""

    name: str
    source: Source
    parameters: dict[str, Any] = {}
    """Parameters by Ollama's names."""
    words: Words = Words()
    adapter: Source | None = None
    parent: str = ""
    size: int = 0
    """Bytes of weights."""
    format: str = ""
    changed: float = 0.0
    version: int = 1

    @property
    def digest(self) -> str:
        """64 hexadecimal digits over the model's contents. Name and time do not count."""
        plain = msgspec.structs.replace(self, name="", changed=0.0, parent="")
        return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()

    @property
    def blobs(self) -> set[str]:
        """Digests of the clients' files that the model needs."""
        return {*self.source.files.values(), *(self.adapter.files.values() if self.adapter is not None else ())}
