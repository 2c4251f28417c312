"""What clients are told that still wait when the server ends: an error of their API, never a bare 500 or silence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from tests.pure.server.conftest import Starter, until
from tests.pure.server.listening import Listening, answer, message
from tests.pure.server.server_many_helpers import build as build
from tokenmill.core.config import make_server_config
from tokenmill.core.errors import SHUTTING_DOWN
from tokenmill.server import model_lookup
from tokenmill.server.listener import HttpServer
from tokenmill.server.run import _bind
from tokenmill.server.websockets.frames import GOING_AWAY
from tokenmill.testing.fake_generator import FakeOptions
from tokenmill.testing.hostile import VALID, path_of

Opened = tuple[Listening, HttpServer]
UNSENT = b"content-length: 100\r\n\r\n{"


@pytest.fixture
async def opened(start: Starter) -> Callable[..., Awaitable[Opened]]:
    """A server that the test ends itself."""

    async def open_server(**options: Any) -> Opened:
        fake = FakeOptions(**options)
        served = await start(fake)
        config = make_server_config({}, port=0)
        sock = _bind(config)
        server = HttpServer(served.app, config, sock)
        await server.start()
        return Listening(served, sock.getsockname()[1], fake, server.server.server_state.connections), server

    return open_server


async def test_a_body_that_never_ends_is_refused_in_its_api_s_words(opened: Any) -> None:
    """uvicorn answered these with `500 Internal Server Error` in plain text."""
    listening, server = await opened()
    clients = {}
    for path in [
        path for path in VALID if "blobs" not in path
    ]:  # files are read by their handler, which refuses them here
        reader, writer = await listening.connect()
        writer.write(b"POST %s HTTP/1.1\r\nhost: localhost\r\n" % path_of(path).encode() + UNSENT)
        clients[path] = (reader, writer)
    load = server.guard.load
    await until(lambda: load.open == len(clients))
    await server.stop()
    shapes = set()
    for path, (reader, writer) in clients.items():
        status, body = await answer(reader)
        said = json.loads(body)
        shapes.add(tuple(sorted(said)))
        assert (status, "shutting down" in str(said["error"])) == (503, True), path
        writer.close()
    assert len(shapes) > 1  # each API has its own words


async def test_an_answer_that_has_not_begun_is_refused(opened: Any) -> None:
    listening, server = await opened(step_s=60.0)
    body = {"prompt": "abc", "max_tokens": 5}
    whole, writer = await listening.connect()
    writer.write(message(body))
    await until(lambda: listening.served.context.gate.open == 1)
    await server.stop()
    status, said = await answer(whole)
    assert status == 503 and json.loads(said)["error"]["message"] == "The server is shutting down."
    writer.close()


STREAMS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/generate", "/api/chat"]
STREAMS += ["/generate_stream", "/completion", "/infill", "/v2/models/{model}/generate_stream"]


@pytest.mark.parametrize("engines_first", [False, True])
async def test_every_stream_that_is_cut_says_why(opened: Any, engines_first: bool) -> None:
    """Whether its handler is cancelled, or its engine ends the request, as the end of a server does it."""
    listening, server = await opened(step_s=60.0)
    clients = {}
    for path in STREAMS:
        asked = {} if "generate_stream" in path else {"stream": True}
        clients[path] = await listening.ask({**VALID[path][0], **asked}, path_of(path))
    await until(lambda: listening.served.context.gate.open == len(clients))
    for reader, _ in clients.values():
        await reader.readuntil(b"\r\n\r\n")
    if engines_first:
        listening.served.context.backend.end_all(SHUTTING_DOWN)
    await server.stop()
    for path, (reader, writer) in clients.items():
        said = await reader.read()
        assert b"The server is shutting down." in said and said.endswith(b"0\r\n\r\n"), (path, said)
        writer.close()


async def test_a_stream_that_waits_for_its_model_says_why_it_ends(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_lookup, "FIRST_COMMENT_S", 0.0)
    city = build(held_up=True)
    config = make_server_config({}, port=0)
    sock = _bind(config)
    server = HttpServer(city.app, config, sock)
    await server.start()
    clients = {}
    for path in (each for each in STREAMS if not each.startswith("/api")):  # (Ollama's lines have no comments)
        reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
        asked = {} if "generate_stream" in path else {"stream": True}
        writer.write(message({**VALID[path][0], "model": "red", **asked}, path.replace("{model}", "red")))
        assert (await reader.readuntil(b": loading\n\n")).startswith(b"HTTP/1.1 200")
        clients[path] = (reader, writer)
    await server.stop()
    for path, (reader, writer) in clients.items():
        said = await reader.read()
        assert b"The server is shutting down." in said and said.endswith(b"0\r\n\r\n"), (path, said)
        writer.close()


async def test_a_websocket_is_closed_and_not_dropped(opened: Any) -> None:
    listening, server = await opened()
    address = f"ws://127.0.0.1:{listening.port}/v1/responses"
    async with aiohttp.ClientSession() as session, session.ws_connect(address, autoping=False) as socket:
        await socket.send_json({"type": "response.create", "model": "fake", "input": "Hi", "max_output_tokens": 8})
        assert (await socket.receive()).type is aiohttp.WSMsgType.TEXT
        ending = asyncio.ensure_future(server.stop())
        async with asyncio.timeout(60):
            while (await socket.receive()).type is aiohttp.WSMsgType.TEXT:
                pass
        assert socket.close_code == GOING_AWAY
        await ending
