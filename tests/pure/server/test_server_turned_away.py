"""A full server refuses at the door, before a task is made: with the same answer as one that has begun to look."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.pure.server.listening import Listening, answer, message
from tests.pure.server.server_connections_helpers import closed, rest
from tokenmill.server.gate import GateLimits
from tokenmill.testing.hostile import VALID

HEADERS = {"origin": "http://localhost", "x-request-id": "mine", "anthropic-version": "2023-06-01"}


async def full(listen: Any, **flags: Any) -> Listening:
    server: Listening = await listen(**flags)
    server.served.context.gate.limits = GateLimits(capacity=0)
    return server


async def ask(server: Listening, path: str, extra: dict[str, str]) -> tuple[str, dict[str, str], bytes]:
    reader, writer = await server.connect()
    lines = "".join(f"{name}: {value}\r\n" for name, value in extra.items())
    sent = message({"model": "fake"}, path)
    if "host" in extra:
        sent = sent.replace(b"host: localhost\r\n", b"")
    lines += "" if extra.get("authorization") == "Bearer k" and "host" not in extra else "connection: close\r\n"
    writer.write(sent.replace(b"\r\n\r\n", b"\r\n" + lines.encode() + b"\r\n", 1))
    head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
    writer.close()
    status, *named = head.decode().split("\r\n")
    return status, dict(sorted(line.lower().split(": ", 1) for line in named)), body


@pytest.mark.parametrize("extra", [{}, HEADERS, {"authorization": "Bearer no"}, {"host": "evil.com"}], ids=str)
async def test_the_answer_is_the_same_as_with_a_task(listen: Any, monkeypatch: pytest.MonkeyPatch, extra: Any) -> None:
    server = await full(listen, api_key=["k"])
    extra = {"authorization": "Bearer k", **extra}
    generating = sorted(server.served.app.generating)
    assert len(generating) > 20 and set(generating) & set(VALID)
    expected = "403" if "host" in extra else "401" if extra["authorization"] != "Bearer k" else "503"
    for path in generating:
        quick = await ask(server, path, extra)
        monkeypatch.setattr(type(server.served.app), "is_shut", lambda guard, scope: False)
        slow = await ask(server, path, extra)
        monkeypatch.undo()
        for found in (quick, slow):
            assert found[0].split(" ", 2)[1] == expected
            assert found[1].pop("x-request-id") and found[1].pop("content-length") == str(len(found[2]))
            found[1].pop("connection", None)
        if "x-request-id" in extra:
            assert quick == slow
        else:  # Anthropic's body names the request
            assert quick[:2] == slow[:2] and abs(len(quick[2]) - len(slow[2])) <= 8
    metrics = (await server.served.client.get("/metrics", headers={"authorization": "Bearer k"})).text
    kind = expected[0] + "xx"
    counted = f'http_requests_total{{handler="/v1/completions",method="POST",status="{kind}"}} 2.0'
    assert counted in metrics
    await closed(server)


async def test_nothing_else_is_turned_away(listen: Any) -> None:
    server = await full(listen)
    reader, writer = await server.connect()
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await answer(reader))[0] == 200
    writer.write(message({"prompt": "a"}, "/tokenize"))  # on the same connection
    assert (await answer(reader))[0] == 200
    writer.write(message({"prompt": "a"}))
    assert (await answer(reader))[0] == 503 and not await rest(reader)
    writer.close()
    await closed(server)


async def test_a_body_that_comes_late_is_not_waited_for(listen: Any) -> None:
    server = await full(listen)
    whole = message({"prompt": "a" * 100_000})
    for first in (whole.index(b"\r\n\r\n") + 4, 20_000):
        reader, writer = await server.connect()
        writer.write(whole[:first])
        assert (await answer(reader))[0] == 503
        writer.write(whole[first:])  # the connection still takes it, and then ends
        assert not await rest(reader)
        writer.close()
    await closed(server)


async def test_requests_behind_others_are_turned_away_in_turn(listen: Any) -> None:
    server = await listen()
    server.served.context.gate.limits = GateLimits(capacity=1)
    reader, writer = await server.connect()
    writer.write(message({"prompt": "a", "max_tokens": 2}) * 2 + message({"prompt": "a", "stream": True}))
    statuses = [(await answer(reader))[0] for _ in range(2)]
    assert statuses == [200, 200]  # each comes in when the one ahead of it has left
    async with asyncio.timeout(60):
        assert b"[DONE]" in await reader.readuntil(b"[DONE]")
    server.served.context.gate.open = 1
    writer.write(message({"prompt": "a"}) * 3)
    assert (await rest(reader)).count(b"HTTP/1.1 503") == 1  # after which it closes
    server.served.context.gate.open = 0
    writer.close()
    await closed(server)


async def test_a_place_that_became_free_is_given(listen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await listen()
    monkeypatch.setattr(type(server.served.app), "is_shut", lambda guard, scope: True)
    for _ in range(3):
        reader, _writer = await server.ask({"prompt": "a", "max_tokens": 2})
        assert (await answer(reader))[0] == 200
        _writer.close()
    await closed(server)
