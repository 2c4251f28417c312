"""Models that are seen loading, sleeping and going, for tests of the catalogue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.config import make_config
from tokenmill.core.errors import EngineLostError
from tokenmill.server.many_models.catalogue import Bounds, Catalogue
from tokenmill.server.many_models.entry import Entry, Spec


@dataclass
class Unit:
    name: str
    held: int = 0
    kill: Callable[[], None] = lambda: None
    background: int = 0
    closed: bool = False

    def open_requests(self) -> int:
        return self.background

    def held_bytes(self) -> int:
        return self.held

    def kept_bytes(self) -> int:
        return 0

    async def sleep(self, level: int) -> None:
        await asyncio.sleep(0)

    async def wake(self, tags: Sequence[str]) -> list[str]:
        await asyncio.sleep(0)
        self.kill()
        return []

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = True


@dataclass
class World:
    """Loads that are seen, held up and made to fail."""

    loads: list[str] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    kills: int = 0
    """Loads, and wakings, in which the engine is killed."""
    held: dict[str, int] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    units: list[Unit] = field(default_factory=list)

    async def make(self, entry: Entry[Unit]) -> Unit:
        self.loads.append(entry.name)
        await self.gate.wait()
        if entry.name in self.errors:
            raise self.errors[entry.name]
        self.kill()
        self.units.append(Unit(entry.name, self.held.get(entry.name, 0), self.kill))
        return self.units[-1]

    def kill(self) -> None:
        if self.kills:
            self.kills -= 1
            raise EngineLostError("killed by signal 9")

    def alive(self) -> list[str]:
        return [unit.name for unit in self.units if not unit.closed]


def spec(name: str, **more: Any) -> Spec:
    return Spec(make_config({}, model=name), **{"memory": 10, **more})


def catalogue(world: World, *specs: Spec, held_up: bool = False, **bounds: Any) -> Catalogue[Unit]:
    made = Catalogue(world.make, Bounds(**bounds))
    for each in specs:
        made.add(each)
    if not held_up:
        world.gate.set()
    return made
