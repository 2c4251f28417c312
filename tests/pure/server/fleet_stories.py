"""Random stories of a fleet: engines that die at every moment, requests that kill them, callers that leave, adapters
that come and go, loads that fail, and sleep, on a clock that jumps."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pure.server.jumping_clock import run_on_jumping_clock
from tokenmill.core.config import AdapterOptions
from tokenmill.core.errors import TokenmillError
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.running.wire import Adapt, Add, Failed, News, Report
from tokenmill.server.adapters import AdapterBook
from tokenmill.server.backend import DeltaStream
from tokenmill.server.engines import fleet as fleet_module
from tokenmill.server.engines import keeper as keeper_module
from tokenmill.server.engines import state as state_module
from tokenmill.server.engines.fleet import Fleet
from tokenmill.server.engines.state import FleetOptions
from tokenmill.testing.fake_generator import FakeLink, FakeOptions

POISON = 7
"""The first token of prompts that kill whatever engine works on them."""
STEP_S = 0.01
END_S = 1000.0
"""Nothing in a story takes that long: what has not ended by then never will."""
REST_S = 15.0
"""In this time an engine that could not be started is tried again."""
OPTIONS = FakeOptions(step_s=STEP_S, max_rows=8)


class StoryLink(FakeLink):
    """An engine that may fail to load, that dies of poison, and that must know the adapters of its requests."""

    def __init__(self, story: Story) -> None:
        super().__init__(OPTIONS)
        self.story, self.known, self.dead = story, set[int](), False

    async def _take_steps(self, on_news: Callable[[News], None]) -> None:
        dice = self.story.dice
        await asyncio.sleep(dice.choice([0.0, 0.05, 0.5]))
        chance = dice.random() if self.story.loaded else 1.0
        if chance < 0.1:
            on_news(Failed("there is no memory"))
        if chance < 0.2:
            self.die("it could not load")
            return
        await super()._take_steps(on_news)

    def _step(self) -> Report:
        for command in self.commands:
            if isinstance(command, Adapt):
                (self.known.discard if command.path is None else self.known.add)(command.number)
            if isinstance(command, Add) and command.request.adapter:
                assert command.request.adapter in self.known, "a request came for an adapter that is not here"
        report = super()._step()
        for work in list(self.works.values()):
            if work.request.prompt_ids[0] == POISON and sum(map(len, work.said)) >= work.request.prompt_ids[1]:
                self.die("poisoned")
                return Report()
        return report

    def die(self, reason: str = "signal 9") -> None:
        if not self.dead:
            self.dead = True
            super().die(reason)


class Story:
    """One random run."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.links: list[StoryLink] = []
        self.loaded = False
        options = FleetOptions(
            engines=dice.choice([1, 1, 2, 3]),
            watchdog_s=1e9,
            max_restarts_per_minute=10**6,
            fair=dice.random() < 0.4,
            hopeless_s=1e9,
        )
        self.fleet = Fleet(self.make, ("m",), options)
        self.fleet.adapters.book = AdapterBook(AdapterOptions(enable_lora=True), ("m",))
        self.excused: set[str] = set()
        """Requests that were on trial when an engine died of something else."""
        self.count = 0
        self.resting = False

    def make(self, number: int, life: int) -> Any:
        self.links.append(StoryLink(self))
        return self.links[-1]

    async def ask(self) -> None:
        """One request to its end, or until its caller leaves."""
        dice, fleet = self.dice, self.fleet
        while self.resting:
            await asyncio.sleep(0.1)
        self.count += 1
        poison = dice.random() < 0.08
        ids = [POISON, dice.randint(0, 20)] if poison else [dice.randint(8, 99) for _ in range(dice.randint(1, 40))]
        count, most = dice.choice([1, 1, 2]), dice.choice([1, 5, 40, 200])
        structured = {"choice": ["a"]} if dice.random() < 0.2 else None
        params = SamplingParams(n=count, max_tokens=most, structured_outputs=structured)
        name = f"r{self.count}"
        names = list(fleet.adapters.book.by_name.values())
        adapter = dice.choice(names).number if names and dice.random() < 0.4 else 0
        request = Request(id=name, prompt_ids=ids, params=params, seed=self.count, adapter=adapter)
        stream = DeltaStream(dice.choice(["a", "b", "c"]))
        said: list[list[int]] = [[] for _ in range(count)]
        ends: Counter[int] = Counter()
        errors: list[str] = []
        try:
            await fleet.open(request, stream)
            while sum(ends.values()) < count:
                for delta in await stream.batch():
                    assert not ends[delta.index], "a delta after the end"
                    said[delta.index] += delta.token_ids
                    ends[delta.index] += delta.finish_reason is not None
                    errors += [delta.error] if delta.error else []
        except TokenmillError as error:
            errors.append(str(error))
        except asyncio.CancelledError:
            fleet.abandon(name)
            raise
        link = self.links[-1]
        for index, tokens in enumerate(said):
            wanted = [link._token(request, index, place) for place in range(most)]
            assert tokens == (wanted[: len(tokens)] if errors else wanted), "a text is wrong"
        died = [error for error in errors if "died repeatedly" in error]
        if poison and sum(min(most, 1 + ids[1]) for _ in said) > ids[1] + count:
            assert errors, "a request that kills engines was answered"
        elif not poison and name not in self.excused:
            assert not died, "a request was given up that kills nobody"
            assert not errors or "unloaded" in errors[0], errors

    async def happen(self) -> None:
        """Something that no request asked for."""
        dice, fleet = self.dice, self.fleet
        what = dice.choice(["die", "die", "adapter", "drop", "sleep"])
        if what == "die":
            engine = dice.choice(fleet.engines)
            if engine.link is not None and not self.resting:
                current = fleet.trials.current
                if current is not None and engine.number == fleet.trials.engine:
                    self.excused.add(current.request.id)
                engine.link.die()  # type: ignore[attr-defined]
            return
        try:
            names = list(fleet.adapters.book.by_name)
            if what == "adapter":
                await fleet.adapters.load(dice.choice("xyz"), Path("/x"), instead=dice.random() < 0.5)
            elif what == "drop" and names:
                fleet.adapters.unload(dice.choice(names))
            elif what == "sleep" and not fleet.open_requests and not self.resting:
                await self.rest()
        except TokenmillError:
            pass  # who asked hears why

    async def rest(self) -> None:
        """The catalogue lets a fleet sleep that has no requests, and sends it none before it wakes."""
        self.resting = True
        early = self.dice.choice(self.fleet.engines).link
        if early is not None and self.dice.random() < 0.3:
            asyncio.get_running_loop().call_later(self.dice.choice([0.0, STEP_S]), early.die)  # type: ignore[attr-defined]
        try:
            await self.fleet.rest.sleep(1)
            assert not any(engine.ready and not engine.link.asleep for engine in self.fleet.engines)  # type: ignore
            await asyncio.sleep(self.dice.choice([0.0, 0.3]))
            dying = self.dice.choice(self.fleet.engines)
            if dying.link is not None and self.dice.random() < 0.3:
                dying.link.die()  # type: ignore[attr-defined]
                await asyncio.sleep(self.dice.choice([0.0, 0.3]))
        finally:
            while self.fleet.rest.asleep:
                try:
                    await self.fleet.rest.wake()
                except TokenmillError:
                    await asyncio.sleep(0.1)
            self.resting = False

    async def tell(self) -> None:
        dice, fleet = self.dice, self.fleet
        await fleet.start()
        self.loaded = True
        tasks: list[asyncio.Task[None]] = []
        for _ in range(dice.randint(5, 40)):
            asks = dice.random() < 0.75
            tasks.append(asyncio.ensure_future(self.ask() if asks else self.happen()))
            if asks and dice.random() < 0.1:
                asyncio.get_running_loop().call_later(dice.choice([0.0, 0.05, 0.5]), tasks[-1].cancel)
            await asyncio.sleep(dice.choice([0.0, 0.0, 0.03, 0.3]))
        done, waiting = await asyncio.wait(tasks, timeout=END_S)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        assert not waiting, "somebody waits for ever"
        for link in self.links:
            if link.task is not None and link.task.done() and not link.task.cancelled():
                assert (failure := link.task.exception()) is None, failure
        await asyncio.sleep(REST_S)
        assert all(engine.ready for engine in fleet.engines), "an engine is not there any more"
        assert not fleet.open_requests and not fleet.parked and not any(each.requests for each in fleet.engines)
        assert not fleet.queue.sent and not fleet.queue.num_waiting and not fleet.queue.by_owner
        assert fleet.trials.engine == -1 and fleet.trials.current is None and not fleet.trials.suspects
        assert not any(load.open or load.pending or load.blocks for load in fleet.picker.loads.values())
        assert not any(link.works for link in self.links), "an engine works for nobody"
        assert not fleet.deliveries.asked and not fleet.adapters.waiting and not fleet.adapters.book.coming
        await fleet.close()


def tell_story(seed: int, patch: Any) -> None:
    """One story. patch: pytest's monkeypatch."""

    async def tell() -> None:
        await Story(seed).tell()

    run_on_jumping_clock(tell(), patch, fleet_module, keeper_module, state_module)
