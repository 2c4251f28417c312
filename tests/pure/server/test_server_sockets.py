"""Rows 2, 3, 4 and 14 over real sockets: clients that leave, dawdle, stop reading, or send monstrous heads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import socket
import struct
from typing import Any

import pytest

from tests.pure.server.conftest import until
from tests.pure.server.listening import answer, message
from tokenmill.server.protocol import BoundedProtocol
from tokenmill.server.transport import CountedTransport
from tokenmill.testing.fake_generator import FakeOptions


async def test_a_client_that_leaves_ends_its_request(listen: Any) -> None:
    server = await listen()
    for stream in (True, False):
        for _ in range(20):
            reader, writer = await server.ask({"prompt": "abc", "max_tokens": 4000, "stream": stream})
            if stream:
                await reader.readuntil(b"data: ")
            else:
                await asyncio.sleep(0.02)
            steps = server.served.fake.link().steps
            writer.transport.abort()
            await server.idle(30)
            assert server.served.fake.link().steps - steps <= 5


async def test_small_writes_leave_at_once(listen: Any) -> None:
    """Otherwise each token of a stream, and each body after its head, waits for the client's acknowledgement."""
    listening = await listen()
    _, writer = await listening.ask({"prompt": "abc", "max_tokens": 1})
    await until(lambda: listening.connections)
    (connection,) = listening.connections
    taken = connection.transport.get_extra_info("socket")
    assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    writer.close()


async def test_a_connection_goes_without_the_collector(listen: Any) -> None:
    """What refers back to itself stays until somebody collects cycles: after a burst that is its memory."""
    server = await listen()

    async def visit(end: str) -> None:
        reader, writer = await server.connect()
        if end != "silent":
            writer.write(
                message({"prompt": "abc", "max_tokens": 2, "stream": end == "stream"})[: 40 if end == "cut" else None]
            )
        if end in ("plain", "stream", "reset"):
            await answer(reader)
        if end == "reset":  # an end by an error
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    ends = ("plain", "stream", "cut", "silent", "reset")
    for end in ends:
        await visit(end)
    await server.idle(30)
    while server.connections:
        await asyncio.sleep(0.01)
    gc.collect()
    gc.disable()
    try:
        for end in ends * 3:
            await visit(end)
        await server.idle(30)
        while server.connections:
            await asyncio.sleep(0.01)
        for _ in range(50):  # turns of the loop: handlers hear of the end
            await asyncio.sleep(0)
        left = [one for one in gc.get_objects() if issubclass(type(one), BoundedProtocol | CountedTransport)]
        assert not left, "connections that have ended"
    finally:
        gc.enable()


async def test_random_disconnects_leave_nothing(listen: Any) -> None:
    server = await listen(FakeOptions(step_s=0.001, max_rows=8))
    random.seed(3)

    async def visit(i: int) -> None:
        body = {
            "prompt": "abc",
            "max_tokens": 300,
            "stream": i % 3 > 0,
            "n": random.choice([1, 1, 4]),
            "temperature": 1,
        }
        data = message(body)
        _reader, writer = await server.connect()
        cut = random.choice([5, len(data) // 2, len(data), len(data), len(data)])
        writer.write(data[:cut])
        await asyncio.sleep(random.random() * 0.1)
        if random.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    for _ in range(6):
        await asyncio.gather(*(visit(i) for i in range(50)))
    await server.idle(60)
    reader, _ = await server.ask({"prompt": "abc", "max_tokens": 2})
    assert (await answer(reader))[0] == 200


async def test_a_reader_that_stops_is_dropped_and_others_go_on(listen: Any) -> None:
    server = await listen(FakeOptions(step_s=0.0, max_model_len=1 << 20), write_timeout=0.5)
    body = {"prompt": "abc", "max_tokens": 1_000_000, "stream": True}
    _reader, writer = await server.ask(body)
    writer.transport.pause_reading()
    reader2, _ = await server.ask({"prompt": "abc", "max_tokens": 200, "stream": True})
    assert b"[DONE]" in await asyncio.wait_for(reader2.readuntil(b"[DONE]"), 60)
    await server.idle(60)
    writer.transport.abort()


async def test_dawdling_senders_are_cut_off(listen: Any) -> None:
    server = await listen(read_timeout=0.3)
    reader, writer = await server.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
    assert (await answer(reader))[0] == 408
    reader, writer = await server.connect()
    writer.write(message({"prompt": "abc"})[:-3])
    assert (await answer(reader))[0] == 408
    reader, writer = await server.connect()
    assert await asyncio.wait_for(reader.read(), 60) == b""  # said nothing at all


@pytest.mark.parametrize(
    "head",
    [
        b"x-long: " + b"a" * (1 << 20) + b"\r\n",
        b"".join(b"x-%d: y\r\n" % i for i in range(10_000)),
        b"x" * (1 << 20) + b": y\r\n",
    ],
    ids=["one huge value", "ten thousand lines", "one huge name"],
)
async def test_monstrous_heads(listen: Any, head: bytes) -> None:
    server = await listen()
    reader, writer = await server.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + head)
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # cut off while we were still sending
        assert (await answer(reader))[0] == 431
    reader, _ = await server.ask({"prompt": "abc", "max_tokens": 2})
    assert (await answer(reader))[0] == 200


async def test_a_monstrous_path(listen: Any) -> None:
    server = await listen()
    reader, writer = await server.connect()
    writer.write(b"GET /" + b"a" * (1 << 18) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await answer(reader))[0] == 431


async def test_three_megabytes_in_tiny_chunks(listen: Any) -> None:
    server = await listen()
    reader, writer = await server.connect()
    data = json.dumps({"prompt": "abc", "max_tokens": 2, "ignored": "x" * 300_000}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    writer.write(b"".join(b"6\r\n" + data[i : i + 6] + b"\r\n" for i in range(0, len(data) // 6 * 6, 6)))
    rest = data[len(data) // 6 * 6 :]
    writer.write((b"%x\r\n" % len(rest) + rest + b"\r\n" if rest else b"") + b"0\r\n\r\n")
    assert (await answer(reader))[0] == 200


async def test_chunked_bodies_over_the_ceiling_are_cut_off(listen: Any) -> None:
    server = await listen(max_body_bytes=10_000)
    reader, writer = await server.connect()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n" + (b"400\r\n" + b"x" * 1024 + b"\r\n") * 12
    )
    status, body = await answer(reader)
    assert status == 413 and json.loads(body)["error"]["code"] == 413


@pytest.mark.parametrize(
    "raw", [b"NOT HTTP\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET  / HTTP/1.1\r\n\r\n"]
)
async def test_what_is_not_http(listen: Any, raw: bytes) -> None:
    server = await listen()
    reader, writer = await server.connect()
    writer.write(raw)
    writer.write_eof()
    data = await asyncio.wait_for(reader.read(), 60)
    assert data == b"" or data.split()[1][:1] == b"4", data


async def test_pipelined_requests_are_all_answered(listen: Any) -> None:
    server = await listen()
    reader, writer = await server.connect()
    writer.write(message({"prompt": "abc", "max_tokens": 3}) * 3)
    assert [(await answer(reader))[0] for _ in range(3)] == [200, 200, 200]


async def test_too_many_connections(listen: Any) -> None:
    server = await listen(max_connections=4)
    held = [await server.connect() for _ in range(6)]
    reader, _ = await server.ask({"prompt": "abc"})
    status, body = await answer(reader)
    assert status == 503 and json.loads(body)["error"]["code"] == 503
    for _, writer in held:
        writer.close()
    async with asyncio.timeout(60):
        while status == 503:
            reader, writer = await server.ask({"prompt": "abc", "max_tokens": 1})
            status, _ = await answer(reader)
            writer.close()
    assert status == 200
