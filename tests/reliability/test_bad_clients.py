"""Clients that leave, dawdle, stop reading, or send too much. Each prints what it measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.cpu.server.conftest import Running
from tests.reliability.lean import Tally
from tests.reliability.reliability_helpers import one, percentile, rss

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
Launch = Callable[..., Running]
PATH = "/v1/completions"


def message(body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data


async def connect(running: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", urlsplit(running.url).port)


def unread(writer: asyncio.StreamWriter, running: Running) -> int:
    """Bytes that we have sent and the server has not yet taken from its socket."""
    ours = writer.get_extra_info("sockname")[1]
    theirs = urlsplit(running.url).port
    waiting = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        pair = int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16)
        if pair == (ours, theirs):
            waiting += int(queues.partition(":")[0], 16)
        elif pair == (theirs, ours):
            waiting += int(queues.partition(":")[2], 16)
    return waiting


def leave_early(running: Running, body: dict[str, Any], name: str, *, reset: bool) -> int:
    """Open a stream, leave after five tokens; -> tokens that had reached this side when it closed."""
    port = urlsplit(running.url).port or 0
    with socket.create_connection(("127.0.0.1", port)) as made:
        made.sendall(message(body).replace(b"\r\n\r\n", f"\r\nx-request-id: {name}\r\n\r\n".encode(), 1))
        data = b""
        while data.count(b'"text"') < 5:
            data += made.recv(1 << 16)
        if reset:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return data.count(b'"text"')


@pytest.mark.parametrize("step_ms", [10, 0])
def test_a_hundred_dropped_streams(launch: Launch, step_ms: int) -> None:
    """Steps that the engine made after the server had told its last token, and after the client had closed.

    A model's step takes about 10 ms; a tiny one's (0 ms more) are shorter than a message's way, and only shown.
    """
    running = launch("--log-level", "warning", faults=f"slow={step_ms / 1000}" if step_ms else "")
    body = {"prompt": "The mill", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    waits, seen, closed = [], [], []
    for i in range(100):
        before = running.metric("vllm:generation_tokens_total")
        got = leave_early(running, body, f"left-{step_ms}-{i}", reset=i % 2 == 0)
        began = time.monotonic()
        made = -1.0  # figures that are older than the request do not count
        while made < got or running.metric("vllm:num_requests_running") or running.metric("vllm:kv_cache_usage_perc"):
            assert time.monotonic() - began < 2
            made = running.metric("vllm:generation_tokens_total") - before
        waits.append(time.monotonic() - began)
        record = running.get(f"/v1/requests/cmpl-left-{step_ms}-{i}").json()
        seen.append(made - record["prompts"][0]["output_tokens"])
        closed.append(made - got)
    found = {
        "step_ms": step_ms,
        "freed_ms_p50": statistics.median(waits) * 1e3,
        "freed_ms_max": max(waits) * 1e3,
        "steps_after_the_last_told": dict(sorted(Counter(seen).items())),
        "steps_after_closing": dict(sorted(Counter(closed).items())),
    }
    print(json.dumps(found, indent=2))
    assert max(waits) <= 0.25 and (not step_ms or max(seen + closed) <= 2)


def test_two_hundred_slow_sockets(launch: Launch) -> None:
    running = launch("--log-level", "warning", "--read-timeout", "50", "--max-num-seqs", "128")

    async def rate(seconds: float) -> tuple[float, list[float]]:
        """Tokens per second of eight well-behaved clients, and what /health took meanwhile."""
        tally, health = Tally(), []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            until = time.monotonic() + seconds

            async def reader() -> None:
                while time.monotonic() < until:
                    await one(session, running.url, tally, 64)

            async def asker() -> None:
                while time.monotonic() < until:
                    began = time.monotonic()
                    async with session.get(running.url + "/health") as answer:
                        assert answer.status == 200
                    health.append(time.monotonic() - began)
                    await asyncio.sleep(0.02)

            began = time.monotonic()
            await asyncio.gather(asker(), *(reader() for _ in range(8)))
            return tally.tokens / (time.monotonic() - began), health

    async def drip(writer: asyncio.StreamWriter) -> None:
        """A head that comes a byte a second."""
        with contextlib.suppress(ConnectionError):
            for byte in message({"prompt": "x"}):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1)

    async def main() -> dict[str, Any]:
        calm, _ = await rate(10)
        memory = rss(running)
        unread = []
        for _ in range(100):  # they ask for much and read nothing
            unread.append(await connect(running))
            unread[-1][1].write(message({"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}))
            unread[-1][1].transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        while running.metric("vllm:num_requests_running"):  # what they asked for is honest work: let it be done first
            await asyncio.sleep(0.2)
        dripping = [await connect(running) for _ in range(100)]
        tasks = [asyncio.create_task(drip(writer)) for _, writer in dripping]
        beside, health = await rate(10)
        grown = rss(running) - memory
        closed = []
        for reader, _ in dripping:
            with contextlib.suppress(ConnectionError):  # closed while we were still sending
                async with asyncio.timeout(60):
                    await reader.read()
            closed.append(1)
        for task in tasks:
            task.cancel()
        for _, writer in [*unread, *dripping]:
            writer.transport.abort()  # type: ignore[attr-defined]
        return {
            "tokens_per_s_alone": calm,
            "tokens_per_s_beside": beside,
            "dawdlers_closed": len(closed),
            "health_ms_p99": percentile(health, 0.99) * 1e3,
            "memory_per_socket_mib": grown / 200 / 2**20,
        }

    found = asyncio.run(main())
    print(json.dumps(found, indent=2))
    assert found["dawdlers_closed"] == 100 and found["memory_per_socket_mib"] <= 1
    assert found["tokens_per_s_beside"] >= 0.9 * found["tokens_per_s_alone"] and found["health_ms_p99"] <= 200


def test_bodies_and_heads_over_their_ceilings(launch: Launch) -> None:
    limit = 4 << 20
    running = launch("--log-level", "warning", "--max-body-bytes", str(limit))
    json_type = b"content-type: application/json\r\n"
    start = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + json_type
    cases = {
        "announced": start + b"content-length: 99999999\r\n\r\n",
        "gzip": start + b"content-encoding: gzip\r\ncontent-length: 10\r\n\r\n" + b"\x1f\x8b" * 5,
        "head of 1 MiB": start + b"x-long: " + b"a" * (1 << 20) + b"\r\n\r\n",
        "10,000 lines": start + b"".join(b"x-%d: y\r\n" % i for i in range(10_000)) + b"\r\n",
    }

    async def until_closed(reader: asyncio.StreamReader) -> bytes:
        data = b""
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                data += part
        return data

    async def pieces(size: int) -> tuple[float, float, int]:
        """A body in pieces that goes over the ceiling; -> MB a second up to there, ms from its last piece to the
        answer, the status. The last one is sent when all before it have been read: the server's count is at its
        ceiling then, not the network's."""
        reader, writer = await connect(running)
        writer.transport.set_write_buffer_limits(0)
        writer.write(start + b"transfer-encoding: chunked\r\n\r\n")
        piece = b"%x\r\n" % size + b"x" * size + b"\r\n"
        many = max(1, 60_000 // size)
        began = time.monotonic()
        for _ in range(limit // (size * many)):
            writer.write(piece * many)
            await writer.drain()
        writer.write(piece * (limit % (size * many) // size))
        await writer.drain()
        while unread(writer, running):
            await asyncio.sleep(0.001)
        speed = limit / 1e6 / (time.monotonic() - began)
        await asyncio.sleep(0.3)  # what was taken from the socket last is parsed
        began = time.monotonic()
        writer.write(piece)
        data = await until_closed(reader)
        writer.close()
        return speed, (time.monotonic() - began) * 1e3, int(data.split()[1]) if data else 0

    async def main() -> dict[str, Any]:
        before = rss(running)
        found: dict[str, Any] = {}
        for name, data in cases.items():
            waits = []
            for _ in range(20):
                reader, writer = await connect(running)
                writer.write(data)
                began = time.monotonic()
                answer = await until_closed(reader)
                waits.append((time.monotonic() - began) * 1e3)
                assert not answer or answer.split()[1] in (b"413", b"415", b"431"), answer[:100]
                writer.close()
            found[f"{name}: closed after ms, p50"] = round(statistics.median(waits), 1)
        statuses = []
        for size in (65536, 6):
            made = [await pieces(size) for _ in range(5)]
            found[f"pieces of {size} bytes: read, MB/s"] = round(statistics.median(speed for speed, _, _ in made), 1)
            found[f"pieces of {size} bytes: answered after ms, most"] = round(max(wait for _, wait, _ in made), 1)
            statuses += [status for _, _, status in made]
        found["statuses"] = statuses
        found["rss_growth_mib"] = (rss(running) - before) / 2**20
        return found

    found = asyncio.run(main())
    print(json.dumps(found, indent=2))
    assert all(value <= 100 for name, value in found.items() if "ms" in name), found
    assert set(found["statuses"]) <= {413, 0} and found["rss_growth_mib"] <= limit / 2**20 + 10
    assert running.post(PATH, {"prompt": "x", "max_tokens": 1}).status_code == 200
