"""Byte strings in one buffer that is allocated at the start. Owns: where they lie, and which is dropped for the newest.

Small objects that outlive a burst of requests would keep the burst's whole heap from being given back: each would lie
on a page among thousands of free ones. Must not know: what the bytes mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class ByteRing:
    """At most `most` strings of `size` bytes together."""

    def __init__(self, size: int, most: int) -> None:
        self._buffer = bytearray(size)
        self._starts = array("q", bytes(8 * most))
        self._lengths = array("q", bytes(8 * most))
        self._most = most
        self._oldest = 0
        self._at = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, data: bytes) -> None:
        """Keep `data`. It is dropped if it could never fit."""
        size = len(self._buffer)
        if not 0 < len(data) <= size:
            return
        if self._at + len(data) > size:  # the oldest strings lie between here and the buffer's end
            while self._count and self._starts[self._oldest] >= self._at:
                self._drop()
            self._at = 0
        end = self._at + len(data)
        while self._count and (self._count == self._most or self._at <= self._starts[self._oldest] < end):
            self._drop()
        place = (self._oldest + self._count) % self._most
        self._starts[place], self._lengths[place] = self._at, len(data)
        self._buffer[self._at : end] = data
        self._at = end
        self._count += 1

    def newest(self, prefix: bytes) -> Iterator[bytes]:
        """The strings that begin with `prefix`, the newest first."""
        for back in range(self._count - 1, -1, -1):
            place = (self._oldest + back) % self._most
            start = self._starts[place]
            end = start + self._lengths[place]
            if self._buffer.startswith(prefix, start, end):
                yield bytes(self._buffer[start:end])

    def _drop(self) -> None:
        self._oldest = (self._oldest + 1) % self._most
        self._count -= 1
