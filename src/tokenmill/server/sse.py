"""Server-sent events as bytes. Owns: encoding chunks with cached beginnings and ends, and the response that writes
them.

No object is built per token: a plain text chunk is prefix + JSON string + suffix.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.responses import Response

from tokenmill.server.errors import HttpError, describe_error, shutting_down, with_request_id

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
encode = msgspec.json.Encoder().encode
Scope = MutableMapping[str, Any]
Failed = Callable[[HttpError], bytes]


def event(value: Any) -> bytes:
    """One event as bytes."""
    return b"data: " + encode(value) + b"\n\n"


class PlainChunks:
    """Text chunks of one choice that differ only in the text. `before` and `after` are cached bytes."""

    __slots__ = ("after", "before")

    def __init__(self, template: dict[str, Any], marker: str = "\u0000") -> None:
        whole = event(template)
        self.before, self.after = whole.split(encode(marker))

    def chunk(self, text: str) -> bytes:
        """One event with this text."""
        return self.before + encode(text) + self.after


LINES = [(b"content-type", b"application/x-ndjson"), *HEADERS[1:]]


class EventStream(Response):
    """A response over an iterator of ready bytes. `close` runs however it ends. `failed`: the last bytes after an
    error; without it, the error is raised."""

    kind = HEADERS

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        close: Callable[[], None],
        failed: Callable[[HttpError], bytes] | None = None,
    ) -> None:
        self.chunks = chunks
        self.close = close
        self.failed = failed
        self.status_code = 200
        self.background = None
        self.raw_headers = self.kind

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        last = b""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for data in self.chunks:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except asyncio.CancelledError:  # the server ends, or the client has left and hears nothing
                if self.failed is not None:
                    last = self.failed(with_request_id(shutting_down(), scope))
                    await send({"type": "http.response.body", "body": last, "more_body": False})
                raise
            except Exception as error:
                if self.failed is None:
                    raise
                last = self.failed(with_request_id(describe_error(error), scope))
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self.close()


class LineStream(EventStream):
    """The same with one JSON object per line."""

    kind = LINES
