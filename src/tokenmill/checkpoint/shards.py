"""Which file of a model folder holds which tensor. Owns: the index file, the rule that shard names stay inside the
folder, and the wording of errors about single tensors. Must not know: file formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenmill.core.errors import ModelError
from tokenmill.core.files import present, read_object

MAX_INDEX_BYTES = 32 << 20


def read_index(path: Path) -> dict[str, Path]:
    """tensor name -> shard file, from a `*.index.json`."""
    table = read_object(path, MAX_INDEX_BYTES, once=True).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelError(f"{path}: needs a `weight_map` object that says which file holds which tensor")
    files = {name: _shard(path, name) for name in {str(value) for value in table.values()}}
    return {tensor: files[str(name)] for tensor, name in table.items()}


def weight_files(folder: Path, whole: str, pattern: str) -> tuple[list[Path], Mapping[str, Path] | None]:
    """The files that hold a folder's weights, none if there are none, and its index, if it has one: those that the
    index of `whole` names, `whole` alone, or all that match."""
    if present(index := folder / f"{whole}.index.json"):
        table = read_index(index)
        return sorted(set(table.values())), table
    if present(single := folder / whole):
        return [single], None
    return sorted(folder.glob(pattern)), None


def torch_files(folder: Path) -> tuple[list[Path], Mapping[str, Path] | None]:
    """weight_files of what torch.save has written."""
    return weight_files(folder, "pytorch_model.bin", "pytorch_model*.bin")


def _shard(index: Path, name: str) -> Path:
    # Only the name must stay in the folder: in download caches, files are links to places outside of it.
    if not name or name != Path(name).name or name in (".", "..") or "\\" in name or "\0" in name:
        raise ModelError(f"{index}: the shard name {name[:200]!r} is not a plain file name inside the folder")
    path = index.parent / name
    if not present(path):
        raise ModelError(f"{index}: names the shard {name[:200]!r}, which is not in the folder; download it again")
    return path


def place(where: Path, held: Mapping[Path, Iterable[str]], index: Mapping[str, Path] | None) -> dict[str, Path]:
    """tensor name -> the file that it is read from, of what each file holds. A tensor that the index forgets counts
    too: a model may take it or leave it, and so must not miss it in silence."""
    placed: dict[str, Path] = {}
    for path, names in held.items():
        for name in names:
            if index is not None and index.get(name, path) != path:
                continue  # a shard may repeat tensors that the index places elsewhere
            if name in placed:
                raise ModelError(f"{where}: tensor {name!r} is in both {placed[name].name} and {path.name}")
            placed[name] = path
    for name, path in (index or {}).items():
        if name not in placed:
            raise ModelError(f"{where}: the index places tensor {name!r} in {path.name}, which does not hold it")
    return placed


def no_tensor(where: Path, name: str) -> ModelError:
    """The error for a tensor that the checkpoint lacks."""
    return ModelError(f"{where}: holds no tensor {name!r}; the weights do not belong to this config or are incomplete")


def check_shape(where: Path, name: str, got: Sequence[int], want: Sequence[int] | None) -> None:
    """Raise a ModelError if a stored shape is not the one that the model expects."""
    if want is not None and tuple(got) != tuple(want):
        raise ModelError(
            f"{where}: tensor {name!r} has shape {list(got)}, but the model's config asks for {list(want)}"
        )
