"""A client that costs little, so that a server on the same two cores meets the load that is meant for it.

Owns: one streamed completion as an asyncio protocol that counts bytes instead of reading JSON. A full client needs more
of a core per token than the server, and then measures itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """What happened to many requests, whichever client sent them; times in seconds since each was sent."""

    statuses: Counter[int] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    tokens: int = 0
    broken: int = 0
    without_retry_after: int = 0


def stream_request(body: dict[str, Any]) -> bytes:
    data = json.dumps({**body, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, tally: Tally, sent: float) -> None:
        self.request, self.tally, self.sent = request, tally, sent
        self.status = 0
        self.head = self.tail = b""
        self.tokens, self.failed = 0, False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self.head += data
            head, found, rest = self.head.partition(b"\r\n\r\n")
            if not found:
                return
            self.status = int(head.split(None, 2)[1])
            self.tally.statuses[self.status] += 1
            if self.status != 200:
                self.tally.refused_s.append(time.monotonic() - self.sent)
                self.tally.without_retry_after += b"\nretry-after:" not in head.lower()
            data = rest
        found_now = data.count(b"data: {")
        if found_now and not self.tokens:
            self.tally.first_s.append(time.monotonic() - self.sent)
        self.tokens += found_now
        self.failed = self.failed or b'{"error"' in data
        self.tail = (self.tail + data)[-64:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.status or (self.status == 200 and (self.failed or b"data: [DONE]" not in self.tail)):
            self.tally.broken += 1
        self.over.set_result(None)


async def one_lean(port: int, request: bytes, tally: Tally) -> None:
    """Send one request on a connection of its own and wait for its end."""
    sent = time.monotonic()
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: _Stream(request, tally, sent), "127.0.0.1", port)
    await stream.over
