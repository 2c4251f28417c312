"""Clients that have closed their half of a connection. Owns: telling clients that still wait for an answer from those
that are gone.

A client that announces it will send no more (`nc -N`, or anything that calls shutdown) looks like one that is gone,
until something is written: the system of a client that is gone refuses it, so the next write fails. Before an answer
begins, only an interim answer may be written; every HTTP/1.1 client skips it. HTTP/1.0 clients (many proxies) must get
none, so they only have a moment for their answer. Must not know: requests, handlers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
WAITS_S = (0.002, 0.02, 0.2, 0.8)
"""Seconds between interim answers. On one machine a refusal is there at once; from another it may take long."""


class HalfClosed:
    """A half-closed connection while an answer is made."""

    def __init__(self, out: Any, asking: Callable[[], bool], *, hears: bool) -> None:
        """`asking`: is a request open whose answer has not begun? `hears`: interim answers may be written."""
        self.out, self.asking, self.hears = out, asking, hears

    def watch(self, later: Callable[..., Any], waits: tuple[float, ...] = WAITS_S) -> None:
        """Test now and a few times more whether the client is there. Once the answer has begun, its own writes show
        it."""
        if self.out.is_closing() or not self.asking():
            return
        if self.hears:
            self.out.write(INTERIM)
        elif not waits:
            self.out.close()
        if waits:
            later(waits[0], self.watch, later, waits[1:])
