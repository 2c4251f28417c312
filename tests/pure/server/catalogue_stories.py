"""Random stories of a catalogue: requests, loads, removals, sleep and deaths at every moment, on a clock that jumps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

from tests.pure.server.jumping_clock import run_on_jumping_clock
from tokenmill.core.config import make_config
from tokenmill.core.errors import EngineLostError, UserError
from tokenmill.core.sleeping import TAGS
from tokenmill.server.many_models import catalogue as catalogue_module
from tokenmill.server.many_models import entry as entry_module
from tokenmill.server.many_models.catalogue import Bounds, Catalogue
from tokenmill.server.many_models.entry import Entry, GoneError, Spec, UnreadyError

SIZE = 10
END_S = 10_000.0
"""Nothing in a story takes that long: what has not ended by then never will."""


class StoryUnit:
    """A model whose engines may die for good at any moment."""

    def __init__(self, story: Story, entry: Entry[StoryUnit]) -> None:
        self.story, self.entry = story, entry
        self.closed = self.dead = False
        self.asleep: set[str] = set()
        self.open = 0
        self.turn = asyncio.Lock()

    def open_requests(self) -> int:
        return self.open

    def held_bytes(self) -> int:
        return SIZE

    def kept_bytes(self) -> int:
        return len(self.asleep)

    def die(self) -> None:
        self.dead = True
        self.story.models.broken(self.entry, "its engines died too often")

    async def sleep(self, level: int) -> None:
        async with self.turn:
            await self._work()
            self.asleep = set(TAGS)

    async def wake(self, tags: Sequence[str]) -> list[str]:
        async with self.turn:
            await self._work()
            self.asleep -= set(tags)
        return sorted(self.asleep)

    async def abort_all(self) -> None:
        """Requests end soon by themselves."""

    async def close(self) -> None:
        await self.story.pause()
        self.closed = True

    async def _work(self) -> None:
        await self.story.pause()
        chance = self.story.dice.random()
        if not (self.dead or self.closed) and chance < 0.1:
            self.die()
        if self.dead or self.closed:
            raise EngineLostError("it is gone")
        if chance < 0.2:
            raise UserError("it cannot now")


class Story:
    """One random run."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.units: list[StoryUnit] = []
        self.names = "abcde"[: self.dice.randint(2, 5)]
        memory = self.dice.choice([1, 2, 3]) * SIZE
        patience, queue = self.dice.choice([0.0, 0.1, 2.0]), self.dice.choice([2, 100])
        self.models: Catalogue[StoryUnit] = Catalogue(self.make, Bounds(memory, queue, patience, sleep_memory=4))
        self.memory = memory
        for name in self.names:
            self.models.add(self.spec(name))
        self.models.started = True

    def spec(self, name: str) -> Spec:
        dice = self.dice
        return Spec(
            make_config({}, model=name, enable_sleep_mode=dice.random() < 0.5),
            ttl=dice.choice([0.0, 0.2, 60.0]),
            alone=dice.random() < 0.1,
            groups=frozenset(["g"] if dice.random() < 0.2 else []),
            memory=SIZE,
        )

    async def pause(self) -> None:
        for _ in range(self.dice.randint(0, 3)):
            await asyncio.sleep(self.dice.choice([0, 0, 0.03, 0.4]))

    async def make(self, entry: Entry[StoryUnit]) -> StoryUnit:
        unit = StoryUnit(self, entry)
        await self.pause()
        chance = self.dice.random()
        if chance < 0.05:
            raise UserError("its files are missing")
        if chance < 0.1:
            raise EngineLostError("killed by signal 9")
        if chance < 0.15:
            unit.die()  # it had loaded; what it shares with others was still being made
        self.units.append(unit)
        return unit

    async def ask(self) -> None:
        """One request."""
        entry = self.models.find(self.dice.choice(self.names))
        if entry is None:
            return
        try:
            unit = await self.models.enter(entry)
        except (UnreadyError, GoneError):
            return
        assert not unit.dead, "a request got a model whose engines are gone"
        assert not unit.closed and not unit.asleep, "a request got a model that is not there"
        unit.open += 1
        if self.dice.random() < 0.6:
            self.models.keep(entry, self.dice.choice([0.0, -1.0, 0.3]))
        try:
            await self.pause()
            assert unit.dead or not unit.closed, "closed under an open request"
        finally:
            unit.open -= 1
            self.models.leave(entry)

    async def order(self) -> None:
        """One deed of a person, or of fate."""
        name = self.dice.choice(self.names)
        entry = self.models.find(name)
        if entry is None:
            self.models.add(self.spec(name))
            return
        unit, what = (
            entry.unit,
            self.dice.choice(["remove", "unload", "unload", "sleep", "sleep", "wake", "die", "keep"]),
        )
        try:
            if what == "remove":
                await self.models.remove(name)
                assert entry.unit is None, f"it was removed, and is {entry.state}"
            elif what == "unload":
                await self.models.unload(entry)
                assert unit is None or unit.closed, f"it was unloaded, and is {entry.state}"
            elif what == "sleep" and entry.spec.sleeps:
                await self.models.sleepers.sleep(entry, self.dice.choice([1, 2]))
            elif what == "wake":
                await self.models.sleepers.wake(entry, self.dice.choice([TAGS, TAGS[:1], TAGS[1:]]))
            elif what == "die" and unit is not None and not unit.dead and not unit.closed:
                unit.die()
            elif what == "keep":
                self.models.keep(entry, self.dice.choice([0.0, -1.0, 0.3]))
        except (UnreadyError, GoneError, UserError, EngineLostError):
            pass  # who asked hears why

    async def tell(self) -> None:
        """All of it, and what must hold at every moment and at the end."""
        tasks: list[asyncio.Task[None]] = []
        for _ in range(self.dice.randint(10, 60)):
            asks = self.dice.random() < 0.7
            what: Coroutine[Any, Any, None] = self.ask() if asks else self.order()
            tasks.append(asyncio.ensure_future(what))
            if asks and self.dice.random() < 0.1:
                asyncio.get_running_loop().call_later(self.dice.choice([0.0, 0.05, 1.0]), tasks[-1].cancel)
            if self.dice.random() < 0.7:
                await asyncio.sleep(self.dice.choice([0, 0, 0.02, 0.3]))
            awake = [unit for unit in self.units if not unit.closed and len(unit.asleep) < len(TAGS) and not unit.dead]
            assert len(awake) * SIZE <= self.memory, "more models are awake than fit"
        done, waiting = await asyncio.wait(tasks, timeout=END_S)
        assert not waiting, "somebody waits for ever"
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        entries = list(self.models.entries.values())
        assert not any(entry.life.open or entry.life.waiting for entry in entries)
        await asyncio.sleep(END_S)
        mine = [entry.unit for entry in entries]
        assert all(unit in mine for unit in self.units if not unit.closed), "a model lives on, and nobody has it"
        assert not any(unit.dead for unit in mine if unit is not None), "a dead model counts as loaded"
        assert all(entry.reserved == entry.awake for entry in entries)
        await self.models.close()
        assert all(unit.closed for unit in self.units)


def tell_story(seed: int, patch: Any) -> None:
    """One story. patch: pytest's monkeypatch."""

    async def tell() -> None:
        await Story(seed).tell()

    run_on_jumping_clock(tell(), patch, catalogue_module, entry_module)
