"""Safetensors files. Owns: zero-copy tensors over memory-mapped files.

Everything in the header is checked before one byte of data is read (safetensors_header.py).
Must not know: models, devices, what a tensor is for.
"""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tokenmill.checkpoint.safetensors_header import TensorEntry, read_header, safetensors_files
from tokenmill.checkpoint.shards import check_shape, no_tensor, place
from tokenmill.checkpoint.whole_tensors import WholeTensors
from tokenmill.core.errors import ModelError
from tokenmill.core.files import open_regular, present

log = logging.getLogger("tokenmill.checkpoint")

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

_PART = re.compile(r"(.+)\.(\w+):(qdata|scale|zero_point|scale_and_zero|act_pre_scale)", re.ASCII)


def _current(name: str) -> str:
    """torchao 0.14 wrote NAME.weight:qdata for NAME._weight_qdata of later versions, and NAME:_data for plain NAME."""
    part = _PART.fullmatch(name)
    return f"{part[1]}._{part[2]}_{part[3]}" if part else name.removesuffix(":_data")


class SafetensorsFile:
    """One memory-mapped file. Tensors are views of the map and keep it alive.

    copied: the file is read instead of mapped. Others may change it, and a map of a file that gets shorter ends the
    process. Each tensor has memory of its own then: to get or free all at once would keep other threads waiting."""

    def __init__(self, path: Path, *, copied: bool = False) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._read: dict[str, Tensor] = {}
        try:
            with open_regular(path) as file:
                self._data, self.entries = read_header(file)
                size = self._data + max((entry.end for entry in self.entries.values()), default=0)
                if file.seek(0, 2) != size:
                    raise ModelError("it has changed while it was read")
                # A private map is writable but never changes the file, so torch accepts it without a warning.
                if copied:
                    self._read = {name: _bytes_of(file, self._data, entry) for name, entry in self.entries.items()}
                else:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ModelError as error:
            reason = str(error)
            raise ModelError(reason if reason.startswith(str(path)) else f"{path}: {reason}") from error
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file. It is copied only if it lies at an odd address."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        if self._map is None:
            return self._read[name].view(dtype).view(entry.shape)
        raw = torch.frombuffer(
            self._map, dtype=torch.uint8, count=entry.end - entry.begin, offset=self._data + entry.begin
        )
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()  # old files are not aligned, and kernels need alignment
        return raw.view(dtype).view(entry.shape)


def _bytes_of(file: BinaryIO, start: int, entry: TensorEntry) -> Tensor:
    found = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    file.seek(start + entry.begin)
    if file.readinto(found.numpy()) != len(found):  # type: ignore[attr-defined]
        raise ModelError("it has changed while it was read")
    return found


class SafetensorsCheckpoint(WholeTensors):
    """A folder's safetensors files as one Checkpoint."""

    where: Path

    def __init__(
        self, where: Path, files: Sequence[Path], index: Mapping[str, Path] | None = None, *, copied: bool = False
    ) -> None:
        self.where = where
        opened = {path: SafetensorsFile(path, copied=copied) for path in files}
        placed = place(where, {path: file.entries for path, file in opened.items()}, index)
        self._files = {_current(name): (opened[path], name) for name, path in placed.items()}
        if len(self._files) != len(placed):
            raise ModelError(f"{where}: holds tensors under names of torchao 0.14 and under later ones.")

    def names(self) -> Iterable[str]:
        """All tensor names."""
        return self._files.keys()

    def has(self, name: str) -> bool:
        """Is there such a tensor?"""
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The stored shape."""
        file, stored = self._place(name)
        return file.entries[stored].shape

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor as it is stored. dtype is for checkpoints that invent tensors, and has no effect here."""
        file, stored = self._place(name)
        check_shape(self.where, name, file.entries[stored].shape, shape)
        return file.tensor(stored)

    def close(self) -> None:
        """Close the files. A map goes when the last tensor over it is freed."""
        self._files.clear()

    def _place(self, name: str) -> tuple[SafetensorsFile, str]:
        """The file, and what the tensor is called there."""
        place = self._files.get(name)
        if place is None:
            raise no_tensor(self.where, name)
        return place


def open_safetensors(folder: Path) -> SafetensorsCheckpoint | None:
    """The folder's safetensors weights. None: it has none."""
    files, table = safetensors_files(folder)
    single = folder / "model.safetensors"
    if table is not None and present(single) and single not in files:
        log.warning("%s lies beside an index that does not name it: the index counts, the file is not read.", single)
    return SafetensorsCheckpoint(folder, files, table) if files else None
