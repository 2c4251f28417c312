"""Safetensors files. Owns: reading and strictly checking headers, and zero-copy tensors over memory-mapped files.

A file is 8 bytes of header length (little-endian), a JSON header, then data. Tensors must cover the data exactly,
without overlap, gap or rest. Everything in the header is checked before one byte of data is read.
Must not know: models, devices, what a tensor is for.
"""

from __future__ import annotations

import json
import logging
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tokenmill.checkpoint.shards import check_part, check_shape, no_tensor, place, read_index
from tokenmill.core.errors import ModelError
from tokenmill.core.files import LOOK, open_regular, present, told_by

log = logging.getLogger("tokenmill.checkpoint")

MAX_HEADER_BYTES = 16 << 20
MAX_RANK = 16
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


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: bytes begin..end of the file's data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_header(header: bytes, data_bytes: int) -> dict[str, Entry]:
    """Tensor name -> entry. Raises a ModelError (without a file name) unless the header describes the data exactly."""
    try:
        table = json.loads(header.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the header is not valid JSON ({str(error)[:200]})") from error
    if not isinstance(table, dict):
        raise ModelError("the header is not a JSON object")
    notes = table.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise ModelError("`__metadata__` must map names to strings")
    entries = {name: _entry(name, value) for name, value in table.items()}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise ModelError(f"tensor {name[:200]!r} begins at byte {entry.begin}, but the one before it ends at {at}")
        at = entry.end
    if at != data_bytes:
        raise ModelError(f"the tensors take {at} bytes, but the file holds {data_bytes}; it is truncated or damaged")
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ModelError("the header names something twice")
    return table


def _entry(name: str, value: object) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"tensor {name[:200]!r} must have exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise ModelError(f"tensor {name[:200]!r} has an unknown dtype: {str(value['dtype'])[:40]}")
    shape, offsets = _counts(value["shape"]), _counts(value["data_offsets"])
    if shape is None or len(shape) > MAX_RANK:
        raise ModelError(f"tensor {name[:200]!r} has a bad shape: {str(value['shape'])[:80]}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"tensor {name[:200]!r} has bad data_offsets: {str(value['data_offsets'])[:80]}")
    # Python's integers do not overflow: a shape whose product wraps in 64 bits is simply too large here.
    size = prod(shape) * dtype.itemsize
    if size != offsets[1] - offsets[0]:
        raise ModelError(f"tensor {name[:200]!r} needs {size} bytes by its shape, but has {offsets[1] - offsets[0]}")
    if any(count >= 1 << 63 for count in (*shape, *offsets)):
        raise ModelError(f"tensor {name[:200]!r} has a number that is too large")
    return Entry(dtype, shape, offsets[0], offsets[1])


def _counts(value: object) -> tuple[int, ...] | None:
    """A list of non-negative integers, or None. JSON's `true` does not count as a number."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)


class SafetensorsFile:
    """One memory-mapped file. Tensors are views of the map and keep it alive.

    copied: the file is read instead of mapped. Others may change it, and a map of a file that gets shorter ends the
    process."""

    def __init__(self, path: Path, *, copied: bool = False) -> None:
        self.path = path
        self._map: mmap.mmap | bytearray
        try:
            with open_regular(path) as file:
                size = file.seek(0, 2)
                if size < 10:
                    file.seek(0)
                    if other := told_by(file.read()):
                        raise ModelError(f"is {other}")
                    raise ModelError("it is too short to be a safetensors file")
                # A private map is writable but never changes the file, so torch accepts it without a warning.
                self._map = _whole(file, size) if copied else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._data, self.entries = _layout(self._map, size)
        except ModelError as error:
            reason = str(error)
            raise ModelError(reason if reason.startswith(str(path)) else f"{path}: {reason}") from error
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file. It is copied only if it lies at an odd address."""
        entry = self.entries[name]
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = torch.frombuffer(
            self._map, dtype=torch.uint8, count=entry.end - entry.begin, offset=self._data + entry.begin
        )
        if raw.data_ptr() % entry.dtype.itemsize:
            raw = raw.clone()  # old files are not aligned, and kernels need alignment
        return raw.view(entry.dtype).view(entry.shape)


def _whole(file: BinaryIO, size: int) -> bytearray:
    file.seek(0)
    data = bytearray(size)
    if file.readinto(data) != size:  # type: ignore[attr-defined]
        raise ModelError("it has changed while it was read")
    return data


def _layout(data: mmap.mmap | bytearray, size: int) -> tuple[int, dict[str, Entry]]:
    """(offset of the data, entries) of a whole file."""
    if data[8:9] != b"{" and (other := told_by(bytes(data[:LOOK]))):
        raise ModelError(f"is {other}")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelError(f"its header claims {length} bytes; the limit is {MAX_HEADER_BYTES}")
    if length > size - 8:
        raise ModelError(f"its header claims {length} bytes, but only {size - 8} follow; it is truncated")
    return 8 + length, parse_header(bytes(data[8 : 8 + length]), size - 8 - length)


class SafetensorsCheckpoint:
    """A folder's safetensors files as one Checkpoint."""

    def __init__(
        self, where: Path, files: Sequence[Path], index: Mapping[str, Path] | None = None, *, copied: bool = False
    ) -> None:
        self._where = where
        opened = {path: SafetensorsFile(path, copied=copied) for path in files}
        placed = place(where, {path: file.entries for path, file in opened.items()}, index)
        self._files = {name: opened[path] for name, path in placed.items()}

    def names(self) -> Iterable[str]:
        """All tensor names."""
        return self._files.keys()

    def has(self, name: str) -> bool:
        """Is there such a tensor?"""
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The stored shape."""
        return self._file(name).entries[name].shape

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor as it is stored. dtype is for checkpoints that invent tensors, and has no effect here."""
        file = self._file(name)
        check_shape(self._where, name, file.entries[name].shape, shape)
        return file.tensor(name)

    def part(
        self,
        name: str,
        dim: int,
        start: int,
        stop: int,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """start:stop of one dimension. Only the pages of that part are read, when it is used."""
        whole = self.tensor(name, shape, dtype)
        check_part(self._where, name, whole.shape, dim, (start, stop))
        return whole.narrow(dim, start, stop - start)

    def close(self) -> None:
        """Close the files. A map goes when the last tensor over it is freed."""
        self._files.clear()

    def _file(self, name: str) -> SafetensorsFile:
        file = self._files.get(name)
        if file is None:
            raise no_tensor(self._where, name)
        return file


def open_safetensors(folder: Path) -> SafetensorsCheckpoint | None:
    """The folder's safetensors weights. None: it has none."""
    if present(index := folder / "model.safetensors.index.json"):
        table = read_index(index)
        single = folder / "model.safetensors"
        if present(single) and single not in table.values():
            log.warning(
                "%s lies beside an index that does not name it: the index counts, the file is not read.", single
            )
        return SafetensorsCheckpoint(folder, sorted(set(table.values())), table)
    if present(single := folder / "model.safetensors"):
        return SafetensorsCheckpoint(folder, [single])
    # Some repositories keep a second copy of all weights under this name.
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("consolidated")]
    files = files or sorted(folder.glob("*.safetensors"))
    return SafetensorsCheckpoint(folder, files) if files else None
