"""What a model's files say of its vectors. Owns: the modules of sentence-transformers, and the keys of GGUF files.

Whatever is said there beyond what is built refuses vectors, and nothing else: the model still writes text. Must not
know: engines, requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tokenmill.core.errors import ModelError
from tokenmill.core.files import present, read_object, read_regular
from tokenmill.core.pooled import Vectors

MAX_BYTES = 1 << 20
_MODES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "mean_sqrt_len_tokens": "mean"}
"""Names of pooling modes. The last two differ in length alone, and vectors have length one here."""
_HARMLESS = ("Transformer", "Pooling", "Normalize", "Dropout")
_GGUF = {1: "mean", 3: "last"}
_GGUF_UNBUILT = {0: "none", 2: "cls", 4: "rank"}


def folder_vectors(folder: Path) -> Vectors:
    """What the files of a model folder say."""
    try:
        return _of_folder(folder)
    except ModelError as error:
        return Vectors(layers=str(error))


def _of_folder(folder: Path) -> Vectors:
    if present(path := folder / "sentence_bert_config.json") and read_object(path, MAX_BYTES).get("do_lower_case"):
        return Vectors(layers=f"{path.name} has texts in lower case (do_lower_case)")
    pooling = folder / "1_Pooling"
    if present(path := folder / "modules.json"):
        modules = _modules(path)
        if others := [f"{kind} ({where})" for kind, where in modules if kind not in _HARMLESS]:
            return Vectors(layers=f"{path.name} lists {others[0]}")
        found = [where for kind, where in modules if kind == "Pooling"]
        if not found:
            return Vectors()
        pooling = folder / found[0]
    return _of_pooling(pooling / "config.json") if present(pooling / "config.json") else Vectors()


def _modules(path: Path) -> list[tuple[str, str]]:
    """The kinds and folders of the modules, in order."""
    try:
        listed = json.loads(read_regular(path, MAX_BYTES))
        found = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in listed]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{path}: must be a list of objects with `type` and `path`") from error
    for _, where in found:
        if PurePosixPath(where).is_absolute() or ".." in PurePosixPath(where).parts:
            raise ModelError(f"{path}: the path {where[:80]!r} leads out of the folder")
    return found


def _of_pooling(path: Path) -> Vectors:
    said = read_object(path, MAX_BYTES)
    name = "pooling_mode"
    modes = [
        key.removeprefix(f"{name}_") for key, value in said.items() if key.startswith(f"{name}_") and value is True
    ]
    if isinstance(said.get(name), str):
        modes = [str(said[name])]
    if len(modes) == 1 and modes[0] in _MODES:
        return Vectors(pooling=_MODES[modes[0]])
    return Vectors(unbuilt=f"{path.parent.name}/{path.name} says {' and '.join(modes)[:80] or 'no mode'}")


def gguf_vectors(metadata: Mapping[str, Any]) -> Vectors:
    """What a GGUF file's metadata say."""
    architecture = metadata.get("general.architecture")
    if any(f"{architecture}.dense_{number}_feat_in" in metadata for number in (2, 3)):
        return Vectors(layers=f"{architecture}.dense_2_feat_in names a layer behind the pooling")
    kind = metadata.get(key := f"{architecture}.pooling_type")
    if kind is None or kind == -1:
        return Vectors()
    if isinstance(kind, int) and kind in _GGUF:
        return Vectors(pooling=_GGUF[kind])
    name = _GGUF_UNBUILT.get(kind) if isinstance(kind, int) else None
    return Vectors(unbuilt=f"{key} is {str(kind)[:20]}" + (f" ({name})" if name else ""))
