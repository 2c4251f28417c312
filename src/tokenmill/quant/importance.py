"""What llama.cpp's `imatrix` counts: how large the inputs of each column were. Owns: reading and writing its files.

GGUF:  NAME.in_sum2 float32 [experts, columns]: sums of squares     NAME.counts float32 [experts, 1]: of so many tokens
older: how many; for each: length of name, name, calls, how many numbers, mean squares times calls; all calls, and the
       text's name after its length. Whole numbers have 32 bits, and experts lie one behind the other
Must not know: how rounding uses it, where sums come from.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_file import GgufFile, TensorInfo, open_gguf
from tokenmill.checkpoint.gguf_write import Entry, write_bytes, write_gguf
from tokenmill.core.errors import ModelError, why

OLDER = ".dat"
_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST_BYTES = 1 << 30
_INT = struct.Struct("<i")


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of one matrix, or of the experts in one tensor: squares [experts, columns] over this many tokens
    [experts, 1]."""

    squares: Tensor
    tokens: Tensor

    def means(self) -> Tensor:
        """The mean square of each column's input. Columns that no input reached count a little; experts that no token
        reached count all columns alike."""
        mean = self.squares / self.tokens.clamp(min=1.0)
        usual = mean.mean(1, keepdim=True)
        return torch.where(usual > 0, torch.where(mean > 0, mean, usual * 1e-4), 1.0)


def read(path: Path) -> dict[str, Tensor]:
    """Name of a matrix in GGUF files -> the mean square of each column's input [experts, columns]."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {why(error)}.") from error
    found = _read_gguf(path) if start == b"GGUF" else _read_older(path)
    return {name: _checked(name, each, path).means() for name, each in found.items()}


def _checked(name: str, sums: Sums, path: Path) -> Sums:
    squares, tokens = sums.squares, sums.tokens
    if not bool(torch.isfinite(squares).all()) or bool((squares < 0).any()) or not bool((tokens >= 0).all()):
        raise ModelError(f"{path}: '{name}' holds numbers that cannot be sums of squares.")
    return sums


def _read_gguf(path: Path) -> dict[str, Sums]:
    file = open_gguf(path)
    found = {}
    for name, info in file.tensors.items():
        if not name.endswith(_SUMS):
            continue
        base = name.removesuffix(_SUMS)
        counts = file.tensors.get(base + _COUNTS)
        if counts is None:
            raise ModelError(f"{path}: '{name}' has no counts beside it.")
        sums, count = (_numbers(file, each, path) for each in (info, counts))
        sums, count = sums.view(-1, info.shape[-1]), count.reshape(-1, 1)
        if count.shape[0] not in (1, sums.shape[0]):
            raise ModelError(f"{path}: '{name}' has {sums.shape[0]} matrices and {count.shape[0]} counts.")
        found[base] = Sums(sums, count)
    if not found:
        raise ModelError(f"{path} is not an importance file of llama.cpp: it has no tensors named '...{_SUMS}'.")
    return found


def _numbers(file: GgufFile, info: TensorInfo, path: Path) -> Tensor:
    if info.type.name != "F32":
        raise ModelError(f"{path}: '{info.name}' is stored as {info.type.name}, not F32.")
    return torch.frombuffer(bytearray(file.bytes_of(info)), dtype=torch.float32).view(info.shape)


class _Reader:
    """Reads the older form piece by piece."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        with path.open("rb") as file:  # it may be a device without an end
            self.data = file.read(_MOST_BYTES + 1)
        if len(self.data) > _MOST_BYTES:
            raise ModelError(f"{path} is not an importance file of llama.cpp: it is too large for one.")

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self.data) - self.at:
            raise ModelError(f"{self.path} is not an importance file of llama.cpp, or it is cut off.")
        self.at += size
        return self.data[self.at - size : self.at]

    def whole(self) -> int:
        return int(_INT.unpack(self.take(_INT.size))[0])


def _read_older(path: Path) -> dict[str, Sums]:
    reader, found = _Reader(path), {}
    for _ in range(reader.whole()):
        name = reader.take(reader.whole()).decode("utf-8", "replace")
        calls, count = reader.whole(), reader.whole()
        raw = reader.take(4 * count)
        if not count or calls < 0 or name in found:
            raise ModelError(f"{path}: '{name[:80]}' has {count} numbers of {calls} calls, or is there twice.")
        squares = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(1, -1)
        found[name] = Sums(squares, torch.tensor([[float(calls)]]))
    if not found:
        raise ModelError(f"{path} is not an importance file of llama.cpp: it names no matrix.")
    return found


def write(path: Path, found: Mapping[str, Sums], text: str, shape: tuple[int, int]) -> None:
    """Write a file for llama.cpp, in the older form if the name ends in .dat. text: the name of the text that was read,
    with the number and length of its sequences."""
    if path.suffix == OLDER:
        write_bytes(path, _older(found, text, shape[0]))
        return
    entries = []
    for name, sums in found.items():
        for end, tensor in ((_SUMS, sums.squares), (_COUNTS, sums.tokens)):
            raw = tensor.float().contiguous().numpy().tobytes()
            entries.append(Entry(name + end, tuple(tensor.shape), "F32", lambda raw=raw: [raw]))  # type: ignore[misc]
    metadata = {"general.type": "imatrix", "imatrix.datasets": [text], "imatrix.chunk_count": shape[0],
            "imatrix.chunk_size": shape[1]}  # fmt: skip
    write_gguf(path, metadata, entries)


def _older(found: Mapping[str, Sums], text: str, calls: int) -> Iterator[bytes]:
    yield _INT.pack(len(found))
    for name, sums in found.items():
        raw, means = name.encode(), sums.squares / sums.tokens.clamp(min=1.0) * calls
        yield _INT.pack(len(raw)) + raw + _INT.pack(calls) + _INT.pack(means.numel())
        yield means.float().contiguous().numpy().tobytes()
    yield _INT.pack(calls) + _INT.pack(len(text.encode())) + text.encode()
