"""GGUF files: metadata and where each tensor's bytes lie. Owns: reading the header, strictly and quickly.

Must not know: architectures, what a key means, how blocks decode. Every length, count and offset is checked against
the bytes that are there before it is used; a file that lies is a ModelError, not a crash.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.core.errors import ModelError
from tokenmill.core.files import LOOK, open_regular, told_by

MAX_ENTRIES = 1 << 16
MAX_ARRAY = 1 << 24
MAX_STRING = 1 << 26
MAX_KEY = 1 << 10
MAX_DIMS = 4
MAX_LENT = 1 << 24
STRING, ARRAY = 8, 9
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def part_names(name: str) -> list[str]:
    """The names of all files of a model, of which this is one: a model may be split."""
    match = _PART.fullmatch(name)
    return [f"{match[1]}-{n:05}-of-{match[2]}.gguf" for n in range(1, int(match[2]) + 1)] if match else [name]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type: `elements` numbers are stored in `size` bytes."""

    name: str
    elements: int
    size: int


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: shape with the slowest dimension first (as in torch), and its bytes in the file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int
    stop: int


class Cursor:
    """Reads little-endian values from bytes and never goes past their end."""

    __slots__ = ("at", "data", "end", "path")

    def __init__(self, data: bytes | mmap.mmap, path: str) -> None:
        self.data, self.at, self.end, self.path = data, 0, len(data), path

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: not a usable GGUF file: {what} (at byte {self.at}).")

    def number(self, layout: str) -> Any:
        size = struct.calcsize(layout)
        if self.at + size > self.end:
            raise self.fail("it ends in the middle of its header")
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += size
        return value

    def raw(self, most: int) -> bytes:
        size = self.number("<Q")
        if size > most or self.at + size > self.end:
            raise self.fail(f"a string of {size} bytes")
        text = bytes(self.data[self.at : self.at + size])
        self.at += size
        return text

    def text(self, most: int) -> str:
        try:
            return self.raw(most).decode()
        except UnicodeDecodeError as error:
            raise self.fail("a name that is not UTF-8") from error


@dataclass(slots=True)
class GgufFile:
    """An open file: `metadata` (strings as str, or as bytes if they are not UTF-8) and `tensors` by name."""

    path: str
    data: mmap.mmap
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    lent: list[TensorInfo] = field(default_factory=list)
    """Matrices that were handed out and whose pages may still be in memory."""

    def bytes_of(self, info: TensorInfo) -> memoryview:
        """A tensor's bytes, not copied. Now and then the memory of matrices handed out earlier is freed. Most of them
        are packed by then, and the others are read from the file again. So nobody may write to a matrix."""
        if len(info.shape) > 1:
            if sum(lent.stop - lent.start for lent in self.lent) > MAX_LENT:
                for lent in self.lent:
                    self.forget(lent)
                self.lent.clear()
            self.lent.append(info)
        return memoryview(self.data)[info.start : info.stop]

    def forget(self, info: TensorInfo) -> None:
        """Free the memory of a matrix. Whoever still uses it reads it from the file again."""
        first, last = -(-info.start // mmap.PAGESIZE) * mmap.PAGESIZE, info.stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED, first, last - first)


def open_gguf(path: Path | str) -> GgufFile:
    """Read the header of a GGUF file (version 2 or 3, little-endian)."""
    try:
        with open_regular(path) as file:
            # A private map is writable without changing the file, so torch takes it without a copy or a warning.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ModelError:
        raise
    except (OSError, ValueError) as error:
        reason = "the file is empty" if os.path.getsize(path) == 0 else error
        raise ModelError(f"{path}: cannot be opened ({reason}).") from error
    metadata, tensors = parse_gguf(data, str(path))
    return GgufFile(str(path), data, metadata, tensors)


def parse_gguf(data: bytes | mmap.mmap, path: str) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata and tensor table of a whole file's bytes."""
    cursor = Cursor(data, path)
    if bytes(data[:4]) != b"GGUF":
        if other := told_by(bytes(data[:LOOK])):
            raise ModelError(f"{path}: is {other}")
        raise cursor.fail("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.number("<I")
    if version not in (2, 3):
        raise cursor.fail(f"version {version}; versions 2 and 3 in little-endian order are read")
    num_tensors, num_entries = cursor.number("<Q"), cursor.number("<Q")
    if num_tensors > MAX_ENTRIES or num_entries > MAX_ENTRIES:
        raise cursor.fail(f"{num_tensors} tensors and {num_entries} metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text(MAX_KEY)
        if key in metadata:
            raise cursor.fail(f"the key {key!r} twice")
        metadata[key] = _value(cursor, cursor.number("<I"))
    return metadata, _tensors(cursor, num_tensors, metadata)


def _value(cursor: Cursor, kind: int) -> Any:
    if kind == STRING:
        return _shown(cursor.raw(MAX_STRING))
    if kind != ARRAY:
        return _scalar(cursor, kind)
    inner, count = cursor.number("<I"), cursor.number("<Q")
    if count > MAX_ARRAY:
        raise cursor.fail(f"an array of {count} values")
    if inner == STRING:
        return _strings(cursor, count)
    if inner not in SCALARS:
        raise cursor.fail(f"an array of type {inner}")
    layout = f"<{count}{SCALARS[inner][1]}"
    size = struct.calcsize(layout)
    if cursor.at + size > cursor.end:
        raise cursor.fail(f"an array of {count} values that the file does not hold")
    values = list(struct.unpack_from(layout, cursor.data, cursor.at))
    cursor.at += size
    return values


def _scalar(cursor: Cursor, kind: int) -> Any:
    if kind not in SCALARS:
        raise cursor.fail(f"a value of unknown type {kind}")
    return cursor.number(SCALARS[kind])


def _strings(cursor: Cursor, count: int) -> list[Any]:
    """Read many strings in a quick way: a vocabulary is hundreds of thousands of short ones."""
    if count * 8 > cursor.end - cursor.at:
        raise cursor.fail(f"an array of {count} strings that the file does not hold")
    data, at, end = cursor.data, cursor.at, cursor.end
    unpack = struct.Struct("<Q").unpack_from
    found: list[bytes] = []
    add = found.append
    for _ in range(count):
        if at + 8 > end:
            cursor.at = at
            raise cursor.fail("an array of strings that ends early")
        (size,) = unpack(data, at)
        at += 8
        if size > end - at:
            cursor.at = at
            raise cursor.fail(f"a string of {size} bytes")
        add(data[at : at + size])
        at += size
    cursor.at = at
    try:
        return [raw.decode() for raw in found]
    except UnicodeDecodeError:
        return [_shown(raw) for raw in found]


def _shown(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _tensors(cursor: Cursor, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise cursor.fail(f"alignment {alignment!r}")
    table = []
    for _ in range(count):
        name, num_dims = cursor.text(MAX_KEY), cursor.number("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions")
        dims = [cursor.number("<Q") for _ in range(num_dims)]
        kind, offset = cursor.number("<I"), cursor.number("<Q")
        if kind not in TYPES:
            raise cursor.fail(f"tensor {name!r} has the unknown type {kind}")
        table.append((name, tuple(reversed(dims)), TYPES[kind], offset))
    base = -(-cursor.at // alignment) * alignment
    found: dict[str, TensorInfo] = {}
    for name, shape, block, offset in table:
        found_before = name in found
        size = _size(cursor, name, shape, block)
        start = base + offset
        if found_before or offset % alignment or start + size > cursor.end:
            raise cursor.fail(f"tensor {name!r} of {size} bytes at offset {offset} (twice, unaligned or past the end)")
        found[name] = TensorInfo(name, block, shape, start, start + size)
    _check_overlap(cursor, found)
    return found


def _size(cursor: Cursor, name: str, shape: tuple[int, ...], block: BlockType) -> int:
    elements = 1
    for dim in shape:
        elements *= dim
        if dim < 1 or elements > 1 << 48:
            raise cursor.fail(f"tensor {name!r} has the shape {shape}")
    if shape[-1] % block.elements:
        raise cursor.fail(f"tensor {name!r}: rows of {shape[-1]} are not whole {block.name} blocks")
    return elements // block.elements * block.size


def _check_overlap(cursor: Cursor, tensors: dict[str, TensorInfo]) -> None:
    before = None
    for info in sorted(tensors.values(), key=lambda t: t.start):
        if before is not None and info.start < before.stop:
            raise cursor.fail(f"tensors {before.name!r} and {info.name!r} overlap")
        before = info
