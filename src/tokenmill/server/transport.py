"""A connection's writing side. Owns: how much of the output its client has taken, ending connections whose client takes
nothing, closing in a way that the protocol can control, and what waits for the client.

Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEAST_TAKEN = 4096
"""Bytes that a client must take within each patience, if at least this many wait for it."""


def _nothing() -> None:
    """The default of `on_close`."""


class CountedTransport:
    """The transport that uvicorn writes to. `close` calls `on_close` instead of closing at once."""

    __slots__ = ("_closing", "_inner", "_mark", "_on_close", "_written")

    def __init__(self, inner: Any, on_close: Callable[[], None]) -> None:
        self._inner = inner
        self._on_close = on_close
        self._written = 0
        self._closing = False
        self._mark: tuple[int, float] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        """Send to the client, or queue behind the output that waits for it."""
        self._written += len(data)
        self._inner.write(data)

    def close(self) -> None:
        """End writing. The owner decides when reading ends."""
        if not self._closing:
            self._closing = True
            self._on_close()

    def is_closing(self) -> bool:
        """Has closing begun?"""
        return self._closing or self._inner.is_closing()

    def finish(self) -> None:
        """Close for good when everything is written."""
        self._closing = True
        self._inner.close()

    def let_go(self) -> None:
        """The connection is gone. Do not call `on_close` any more."""
        self._closing, self._on_close = True, _nothing

    def say_no_more(self) -> None:
        """Tell the client that nothing follows. It may still be sending."""
        if self._inner.can_write_eof() and not self._inner.is_closing():
            self._inner.write_eof()

    def stalled(self, now: float, patience: float) -> bool:
        """Has the client taken almost nothing for longer than `patience`, although output waits for it?"""
        waiting = self._inner.get_write_buffer_size()
        taken = self._written - waiting
        if not waiting:
            self._mark = None
        elif self._mark is None or taken - self._mark[0] >= LEAST_TAKEN:
            self._mark = (taken, now)
        return self._mark is not None and now - self._mark[1] > patience


class LateEvent:
    """An asyncio.Event that takes little memory until a task waits for it."""

    __slots__ = ("_told", "_waiting")

    def __init__(self) -> None:
        self._told = False
        self._waiting: list[asyncio.Future[None]] | None = None

    def is_set(self) -> bool:
        """Is it set?"""
        return self._told

    def set(self) -> None:
        """Set it; all waiting tasks continue."""
        self._told = True
        for waiting in self._waiting or ():
            if not waiting.done():
                waiting.set_result(None)
        self._waiting = None

    def clear(self) -> None:
        """Reset it."""
        self._told = False

    async def wait(self) -> None:
        """Wait until it is set."""
        if self._told:
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting = [one for one in self._waiting or () if not one.done()] + [waiting]
        await waiting


class Flow:
    """uvicorn's flow control, made small because there are many connections and few of them ever wait."""

    __slots__ = ("_out", "_writable", "read_paused")

    def __init__(self, out: CountedTransport) -> None:
        self._out = out
        self._writable = LateEvent()
        self._writable.set()
        self.read_paused = False

    @property
    def write_paused(self) -> bool:
        """Must writers wait, because much output waits for the client?"""
        return not self._writable.is_set()

    async def drain(self) -> None:
        """Wait until the client has taken enough."""
        await self._writable.wait()

    def pause_reading(self) -> None:
        """Stop reading. Input waits in the system."""
        if not self.read_paused:
            self.read_paused = True
            self._out.pause_reading()

    def resume_reading(self) -> None:
        """Continue reading."""
        if self.read_paused:
            self.read_paused = False
            self._out.resume_reading()

    def pause_writing(self) -> None:
        """Too much output waits for the client, so writers wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The client has taken enough, or is gone, so writers continue."""
        self._writable.set()


@dataclass(frozen=True, slots=True)
class Wire:
    """The writing side of a connection, for what takes it over from HTTP."""

    out: CountedTransport
    flow: Any

    def write(self, data: bytes) -> None:
        """Send to the client, or append to what waits for it."""
        if not self.out.is_closing():
            self.out.write(data)

    def unread(self) -> int:
        """Bytes that the client has not taken yet."""
        size: int = self.out.get_write_buffer_size()
        return size

    async def drain(self) -> None:
        """Wait until the client has taken enough."""
        await self.flow.drain()

    def end(self) -> None:
        """Close when everything is written."""
        self.out.finish()


async def drop_stalled(connections: set[Any], patience: float, on_drop: Callable[[], None]) -> None:
    """End connections whose client takes no output, streamed or not. Runs for ever."""
    while True:
        await asyncio.sleep(min(5.0, patience / 4))
        _drop_stalled_now(connections, patience, on_drop)


def _drop_stalled_now(connections: set[Any], patience: float, on_drop: Callable[[], None]) -> None:
    """One check. It is a function of its own, because the waiting loop would keep a reference to the last
    connection."""
    now = asyncio.get_running_loop().time()
    for connection in list(connections):
        if connection.out.stalled(now, patience):
            on_drop()
            connection.transport.abort()
