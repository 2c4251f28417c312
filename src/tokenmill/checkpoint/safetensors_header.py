"""Headers of safetensors files. Owns: which files of a folder hold its weights, and strictly checking what headers say.

A file is 8 bytes of header length (little-endian), a JSON header, then data. Tensors must cover the data exactly,
without overlap, gap or rest. Must not know: torch, models, what a tensor is for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from tokenmill.checkpoint.shards import weight_files
from tokenmill.core.errors import ModelError
from tokenmill.core.files import LOOK, told_by

MAX_HEADER_BYTES = 16 << 20
MAX_RANK = 16
SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
"""Bytes of a number of each type."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes begin..end of the file's data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def safetensors_files(folder: Path) -> tuple[list[Path], Mapping[str, Path] | None]:
    """The files that hold a folder's weights, none if there are none, and its index, if it has one."""
    files, table = weight_files(folder, "model.safetensors", "*.safetensors")
    # Some repositories keep a second copy of all weights under this name.
    plain = [path for path in files if table is not None or not path.name.startswith("consolidated")]
    return plain or files, table


def read_header(file: BinaryIO) -> tuple[int, dict[str, TensorEntry]]:
    """(offset of the data, entries) of a file. A ModelError (without the file's name) says what is wrong with it."""
    size = file.seek(0, 2)
    file.seek(0)
    first = file.read(LOOK)
    if first[8:9] != b"{" and (other := told_by(first)):
        raise ModelError(f"is {other}")
    if size < 10:
        raise ModelError("it is too short to be a safetensors file")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelError(f"its header claims {length} bytes; the limit is {MAX_HEADER_BYTES}")
    if length > size - 8:
        raise ModelError(f"its header claims {length} bytes, but only {size - 8} follow; it is truncated")
    file.seek(8)
    return 8 + length, parse_header(file.read(length), size - 8 - length)


def parse_header(header: bytes, data_bytes: int) -> dict[str, TensorEntry]:
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


def _entry(name: str, value: object) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"tensor {name[:200]!r} must have exactly dtype, shape and data_offsets")
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise ModelError(f"tensor {name[:200]!r} has an unknown dtype: {str(value['dtype'])[:40]}")
    shape, offsets = _counts(value["shape"]), _counts(value["data_offsets"])
    if shape is None or len(shape) > MAX_RANK:
        raise ModelError(f"tensor {name[:200]!r} has a bad shape: {str(value['shape'])[:80]}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"tensor {name[:200]!r} has bad data_offsets: {str(value['data_offsets'])[:80]}")
    # Python's integers do not overflow: a shape whose product wraps in 64 bits is simply too large here.
    size = prod(shape) * SIZES[dtype]
    if size != offsets[1] - offsets[0]:
        raise ModelError(f"tensor {name[:200]!r} needs {size} bytes by its shape, but has {offsets[1] - offsets[0]}")
    # torch counts a tensor's bytes in 63 bits as if a 0 among its sizes were a 1, whatever type it is converted to.
    if prod(count or 1 for count in shape) >= 1 << 59 or offsets[1] >= 1 << 63:
        raise ModelError(f"tensor {name[:200]!r} has a number that is too large")
    return TensorEntry(dtype, shape, offsets[0], offsets[1])


def _counts(value: object) -> tuple[int, ...] | None:
    """A list of non-negative integers, or None. JSON's `true` does not count as a number."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)
