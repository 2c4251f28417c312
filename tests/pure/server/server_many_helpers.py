"""What test_server_many.py and other tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tokenmill.core.config import ServerConfig, make_config, make_server_config
from tokenmill.server.access import Rights
from tokenmill.server.app import make_app, make_context, make_front, make_server_context
from tokenmill.server.context import Model, ServerContext
from tokenmill.server.engines.fleet import Fleet
from tokenmill.server.engines.state import FleetOptions
from tokenmill.server.many_models.catalogue import Bounds, Catalogue
from tokenmill.server.many_models.entry import Entry, Spec
from tokenmill.server.switch.loaded_model import Loaded
from tokenmill.testing.fake_generator import FakeLink, FakeOptions

SAYS = {"red": "I am red.", "green": "I am green.", "blue": "I am blue."}
LONG = {"red": 512, "green": 1024, "blue": 2048}


@dataclass
class City:
    """A server of three models, each of which says its own name."""

    client: httpx.AsyncClient
    shared: ServerContext
    app: Any
    links: dict[str, list[FakeLink]] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    errors: dict[str, Exception] = field(default_factory=dict)
    options: dict[str, FakeOptions] = field(default_factory=dict)

    def entry(self, name: str) -> Entry[Model]:
        return self.shared.models.entries[name]

    def loaded(self) -> list[str]:
        return [name for name, entry in self.shared.models.entries.items() if entry.unit is not None]

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def get(self, path: str, **headers: str) -> Any:
        return (await self.client.get(path, headers=headers)).json()


@pytest.fixture
async def build() -> AsyncIterator[Any]:
    made: list[City] = []

    def start(*, held_up: bool = False, memory: int | None = 20, patience_s: float = 30.0, pin: str = "",
              rights: dict[str, Rights] | None = None, ttl: float = 0.0,
              engine: dict[str, Any] | None = None, sleep_memory: int | None = None,
              **server: Any) -> City:  # fmt: skip
        config: ServerConfig = make_server_config({}, **server)
        city: City

        async def make(entry: Entry[Model]) -> Model:
            await city.gate.wait()
            if entry.name in city.errors:
                raise city.errors[entry.name]
            options = city.options.setdefault(entry.name, FakeOptions())
            options.script, options.max_model_len = SAYS.get(entry.name, "I am new."), LONG.get(entry.name, 512)

            def link(number: int, life: int) -> FakeLink:
                city.links.setdefault(entry.name, []).append(FakeLink(options))
                return city.links[entry.name][-1]

            fleet = Fleet(link, entry.spec.names, FleetOptions(watchdog_s=600))
            fleet.adapters.book = entry.book
            fleet.on_broken = lambda reason: city.shared.models.broken(entry, reason)
            await fleet.start()
            return Loaded(fleet, make_context(fleet, entry.spec.server, city.shared))

        bounds = Bounds(memory, patience_s=patience_s, sleep_memory=sleep_memory)
        models: Catalogue[Model] = Catalogue(make, bounds)
        for name in SAYS:
            own = make_config({}, model=f"/models/{name}", served_model_name=name, **(engine or {}))
            spec = Spec(own, config, (f"{name}-alias",), ttl=ttl, pin=name == pin, memory=10)
            models.add(spec)
        shared = make_server_context(config, models)
        shared.rights = rights or {}
        app = make_app(make_front(shared))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120)
        city = City(client, shared, app)
        if not held_up:
            city.gate.set()
        made.append(city)
        return city

    yield start
    for city in made:
        await city.client.aclose()
        await city.shared.models.close()
