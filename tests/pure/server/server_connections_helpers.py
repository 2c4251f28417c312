"""What test_server_connections.py and other tests share."""

from __future__ import annotations

import asyncio

from tests.pure.server.conftest import until
from tests.pure.server.listening import Listening


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Whatever comes until the server closes."""
    async with asyncio.timeout(60):
        parts = []
        while True:
            try:
                part = await reader.read(1 << 16)
            except ConnectionError:
                part = b""
            if not part:
                return b"".join(parts)
            parts.append(part)


async def closed(server: Listening) -> None:
    await until(lambda: not server.connections)
    await server.idle(60)
