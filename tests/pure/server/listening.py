"""A served application behind a real port, and what clients of it do."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from tests.pure.server.conftest import Served
from tokenmill.testing.fake_generator import FakeOptions

PATH = "/v1/completions"


@dataclass
class Listening:
    """A served application behind a real port."""

    served: Served
    port: int
    options: FakeOptions
    connections: set[Any]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, body: Any, path: str = PATH) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connect()
        writer.write(message(body, path))
        await writer.drain()
        return reader, writer

    async def idle(self, seconds: float) -> float:
        """Wait until nothing is left of any request; -> how long that took."""
        began = time.monotonic()
        while self.served.context.gate.open or self.served.fake.fleet.open_requests or self.served.fake.link().works:
            assert time.monotonic() - began < seconds, "something was left behind"
            await asyncio.sleep(0.005)
        return time.monotonic() - began


def message(body: Any, path: str = PATH) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data


async def answer(reader: asyncio.StreamReader, seconds: float = 60) -> tuple[int, bytes]:
    """Status and body until the connection closes or the body is complete."""
    async with asyncio.timeout(seconds):
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
        return int(head.split()[1]), body
