"""Who has said all gets an answer; who is gone is noticed all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.pure.server.conftest import until
from tests.pure.server.listening import message
from tests.pure.server.server_connections_helpers import closed, rest
from tokenmill.server.half_closed import INTERIM, WAITS_S, HalfClosed
from tokenmill.testing.fake_generator import FakeOptions

ASK = {"prompt": "abc", "max_tokens": 20}
ENDLESS = {"prompt": "abc", "max_tokens": 1_000_000}
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
OLD = (b"HTTP/1.1\r\n", b"HTTP/1.0\r\n")


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (HEALTH, 1),
        (HEALTH.replace(*OLD), 1),
        (message(ASK), 1),
        (message(ASK).replace(*OLD), 1),
        (message({**ASK, "stream": True}), 1),
        (message(ASK) + HEALTH + message({**ASK, "stream": True}), 3),
    ],
    ids=["a probe", "an old probe", "a whole answer", "an old client's", "a stream", "several"],
)
async def test_who_sends_no_more_is_answered(listen: Any, sent: bytes, answers: int) -> None:
    server = await listen(FakeOptions(step_s=0.005))
    reader, writer = await server.connect()
    writer.write(sent)
    writer.write_eof()
    said = (await rest(reader)).replace(INTERIM, b"")
    assert said.count(b"HTTP/1.1 200") == answers == said.count(b"HTTP/1.")
    assert (b"[DONE]" in said) is (b"stream" in sent) and said.count(b'"finish_reason":"length"') == sent.count(b"abc")
    await closed(server)


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
TAILS = {
    "a head": b"POST /v1/comp",
    "headers": message(ASK).partition(b"\r\n\r\n")[0],
    "a body": message(ASK)[:-1],
    "chunks": CHUNKED + b"5\r\nab",
    "no HTTP": b"\x16\x03\x01\r\n\r\n",
    "no chunk": CHUNKED + b"x\r\n",
    "a long head": HEALTH[:-2] + b"a: " + b"b" * 100_000,
    "a long body": message({"prompt": "a" * (2 << 20)})[:-1],
    "too many": HEALTH * 40 + b"GET /",
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("eof", [True, False])
async def test_what_is_not_whole_takes_no_answer_from_those_before(
    listen: Any, tail: bytes, count: int, eof: bool
) -> None:
    """The connection ends after the last of them: at once when the client has ended its half, otherwise when what
    follows has been refused or is late."""
    server = await listen(FakeOptions(step_s=0.005), max_body_bytes=1 << 18, read_timeout=0.5)
    reader, writer = await server.connect()
    writer.write(message({**ASK, "stream": True}) * count + tail)
    if eof:
        writer.write_eof()
    said = await rest(reader)
    assert said.count(b"[DONE]") == count == said.count(b'"finish_reason":"length"')
    writer.close()  # nothing more comes, and a server lingers for those that have not heard that
    await closed(server)


async def test_who_is_not_read_is_not_late(listen: Any) -> None:
    """While an answer is made, nothing is read of what follows, for longer than a client may take for its body."""
    server = await listen(FakeOptions(step_s=0.1), read_timeout=0.2)
    reader, writer = await server.connect()
    body = message({"prompt": "a" * 2_000_000})  # more than the system's buffers hold
    body = body.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
    writer.write(message({**ASK, "stream": True}) + body[:100_000])
    await reader.readuntil(b"data: ")
    writer.write(body[100_000:])
    said = await rest(reader)
    assert b"[DONE]" in said and b"HTTP/1.1 400" in said and b" 408 " not in said
    await closed(server)


async def test_what_was_answered_before_the_end_is_not_lost(listen: Any) -> None:
    server = await listen(FakeOptions(step_s=0.005))
    reader, writer = await server.ask({**ASK, "max_tokens": 200, "stream": True})
    begun = await reader.readuntil(b"data: ")
    writer.write_eof()
    said = begun + await rest(reader)
    assert INTERIM not in said and b"[DONE]" in said
    await closed(server)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("old", [False, True])
async def test_who_is_gone_is_noticed(listen: Any, stream: bool, old: bool) -> None:
    """The answer would never end."""
    server = await listen(FakeOptions(step_s=0.005, max_model_len=1 << 22))
    reader, writer = await server.connect()
    sent = message({**ENDLESS, "stream": stream})
    writer.write(sent.replace(*OLD) if old else sent)
    if stream:
        await reader.readuntil(b"data: ")
    else:
        await until(lambda: bool(server.served.fake.link().works))
    writer.close()
    await closed(server)


async def test_half_a_request_is_not_waited_for(listen: Any) -> None:
    server = await listen(read_timeout=300.0)
    for sent in (b"", b"POST /v1/comp", message(ASK)[:-1], message(ASK) + message(ASK)[:-1]):
        reader, writer = await server.connect()
        writer.write(sent)
        writer.write_eof()
        assert json.dumps(ASK)[1:-1].encode() not in await rest(reader)
        await closed(server)


class Out:
    """What is written, and whether it has ended."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.ended = False

    def write(self, data: bytes) -> None:
        self.said.append(data)

    def close(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.ended


@pytest.mark.parametrize("hears", [True, False])
def test_questions_are_few(hears: bool) -> None:
    out, waited = Out(), []

    def later(seconds: float, call: Any, *given: Any) -> None:
        waited.append(seconds)
        call(*given)

    HalfClosed(out, lambda: True, hears=hears).watch(later)
    assert waited == list(WAITS_S)
    assert (len(out.said), out.ended) == ((1 + len(WAITS_S), False) if hears else (0, True))
    HalfClosed(out := Out(), lambda: False, hears=hears).watch(later)
    assert not out.said and not out.ended
