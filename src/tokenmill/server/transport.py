"""A connection's way out. Owns: how much a client has taken of what was written, and a close that it can hear.

Must not know: HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LEAST_TAKEN = 4096
"""Bytes that a reader must take in each patience, if so many wait for it."""


def _nothing() -> None:
    """Nobody is asked."""


class CountedTransport:
    """What uvicorn writes to. `on_close` is asked instead of closing at once."""

    def __init__(self, inner: Any, on_close: Callable[[], None]) -> None:
        self._inner = inner
        self._on_close = on_close
        self._written = 0
        self._closing = False
        self._mark: tuple[int, float] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        """To the client, or to what waits for it."""
        self._written += len(data)
        self._inner.write(data)

    def close(self) -> None:
        """No more is written; the owner decides when no more is read."""
        if not self._closing:
            self._closing = True
            self._on_close()

    def is_closing(self) -> bool:
        """Has its end begun?"""
        return self._closing or self._inner.is_closing()

    def finish(self) -> None:
        """Close for good, once everything is written."""
        self._closing = True
        self._inner.close()

    def let_go(self) -> None:
        """The connection is gone: nobody needs to be asked."""
        self._closing, self._on_close = True, _nothing

    def say_no_more(self) -> None:
        """Let the client know that nothing follows, while it may still be sending."""
        if self._inner.can_write_eof() and not self._inner.is_closing():
            self._inner.write_eof()

    def stalled(self, now: float, patience: float) -> bool:
        """Has the reader taken next to nothing for so long, though something waits for it?"""
        waiting = self._inner.get_write_buffer_size()
        taken = self._written - waiting
        if not waiting:
            self._mark = None
        elif self._mark is None or taken - self._mark[0] >= LEAST_TAKEN:
            self._mark = (taken, now)
        return self._mark is not None and now - self._mark[1] > patience
