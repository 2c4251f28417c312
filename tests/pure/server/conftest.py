"""A server over fake engines, spoken to through ASGI without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.kept_helpers import kept_helpers
from tokenmill.core.config import make_server_config
from tokenmill.server.app import make_app, make_context
from tokenmill.server.context import Context
from tokenmill.server.engines.state import FleetOptions
from tokenmill.server.listener import HttpServer
from tokenmill.server.openai.stored.kept_chats import KeptChat
from tokenmill.server.responses.conversation import Conversation
from tokenmill.server.run import _bind
from tokenmill.testing.fake_generator import FakeFleet, FakeOptions, fake_fleet
from tokenmill.testing.hostile import STANDING

__all__ = ["kept_helpers"]


@dataclass
class Served:
    """A running application with everything around it."""

    client: httpx.AsyncClient
    context: Context
    fake: FakeFleet
    options: FakeOptions
    app: Any

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)


def stand(context: Context) -> None:
    """What the names in paths stand for is there, and nothing else is kept."""
    store = context.store
    for kept in [kept for shelf in store.shelves.values() for kept in shelf.kept.values()]:
        store.drop(kept)
    talk, chat = Conversation("anonymous", STANDING["conversation_id"]), STANDING["completion_id"]
    talk.add([(STANDING["item_id"], b'{"type":"message","role":"user","content":"Hello"}')])
    for kept in (talk, KeptChat("anonymous", chat, "fake", b"[]", {}, b"{}")):
        store.add(kept)


class Starter:
    """Makes servers and ends them."""

    def __init__(self) -> None:
        self.open: list[Served] = []

    async def __call__(
        self, fake: FakeOptions | None = None, fleet: FleetOptions | None = None, **server: Any
    ) -> Served:
        options = fake or FakeOptions()
        made = await fake_fleet(options, fleet)
        context = make_context(made.fleet, make_server_config({}, **server))
        stand(context)
        app = make_app(context)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120)
        self.open.append(Served(client, context, made, options, app))
        return self.open[-1]

    async def close(self) -> None:
        for served in self.open:
            await served.client.aclose()
            served.context.text.close()
            served.context.bodies.close()
            await served.fake.fleet.close()


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for something to become true, however long a busy machine takes."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def kill(served: Served, tokens: int, engine: int = 0) -> None:
    """Let an engine's present life say so many tokens and die; its next life has begun."""
    link = served.fake.link(engine)
    await until(lambda: link.output_tokens >= tokens)
    link.die()
    await until(lambda: served.fake.link(engine) is not link or served.fake.fleet.broken)


@pytest.fixture
async def start() -> AsyncIterator[Starter]:
    """start(FakeOptions(...), FleetOptions(...), flag=value) -> Served."""
    starter = Starter()
    yield starter
    await starter.close()


@pytest.fixture
async def listen(start: Starter) -> AsyncIterator[Any]:
    made: list[HttpServer] = []

    async def listening(options: FakeOptions | None = None, **flags: Any) -> Any:
        from tests.pure.server.listening import Listening

        options = options or FakeOptions(step_s=0.002)
        served = await start(options, **flags)
        config = make_server_config({}, port=0, **flags)
        sock = _bind(config)
        server = HttpServer(served.app, config, sock)
        await server.start()
        made.append(server)
        return Listening(served, sock.getsockname()[1], options, server.server.server_state.connections)

    yield listening
    for server in made:
        await server.stop()
