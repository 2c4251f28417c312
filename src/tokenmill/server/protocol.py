"""Sockets. Owns: ceilings on a request's head and its time, and a way for the app to drop a connection at once.

uvicorn's httptools protocol has no such ceilings; this adds them. Must not know: endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenmill.server.errors import HttpError, error_bytes

MAX_HEADERS = 200


class BoundedProtocol(HttpToolsProtocol):
    """One connection; the ceilings are class attributes, because uvicorn makes the objects."""

    max_head = 64 << 10
    head_timeout = 30.0
    max_connections = 4096
    head_bytes = 0
    refused = False
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.on_gone: set[Callable[[], None]] = set()
        self.timer = self.loop.call_later(self.head_timeout, self._late)

    def eof_received(self) -> None:
        """The connection closes; engines need not wait until handlers have been cancelled."""
        self._tell_gone()
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tell_gone()
        self._stop_timer()
        super().connection_lost(exc)

    def _tell_gone(self) -> None:
        for tell in self.on_gone:
            tell()
        self.on_gone.clear()

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        self.head_bytes += len(data)
        super().data_received(data)
        # A head that never ends produces no callback before its line is complete.
        if self.timer is not None and self.head_bytes > 2 * self.max_head and not self.refused:
            self._refuse(431, f"The request's head is larger than {self.max_head} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.seen = 0
        if self.timer is None:
            self.head_bytes = 0
            self.timer = self.loop.call_later(self.head_timeout, self._late)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if not self.refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        if self.refused:
            return
        if len(self.connections) > self.max_connections:
            self._refuse(503, f"{self.max_connections} connections are open; the server takes no more.")
            return
        self.scope["state"].update(abort=self.transport.abort, on_gone=self.on_gone)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.refused:
            super().on_message_complete()

    def _count(self, size: int) -> None:
        self.seen += size
        if not self.refused and (self.seen > self.max_head or len(self.headers or ()) > MAX_HEADERS):
            self._refuse(431, f"The request's head is larger than {self.max_head} bytes or {MAX_HEADERS} lines.")

    def _late(self) -> None:
        self.timer = None
        if self.head_bytes:
            self._refuse(408, "The request's head did not arrive in time.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        self.refused = True
        self._stop_timer()
        body = error_bytes(HttpError(status, message))
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        again = b"retry-after: 1\r\n" if status == 503 else b""
        self.transport.write(head.encode() + again + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if not self.refused:
            self._refuse(400, "The request is not valid HTTP.")

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def make_protocol(max_head: int, head_timeout: float, max_connections: int) -> type[BoundedProtocol]:
    """A protocol class with these ceilings."""
    ceilings = {"max_head": max_head, "head_timeout": head_timeout, "max_connections": max_connections}
    return type("Protocol", (BoundedProtocol,), ceilings)
