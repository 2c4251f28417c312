"""Host memory that goes and comes back at the same addresses. Owns: which pages tensors lie on, giving them back to the
system, and the unnamed file that holds their contents meanwhile.

Pages of a private file map are simply dropped, because the system can read them again. All other pages are written to
the file once and read back from it, usually out of the system's file cache, whose memory is free for others.
Must not know: models.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from tokenmill.core.errors import UserError, why

MAPS, PAGES = Path("/proc/self/maps"), Path("/proc/self/pagemap")
LASTING = Path("/var/tmp")
"""Temporary files that do not lie in memory, as a rule."""
LEAST_BYTES = 1 << 16
"""Tensors below it stay: their pages are shared with others."""
PIECE = 1 << 24
"""Bytes that one thread reads or writes at a time."""
THREADS = 4
_DONTNEED = 4

Span = tuple[int, int]
"""First address, and the one behind the last."""


class HostPages:
    """Whole pages within tensors that somebody else keeps."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        own, self.mapped = _spans(_merged(_pages(tensors)))
        written = [span for each in self.mapped for span in _used(each, own=True)]
        self.kept = sorted([*(span for each in own for span in _used(each)), *written])
        """Their contents are kept in the file."""
        self.file: IO[bytes] | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that `drop` gives back, if all of it was in use."""
        return sum(stop - start for start, stop in _merged([*self.kept, *self.mapped]))

    def save(self, folder: str | None = None) -> None:
        """Write what would be lost into a file without a name; the memory stays as it is."""
        if self.file is not None or not self.kept:
            return
        where = Path(folder) if folder is not None else LASTING
        there = where if folder is not None or where.is_dir() else None
        try:
            self.file = self._written(there)
        except OSError as error:
            raise UserError(
                f"{where}: the weights cannot be kept there during sleep ({why(error)}): --sleep-folder names another "
                "folder, and level 2 keeps no weights."
            ) from error

    def _written(self, folder: Path | None) -> IO[bytes]:
        """A file without a name that holds them."""
        file = tempfile.TemporaryFile(dir=folder, prefix="tokenmill-")  # noqa: SIM115 - open while it is wanted
        try:
            self._move(file.fileno(), os.pwritev)
        except BaseException:
            file.close()
            raise
        return file

    def forget(self) -> None:
        """What was written is no longer wanted, or no longer right."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def drop(self) -> None:
        """Give the memory back: it reads as zeros, maps as their files."""
        libc = ctypes.CDLL(None, use_errno=True)
        for start, stop in (*self.kept, *self.mapped):
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))

    def restore(self) -> None:
        """What was saved is where it was; the file stays, for the next time."""
        if self.file is not None:
            self._move(self.file.fileno(), os.preadv)

    def _move(self, file: int, move: object) -> None:
        """Between memory and file, several pieces at a time."""
        pieces, at = [], 0
        for start, stop in self.kept:
            for first in range(start, stop, PIECE):
                size = min(PIECE, stop - first)
                pieces.append((first, size, at))
                at += size
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda piece: _whole(move, file, *piece), pieces):
                pass


def can_drop() -> bool:
    """Does the system say what lies where? Linux does."""
    return MAPS.exists()


def _whole(move: object, file: int, address: int, size: int, at: int) -> None:
    """One piece, however many calls it takes."""
    assert callable(move)
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    done = 0
    while done < size:
        count = move(file, [memory[done:]], at + done)
        if count <= 0:
            raise OSError("the file of a sleeping model's weights is too short")
        done += count


def _pages(tensors: Iterable[Tensor]) -> list[Span]:
    """Whole pages of every storage."""
    page, found = os.sysconf("SC_PAGE_SIZE"), {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if tensor.device.type == "cpu" and size >= LEAST_BYTES:
            found[start] = (-(-start // page) * page, (start + size) // page * page)
    return [span for span in found.values() if span[0] < span[1]]


def _merged(spans: list[Span]) -> list[Span]:
    """The same without overlaps: storages may lie within one map."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _spans(wanted: list[Span]) -> tuple[list[Span], list[Span]]:
    """(this process's own memory, private maps of files) within these spans. Memory that others share stays."""
    if not can_drop():
        raise UserError("sleep on a CPU needs Linux: no other system tells what may be given back.")
    own: list[Span] = []
    mapped: list[Span] = []
    areas = [_area(line) for line in MAPS.read_text().splitlines()]
    at = 0
    for start, stop in wanted:
        while at < len(areas) and areas[at][1] <= start:
            at += 1
        for first, last, rights, is_file in areas[at:]:
            if first >= stop:
                break
            if rights.startswith("rw") and rights.endswith("p"):
                (mapped if is_file else own).append((max(start, first), min(stop, last)))
    return own, mapped


def _used(span: Span, *, own: bool = False) -> list[Span]:
    """What of it has ever been touched; all of it, where the system does not say. own: pages of a map that have been
    written to, and are no longer the file's."""
    page = os.sysconf("SC_PAGE_SIZE")
    start, count = span[0] // page, (span[1] - span[0]) // page
    try:
        with PAGES.open("rb") as file:
            file.seek(start * 8)
            entries = torch.frombuffer(bytearray(file.read(count * 8)), dtype=torch.int64)
    except (OSError, ValueError):
        return [span]
    if entries.numel() != count:
        return [span]
    there = entries >> 62 & 3 != 0  # in memory, or swapped out
    if own:
        there &= entries >> 61 & 1 == 0
    there = there.to(torch.int8)
    borders = torch.diff(there, prepend=torch.zeros(1, dtype=torch.int8), append=torch.zeros(1, dtype=torch.int8))
    first, last = (((borders == way).nonzero()[:, 0] + start) * page for way in (1, -1))
    return list(zip(first.tolist(), last.tolist(), strict=True))


def _area(line: str) -> tuple[int, int, str, bool]:
    fields = line.split(maxsplit=5)
    first, last = (int(address, 16) for address in fields[0].split("-"))
    return first, last, fields[1], fields[4] != "0"
