"""Where a model comes from. Owns: one interface to folders and GGUF files (config, defaults, weights, tokenizer).

Must not know: engines, devices, what a config means.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.checkpoint.folder import open_checkpoint, read_config, read_generation_config
from tokenmill.checkpoint.gguf_model import GgufModel
from tokenmill.checkpoint.hub import Hub, resolve_model
from tokenmill.checkpoint.no_model import check_folder, no_model
from tokenmill.checkpoint.pooling_files import folder_vectors, gguf_vectors
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import UserError
from tokenmill.core.pooled import Vectors
from tokenmill.demo import check_part, demo_model
from tokenmill.text.gguf import tokenizer_from_gguf
from tokenmill.text.tokenizer import Tokenizer, load_tokenizer

_LATER_PART = re.compile(r".+-(?!00001)\d{5}-of-\d{5}\.gguf")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


class ModelSource(Protocol):
    """What an engine needs from a model on disk. Everything is read when it is first asked for."""

    path: Path

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        ...

    def generation(self) -> dict[str, Any]:
        """The contents of generation_config.json; {} if there is none."""
        ...

    def checkpoint(self, load_format: str, *, seed: int, device: str) -> Checkpoint:
        """The weights; the caller closes it."""
        ...

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with its chat template."""
        ...

    def vectors(self) -> Vectors:
        """How prompts become vectors."""
        ...


class FolderSource:
    """A model folder as hubs have them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> dict[str, Any]:
        """config.json."""
        check_folder(self.path)
        return read_config(self.path)

    def generation(self) -> dict[str, Any]:
        """generation_config.json."""
        return read_generation_config(self.path)

    def checkpoint(self, load_format: str, *, seed: int, device: str) -> Checkpoint:
        """The folder's weight files."""
        return open_checkpoint(self.path, load_format, seed=seed, device=device)

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer files."""
        return load_tokenizer(self.path)

    def vectors(self) -> Vectors:
        """What the modules of sentence-transformers say."""
        return folder_vectors(self.path)


class GgufSource:
    """A GGUF file, which contains everything. The header is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _model(self) -> GgufModel:
        return GgufModel(self.path)

    def config(self) -> dict[str, Any]:
        """The metadata in the form of config.json."""
        return self._model.config

    def generation(self) -> dict[str, Any]:
        """The sampling defaults that the file recommends."""
        found = {ours: self._model.metadata.get(f"general.sampling.{key}") for key, ours in _SAMPLING.items()}
        kept = {name: value for name, value in found.items() if isinstance(value, int | float)}
        return {**kept, "do_sample": True} if kept else {}

    def checkpoint(self, load_format: str, *, seed: int, device: str) -> Checkpoint:
        """The file's tensors."""
        if load_format == "dummy":
            return DummyCheckpoint(seed, device)
        if load_format != "auto":
            raise UserError(
                f"--load-format {load_format} does not fit {self.path}, which is a GGUF file; leave it out."
            )
        return self._model.open_checkpoint()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the metadata describes."""
        return tokenizer_from_gguf(self._model.metadata, str(self.path))

    def vectors(self) -> Vectors:
        """What the metadata say."""
        return gguf_vectors(self._model.metadata)


def find_source(name: str, revision: str | None = None, hub: Hub | None = None) -> ModelSource:
    """Find the model of this name: a folder, a .gguf file (or a folder with one model in such files), a hub name,
    `demo`, or a part of it."""
    check_part(name)
    path = demo_model(name) or resolve_model(name, revision, hub)
    if path.is_file():
        if path.suffix != ".gguf":
            raise no_model(path)
        return GgufSource(path)
    if path.is_dir() and not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        files = [file for file in sorted(path.glob("*.gguf")) if not _LATER_PART.fullmatch(file.name)]
        if len(files) > 1:
            shown = ", ".join(file.name for file in files[:8])
            raise UserError(f"{path}: it holds several GGUF models ({shown}); name one of them.")
        if files:
            return GgufSource(files[0])
    return FolderSource(path)
