"""What people name instead of a model. Owns: saying what it is, and what to name.

Only names, headers and small files are read. Must not know: the store, torch, what a config means.
"""

from __future__ import annotations

from pathlib import Path

from tokenmill.checkpoint.gguf_file import GgufFile
from tokenmill.core.errors import ModelError
from tokenmill.core.files import present, read_object

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_MOST = 4 << 20
_OTHERS = {
    "adapter": "an adapter, not a model: load its model with --enable-lora --lora-modules NAME=FILE (in a Modelfile: "
    "ADAPTER)",
    "imatrix": "the importance of a model's columns, not a model (`quantize --imatrix` reads it)",
    "mmproj": "the part of a model that sees or hears, not a model: name the GGUF file with its language model",
}
"""What GGUF files may hold instead of a model, by their general.type."""
_SEES = "clip"
"""The architecture of parts that see or hear. Older files have no general.type."""


def check_gguf(file: GgufFile, path: Path) -> None:
    """Refuse a GGUF file that holds something else."""
    seen = file.metadata.get("general.architecture") == _SEES
    kind = "mmproj" if seen else file.metadata.get("general.type", "model")
    if isinstance(kind, str) and kind in _OTHERS:
        raise ModelError(f"{path}: it is {_OTHERS[kind]}.")


def check_folder(folder: Path) -> None:
    """Refuse a folder that is an adapter (some have a copy of their model's config.json), or in which the hub's cache
    keeps every version of a model."""
    versions = [each for each in (folder / "snapshots").glob("*") if each.is_dir()]
    if versions and not present(folder / _CONFIG):
        newest = max(versions, key=lambda each: each.stat().st_mtime)
        raise ModelError(
            f"{folder}: here the hub's cache keeps the versions of a model: name it as on the hub, or name {newest}."
        )
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.gguf")]
    others = any(not file.name.startswith("adapter_model.") for file in weights)
    if not present(folder / _ADAPTER) or (present(folder / _CONFIG) and (others or not weights)):
        return
    try:
        named = read_object(folder / _ADAPTER, _MOST).get("base_model_name_or_path")
    except ModelError:
        named = None
    base = named if isinstance(named, str) and named.isprintable() and 0 < len(named) < 200 else "its model"
    raise ModelError(
        f"{folder}: it is an adapter, not a model: load {base} with --enable-lora --lora-modules NAME=FOLDER, or make "
        "one model of both (tokenmill merge)."
    )


def no_model(path: Path) -> ModelError:
    """The error about a file that is no GGUF file."""
    if path.suffix in (".safetensors", ".bin", ".json", ".model", ".jinja"):
        if present(path.parent / _CONFIG):
            return ModelError(f"{path}: it is one file of a model: name its folder, {path.parent}.")
        if present(path.parent / _ADAPTER):
            return ModelError(
                f"{path}: it is one file of an adapter: name its model, and its folder in --lora-modules."
            )
    return ModelError(f"{path}: a model is a folder or a .gguf file; this is neither.")
