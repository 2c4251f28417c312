"""Putting engines to sleep and waking them. Owns: telling all of them, waiting for all of them, and how a death counts
meanwhile.

An engine that dies asleep is not started before it is woken, because others use its memory now. Must not know: HTTP,
why a model sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from tokenmill.core.errors import EngineDeadError, EngineLostError, UserError
from tokenmill.core.sleeping import TAGS, Slept
from tokenmill.engine.wire import Sleep, Wake
from tokenmill.server.engines.keeper import Keeper
from tokenmill.server.engines.state import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("tokenmill.server")


class Crew(Protocol):
    """The part of a fleet that sleeping needs."""

    engines: Sequence[Engine]
    keeper: Keeper


class RestTraffic:
    """Sleep in a fleet's engines. `asleep`: tags of the memory given back. `kept`: pinned host memory that is used
    instead."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.asleep: list[str] = []
        self.level = 0
        self.kept = 0
        self.waiting: set[int] = set()
        self.said: list[Slept] = []
        self.done: asyncio.Future[None] | None = None
        self.lock = asyncio.Lock()

    async def sleep(self, level: int) -> None:
        """Put all engines to sleep. No request may be open. If one engine cannot sleep, all stay awake."""
        async with self.lock:
            if not all(engine.ready for engine in self.crew.engines):
                raise EngineDeadError("an engine is not ready")
            try:
                await self._ask(Sleep(level))
            except BaseException:
                if not self.asleep:
                    await self._ask(Wake(list(TAGS)))
                raise
            self.asleep, self.level = list(TAGS), level
            self.kept = sum(each.kept for each in self.said)
            self.crew.keeper.resting = True

    async def wake(self, tags: Iterable[str] = TAGS) -> None:
        """Wake all engines. Engines that died asleep are loaded again completely."""
        async with self.lock:
            if not self.asleep:
                return
            wanted = list(tags)
            self.crew.keeper.resting = False
            try:
                await self._ask(Wake(wanted))
            except BaseException:
                self.crew.keeper.resting = True
                raise
            self.asleep = [tag for tag in self.asleep if tag not in wanted]
            if self.asleep:
                self.crew.keeper.resting = True
            else:
                self.level = 0

    async def _ask(self, command: Sleep | Wake) -> None:
        """Send a command to every engine and wait for every answer. The first failure is raised."""
        self.waiting, self.said = {engine.number for engine in self.crew.engines}, []
        self.done = asyncio.get_running_loop().create_future()
        try:
            for engine in self.crew.engines:
                if engine.link is None:
                    self.crew.keeper.launch(engine)  # it answers with Ready
                elif engine.ready:
                    engine.link.send(command)
            await self.done
        finally:
            self.done = None
        failed = next((each.error for each in self.said if each.error is not None), None)
        if failed is not None:
            raise UserError(failed)

    def heard(self, engine: Engine, slept: Slept | None) -> None:
        """Take an engine's answer about sleep."""
        if slept is not None and engine.number in self.waiting:
            self.said.append(slept)
            self._settle(engine)

    def loaded(self, engine: Engine) -> None:
        """A new life of this engine has loaded, so it is awake."""
        self._settle(engine)

    def lost(self, engine: Engine, reason: str) -> None:
        """An engine has died. If its answer is awaited, the death is the answer."""
        if engine.number in self.waiting and self.done is not None and not self.done.done():
            self.done.set_exception(EngineLostError(f"an engine died while it was told ({reason})"))

    def _settle(self, engine: Engine) -> None:
        self.waiting.discard(engine.number)
        if not self.waiting and self.done is not None and not self.done.done():
            self.done.set_result(None)
