"""Writing GGUF files. Owns: the container (version 3, little-endian), and leaving no half-written file behind.

Values have the types that readers expect: whole numbers are uint32 (int32 in lists and below zero), others float32.
Must not know: what a key means, how numbers become blocks.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tokenmill.checkpoint.gguf_file import ARRAY, STRING, TYPES
from tokenmill.checkpoint.new_folder import new_file
from tokenmill.core.errors import UserError

ALIGNMENT = 32
UINT32, INT32, FLOAT32, BOOL, UINT64 = 4, 5, 6, 7, 10
IDS = {block.name: number for number, block in TYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write: its shape (slowest dimension first), the name of its type, and its bytes, piece by piece."""

    name: str
    shape: tuple[int, ...]
    type: str
    pieces: Callable[[], Iterable[bytes]]

    @property
    def size(self) -> int:
        """The number of bytes in all pieces together."""
        block = TYPES[IDS[self.type]]
        elements = 1
        for dim in self.shape:
            elements *= dim
        return elements // block.elements * block.size


def write_gguf(path: Path, metadata: Mapping[str, Any], entries: list[Entry]) -> None:
    """Write the whole file or nothing. A full disk is a UserError."""
    write_bytes(path, _contents(metadata, entries), sum(_padded(entry.size) for entry in entries))


def write_bytes(path: Path, pieces: Iterable[bytes], total: int = 0) -> None:
    """Write a file of about `total` bytes, completely or not at all. A full disk is a UserError."""
    with new_file(path, fresh=True) as partial:
        free = shutil.disk_usage(path.absolute().parent).free
        if free < total:
            raise UserError(f"{path} needs {total / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free there.")
        with open(partial, "wb") as file:
            for piece in pieces:
                file.write(piece)
            _flush(file)


def _flush(file: IO[bytes]) -> None:
    """Flush to the disk, which may only now say that it is full."""
    file.flush()
    os.fsync(file.fileno())


def _contents(metadata: Mapping[str, Any], entries: list[Entry]) -> Iterator[bytes]:
    header = b"".join(_header(metadata, entries))
    yield header + bytes(-len(header) % ALIGNMENT)
    for entry in entries:
        written = 0
        for piece in entry.pieces():
            yield piece
            written += len(piece)
        assert written == entry.size, f"{entry.name}: {written} bytes instead of {entry.size}"
        yield bytes(-written % ALIGNMENT)


def _header(metadata: Mapping[str, Any], entries: list[Entry]) -> Iterator[bytes]:
    yield b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata))
    for key, value in metadata.items():
        kind = _kind(value)
        yield _text(key) + struct.pack("<I", kind) + _value(kind, value)
    offset = 0
    for entry in entries:
        dims = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
        yield _text(entry.name) + dims + struct.pack("<IQ", IDS[entry.type], offset)
        offset += _padded(entry.size)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return INT32 if value < 0 else UINT32 if value < 1 << 32 else UINT64
    if isinstance(value, float):
        return FLOAT32
    if isinstance(value, str):
        return STRING
    assert isinstance(value, list), f"no GGUF type for {type(value)}"
    return ARRAY


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind != ARRAY:
        return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?", UINT64: "<Q"}[kind], value)
    inner = _kind(value[0]) if value else STRING
    inner = INT32 if inner == UINT32 else inner
    head = struct.pack("<IQ", inner, len(value))
    if inner == STRING:
        return head + b"".join(map(_text, value))
    return head + struct.pack(f"<{len(value)}{'i' if inner == INT32 else 'f' if inner == FLOAT32 else '?'}", *value)
