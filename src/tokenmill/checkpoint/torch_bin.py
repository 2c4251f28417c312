"""`pytorch_model*.bin` files. Owns: loading them without running any code they bring.
Must not know: models, devices, what a tensor is for."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.shards import check_shape, no_tensor, place, torch_files
from tokenmill.checkpoint.torch_pickle import check_torch_file
from tokenmill.checkpoint.whole_tensors import WholeTensors
from tokenmill.core.errors import ModelError
from tokenmill.core.files import LOOK, open_regular, told_by


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with open_regular(path) as file:
            first = file.read(LOOK)
        zipped = first[:2] == b"PK"
        if not zipped and first[:1] != b"\x80" and (other := told_by(first)):
            raise ModelError(f"{path}: is {other}")
        with open_regular(path) as file:
            filled = check_torch_file(file, zipped=zipped)
            held = file.seek(0, 2)
        # Files from before torch 1.6 are not zip archives and cannot be mapped.
        table = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except ModelError as error:
        reason = str(error)
        raise ModelError(reason if reason.startswith(str(path)) else f"{path}: {reason}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path}: is damaged, or would run code while it is loaded, which is never done; "
            "convert the weights to safetensors where you trust them"
        ) from error
    except Exception as error:
        # torch reports damaged archives by a dozen different exceptions.
        raise ModelError(f"{path}: not a usable torch file ({str(error)[:200]}); download it again") from error
    if not isinstance(table, Mapping):
        raise ModelError(f"{path}: must hold a table of tensors, not {type(table).__name__}")
    for name, value in table.items():
        dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized
        if not isinstance(name, str) or not dense:
            shown = name[:80] if isinstance(name, str) else f"of type {type(name).__name__}"
            raise ModelError(f"{path}: entry {shown!r} is not a named dense tensor")
        if value.is_meta:
            raise ModelError(f"{path}: entry {name[:80]!r} has a shape and no numbers")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            # One stored number may be expanded to any size, so that a few bytes would fill the memory.
            raise ModelError(f"{path}: entry {name[:80]!r} has {value.numel()} numbers, and the file holds fewer")
    stored = {each.data_ptr(): each.nbytes() for each in (value.untyped_storage() for value in table.values())}
    if sum(stored.values()) > held:
        raise ModelError(f"{path}: claims {sum(stored.values())} bytes of numbers, and the file has {held}")
    if filled is not None and len(stored) > filled:
        raise ModelError(f"{path}: holds the numbers of {filled} storages, and its tensors need {len(stored)}")
    return {name: value.detach() for name, value in table.items()}


class TorchBinCheckpoint(WholeTensors):
    """A folder's .bin files as one Checkpoint."""

    where: Path

    def __init__(self, where: Path, files: Sequence[Path], index: Mapping[str, Path] | None = None) -> None:
        self.where = where
        loaded = {path: _load(path) for path in files}
        self._tensors = {name: loaded[path][name] for name, path in place(where, loaded, index).items()}

    def names(self) -> Iterable[str]:
        """All tensor names."""
        return self._tensors.keys()

    def has(self, name: str) -> bool:
        """Is there such a tensor?"""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The stored shape."""
        return tuple(self._get(name).shape)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor as it is stored. dtype is for checkpoints that invent tensors, and has no effect here."""
        value = self._get(name)
        check_shape(self.where, name, value.shape, shape)
        return value

    def close(self) -> None:
        """Free the tensors."""
        self._tensors.clear()

    def _get(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise no_tensor(self.where, name)
        return self._tensors[name]


def open_torch_bin(folder: Path) -> TorchBinCheckpoint | None:
    """The folder's .bin weights. None: it has none."""
    files, table = torch_files(folder)
    return TorchBinCheckpoint(folder, files, table) if files else None
