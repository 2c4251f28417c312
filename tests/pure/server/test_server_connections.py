"""Connections that would never end: every read and write has a deadline and a ceiling, whoever asks or reads."""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any

import pytest

from tests.pure.server.conftest import until
from tests.pure.server.listening import answer, message
from tests.pure.server.server_connections_helpers import closed, rest
from tokenmill.core.config import make_server_config
from tokenmill.server import protocol
from tokenmill.server.listener import bounds_of
from tokenmill.server.transport import CountedTransport
from tokenmill.testing.fake_generator import FakeOptions

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"


async def flood(writer: asyncio.StreamWriter, piece: bytes, most: int) -> int:
    """Send until the server will not have it; -> how many bytes went out."""
    sent = 0
    try:
        while sent < most:
            writer.write(piece)
            sent += len(piece)
            await writer.drain()
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    return sent


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (POST + b"content-length: 1000\r\n\r\n{", b"401"),
        (CHUNKED + b"1\r\n{\r\n", b"401"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nx", b"200"),
        (b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nx", b"405"),
        (POST.replace(b"localhost", b"evil") + b"content-length: 1000\r\n\r\n{", b"403"),
    ],
    ids=["with a length", "in chunks", "a probe", "a probe of another method", "a foreign host"],
)
async def test_a_body_that_nobody_reads_does_not_hold_the_connection(listen: Any, head: bytes, status: bytes) -> None:
    server = await listen(api_key=["k"], read_timeout=300.0)
    reader, writer = await server.connect()
    writer.write(head)
    said = await rest(reader)
    assert said.split()[1] == status and b"connection: close" in said.lower()
    writer.close()
    await closed(server)


async def test_what_is_sent_after_a_refusal_is_bounded_and_the_refusal_is_heard(listen: Any) -> None:
    server = await listen(api_key=["k"], read_timeout=300.0)
    reader, writer = await server.connect()
    writer.write(POST + b"content-length: 16000000\r\n\r\n" + b"x" * 500_000)  # within what is discarded
    assert (await rest(reader)).split()[1] == b"401"
    reader, writer = await server.connect()
    writer.write(POST + b"content-length: 16000000\r\n\r\n")
    assert await flood(writer, b"x" * 65_536, 16_000_000) < 16_000_000
    await closed(server)


async def test_a_body_that_stops_is_told_so_in_time(listen: Any) -> None:
    server = await listen(read_timeout=0.3)
    for head in (POST + b"content-length: 1000\r\n\r\n{", CHUNKED + b"1\r\n{\r\n"):
        reader, writer = await server.connect()
        writer.write(head)
        assert (await answer(reader))[0] == 408
    await closed(server)


async def test_extensions_of_chunks_count(listen: Any) -> None:
    server = await listen()
    _, writer = await server.connect()
    writer.write(CHUNKED)
    assert await flood(writer, b"1;" + b"e" * 15_000 + b"\r\n \r\n", 8_000_000) < 8_000_000
    await closed(server)


async def test_trailers_count_and_are_no_headers(listen: Any) -> None:
    server = await listen(api_key=["k"])
    data = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    body = b"%x\r\n%s\r\n0\r\n" % (len(data), data)
    reader, writer = await server.connect()
    writer.write(CHUNKED + body + b"x-api-key: k\r\n\r\n")
    assert (await answer(reader))[0] == 401
    keyed = CHUNKED.replace(b"host:", b"x-api-key: k\r\nhost:")
    reader, writer = await server.connect()
    writer.write(keyed + body + b"x-more: 1\r\n\r\n")
    assert (await answer(reader))[0] == 200
    writer.close()
    reader, writer = await server.connect()
    writer.write(keyed + body)
    assert await flood(writer, b"x-trailer: " + b"y" * 4000 + b"\r\n", 8_000_000) < 8_000_000
    writer.close()
    await closed(server)


@pytest.mark.parametrize("coding", ["gzip, chunked", "x, chunked", "deflate ,CHUNKED", "chunked", "Chunked"])
async def test_codings_of_a_transfer_are_not_passed_over(listen: Any, coding: str) -> None:
    """What a body is coded with is undone or refused: it is not read as if it were plain."""
    server = await listen()
    data = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    reader, writer = await server.connect()
    head = CHUNKED.replace(b"transfer-encoding: chunked", b"transfer-encoding: " + coding.encode())
    assert (head == CHUNKED) is (coding == "chunked")
    writer.write(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
    assert (await answer(reader))[0] == (200 if coding.lower() == "chunked" else 415)
    writer.close()
    await closed(server)


async def test_pipelines_have_an_end(listen: Any) -> None:
    server = await listen(FakeOptions(step_s=0.01))
    reader, writer = await server.connect()
    writer.write(message({"prompt": "abc", "max_tokens": 20}) + (GET + b"\r\n") * 5000)
    said = await rest(reader)
    assert 1 <= said.count(b"HTTP/1.1 200") <= protocol.MAX_PIPELINED + 2
    await closed(server)


async def test_who_leaves_with_a_pipeline_leaves_nothing_behind(listen: Any) -> None:
    server = await listen(FakeOptions(step_s=0.01, max_model_len=1 << 20))
    for _ in range(3):
        reader, writer = await server.connect()
        long = message({"prompt": "abc", "max_tokens": 100_000, "stream": True})
        writer.write(long + message({"prompt": "abc", "max_tokens": 100_000}) * 2)
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        await closed(server)


async def test_blank_lines_are_no_way_to_stay(listen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.2)
    server = await listen(read_timeout=0.5)
    for first in (b"", GET + b"\r\n"):
        reader, writer = await server.connect()
        writer.write(first)
        if first:
            assert (await answer(reader))[0] == 200
        for _ in range(1000):
            if not server.connections:
                break
            writer.write(b"\r\n")
            await asyncio.sleep(0.02)
        assert not server.connections


async def test_plain_answers_that_nobody_reads_are_dropped(listen: Any) -> None:
    server = await listen(FakeOptions(max_model_len=1 << 22), write_timeout=0.5)
    reader, writer = await server.ask({"prompt": "a" * 2_000_000, "return_token_strs": True}, "/tokenize")
    writer.transport.pause_reading()
    await until(lambda: any(c.out.get_write_buffer_size() for c in server.connections))
    await closed(server)
    assert 'reason="slow_reader"' in (await server.served.client.get("/metrics")).text
    reader, writer = await server.ask({"prompt": "a" * 2_000_000, "return_token_strs": True}, "/tokenize")
    status, body = await answer(reader)  # somebody who reads gets all of it
    assert status == 200 and json.loads(body)["count"] == 2_000_000


async def test_probes_are_answered_when_all_connections_are_taken(listen: Any) -> None:
    server = await listen(max_connections=4, read_timeout=60.0)
    held = [await server.connect() for _ in range(6)]
    await until(lambda: len(server.connections) == 6)
    for path in (b"/health", b"/ready"):
        reader, writer = await server.connect()
        writer.write(b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % path)
        assert (await rest(reader)).split()[1] == b"200"
        writer.close()
    reader, writer = await server.ask({"prompt": "abc"})
    assert (await answer(reader))[0] == 503
    held += [await server.connect() for _ in range(protocol.RESERVE + 20)]
    reader, writer = await server.connect()
    assert (await rest(reader)).split()[1:2] in ([b"503"], [])  # at accept, before a word was said
    for _, each in held:
        each.transport.abort()


async def test_continue_is_said_to_whom_is_let_in(listen: Any) -> None:
    server = await listen(api_key=["k"])
    data = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    ask = POST + b"expect: 100-continue\r\ncontent-length: %d\r\n" % len(data)
    reader, writer = await server.connect()
    writer.write(ask + b"\r\n")
    said = await rest(reader)
    assert said.startswith(b"HTTP/1.1 401") and b"100 Continue" not in said
    reader, writer = await server.connect()
    writer.write(ask + b"x-api-key: k\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    writer.write(data)
    assert (await answer(reader))[0] == 200
    writer.close()
    await closed(server)


async def test_old_and_other_protocols(listen: Any) -> None:
    server = await listen()
    reader, writer = await server.connect()
    writer.write(b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n")
    assert (await rest(reader)).split()[1] == b"200"
    for streams in (False, True):
        body = b'{"model": "fake", "prompt": "x", "max_tokens": 3, "stream": ' + (b"true}" if streams else b"false}")
        head = POST.replace(b"1.1", b"1.0") + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body)
        reader, writer = await server.connect()
        writer.write(head + body)
        said, _, data = (await rest(reader)).partition(b"\r\n\r\n")
        assert said.split()[1] == b"200" and b"chunked" not in said and b"connection: close" in said
        assert data.startswith(b"data: ") and data.endswith(b"[DONE]\n\n") if streams else json.loads(data)
    for upgrade in (b"websocket", b"h2c", b"whatever"):
        reader, writer = await server.connect()
        writer.write(GET + b"connection: upgrade\r\nupgrade: " + upgrade + b"\r\n\r\n" + b"\x81\x05hello" * 100)
        assert (await rest(reader)).split()[1] == b"200"
        writer.close()
    await closed(server)


@pytest.mark.parametrize("size", [1, 50, 10_000])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
async def test_a_body_beside_an_upgrade_is_read(listen: Any, upgrade: bytes, chunked: bool, size: int) -> None:
    """Java's client asks for HTTP/2 with every request; the answer is an ordinary one."""
    server = await listen()
    body = json.dumps({"prompt": "abc", "max_tokens": 1}).encode()
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    if chunked:
        body = b"3\r\n" + body[:3] + b"\r\n%x\r\n" % (len(body) - 3) + body[3:] + b"\r\n0\r\n\r\n"
    data = POST + framing + b"\r\nconnection: upgrade, http2-settings\r\nupgrade: " + upgrade + b"\r\n\r\n" + body
    reader, writer = await server.connect()
    for start in range(0, len(data), size):
        writer.write(data[start : start + size])
        await asyncio.sleep(0)
    assert (await answer(reader))[0] == 200
    assert await rest(reader) == b""
    await closed(server)


async def test_a_head_without_its_body(listen: Any) -> None:
    """Balancers ask so whether a server is up; the connection goes on."""
    server = await listen()
    reader, writer = await server.connect()
    for path in (b"/health", b"/v1/models", b"/health"):
        writer.write(b"HEAD " + path + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] == b"200" and b"content-length: 0" not in head.lower()
    writer.write(b"HEAD /nope HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert (await rest(reader)).endswith(b"\r\n\r\n")
    await closed(server)


async def test_large_bodies_and_extra_line_ends_keep_the_connection(listen: Any) -> None:
    server = await listen()
    reader, writer = await server.connect()
    large = message({"prompt": "abc", "max_tokens": 1, "unknown": "x" * 2_000_000})
    for data in (large, large, message({"prompt": "abc", "max_tokens": 1}) + b"\r\n", large):
        writer.write(data)
        assert (await answer(reader))[0] == 200
    assert len(server.connections) == 1
    writer.close()
    await closed(server)


class Slow:
    """A transport whose reader takes what it is told to."""

    def __init__(self) -> None:
        self.waiting = 0

    def write(self, data: bytes) -> None:
        self.waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting


def test_a_slow_reader_is_no_reader_that_stopped() -> None:
    inner = Slow()
    out = CountedTransport(inner, lambda: None)
    assert not out.stalled(0.0, 60.0)  # nothing waits for it
    out.write(b"x" * 1_000_000)
    for minute in range(10):
        assert not out.stalled(60.0 * minute, 60.0)
        inner.waiting -= 5000
        out.write(b"y" * 6000)  # more comes than it takes: a stream that is quicker than its reader
    assert not out.stalled(600.0, 60.0)
    inner.waiting -= 100
    assert not out.stalled(650.0, 60.0) and out.stalled(661.0, 60.0)
    inner.waiting = 0
    assert not out.stalled(700.0, 60.0)


@pytest.mark.parametrize(("files", "most"), [((256, 256), 64), ((64, 64), 1), ((1 << 20, 1 << 20), 4096)])
def test_there_are_no_more_connections_than_files(
    monkeypatch: pytest.MonkeyPatch, files: tuple[int, int], most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: files)
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    assert bounds_of(make_server_config({})).connections == most
