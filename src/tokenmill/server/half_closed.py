"""Clients that have closed their half of a connection. Owns: telling those that wait for an answer from those that are
gone.

A client that says that it will send no more (`nc -N` does, and whatever calls shutdown) looks like one that has closed
altogether, until something is written: the system of one that is gone refuses that, and so what is written next fails.
Before an answer begins, what may be written is an interim answer, which every client of HTTP/1.1 passes over; clients
of HTTP/1.0 (many proxies) may get none, so they have a moment for their answer. Must not know: requests, handlers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
WAITS_S = (0.002, 0.02, 0.2, 0.8)
"""Between interim answers: a refusal is there at once on one machine, and may be on its way for long from another."""


class HalfClosed:
    """One such connection, while an answer is made."""

    def __init__(self, out: Any, asking: Callable[[], bool], *, hears: bool) -> None:
        """`asking`: is there an answer that has not begun? `hears`: interim answers may be written."""
        self.out, self.asking, self.hears = out, asking, hears

    def watch(self, later: Callable[..., Any], waits: tuple[float, ...] = WAITS_S) -> None:
        """Ask now and a few times more whether it is there; an answer that has begun does so itself."""
        if self.out.is_closing() or not self.asking():
            return
        if self.hears:
            self.out.write(INTERIM)
        elif not waits:
            self.out.close()
        if waits:
            later(waits[0], self.watch, later, waits[1:])
