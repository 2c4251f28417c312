"""Putting engines to sleep and waking them. Owns: telling all of them, waiting for all of them, and how a death counts
meanwhile.

An engine that is dead has given all its memory back, so a death is no reason against sleep. It is not started before it
is woken, because others use its memory now. Must not know: HTTP, why a model sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from tokenmill.core.errors import EngineDeadError, EngineLostError, UserError
from tokenmill.core.sleeping import TAGS, Slept
from tokenmill.engine.running.wire import Sleep, Wake
from tokenmill.server.engines.keeper import Keeper
from tokenmill.server.engines.state import EngineRecord

log = logging.getLogger("tokenmill.server")


class RestTraffic:
    """Sleep in a fleet's engines. `asleep`: tags of the memory given back. `kept`: pinned host memory that is used
    instead."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.asleep: list[str] = []
        self.level = 0
        self.kept = 0
        self.waiting: set[int] = set()
        self.said: list[Slept] = []
        self.done: asyncio.Future[None] | None = None
        self.falling = False
        """Was sleep the last thing that engines were told?"""
        self.lock = asyncio.Lock()

    async def sleep(self, level: int) -> None:
        """Put all engines to sleep. No request may be open. If one engine cannot sleep, all stay awake. One that is not
        loaded, or dies meanwhile, is loaded when it is woken."""
        async with self.lock:
            keeper = self.keeper
            keeper.resting = True
            try:
                await self._ask(Sleep(level))
                if keeper.broken is not None:
                    raise EngineDeadError(keeper.broken)
            except BaseException:
                keeper.resting = bool(self.asleep)
                if not self.asleep and keeper.broken is None:
                    await self._ask(Wake(list(TAGS)))
                raise
            self.asleep, self.level = list(TAGS), level
            self.kept = sum(each.kept for each in self.said)

    async def wake(self, tags: Iterable[str] = TAGS) -> None:
        """Wake all engines. Engines that died asleep are loaded again completely."""
        async with self.lock:
            if not self.asleep:
                return
            wanted = list(tags)
            self.keeper.resting = False
            try:
                await self._ask(Wake(wanted))
            except BaseException:
                self.keeper.resting = True
                raise
            self.asleep = [tag for tag in self.asleep if tag not in wanted]
            if self.asleep:
                self.keeper.resting = True
            else:
                self.level = 0

    async def _ask(self, command: Sleep | Wake) -> None:
        """Send a command to every engine and wait for every answer. The first failure is raised."""
        self.waiting, self.said = {engine.number for engine in self.keeper.engines}, []
        self.done, self.falling = asyncio.get_running_loop().create_future(), isinstance(command, Sleep)
        try:
            for engine in self.keeper.engines:
                if engine.link is not None and engine.ready:
                    engine.link.send(command)
                elif self.falling:
                    await self._drop(engine)
                elif engine.link is None:
                    self.keeper.launch(engine)  # it answers with Ready
            await self.done
        finally:
            self.done = None
        failed = next((each.error for each in self.said if each.error is not None), None)
        if failed is not None:
            raise UserError(failed)

    async def _drop(self, engine: EngineRecord) -> None:
        """End an engine that is to sleep and has not loaded. Its death is the answer."""
        if engine.link is None:
            self._settle(engine)
        else:
            engine.unloaded = "it was told to sleep while it loaded"  # so the death is not held against it
            await engine.link.kill()

    def heard(self, engine: EngineRecord, slept: Slept | None) -> None:
        """Take an engine's answer about sleep."""
        if slept is not None and engine.number in self.waiting:
            self.said.append(slept)
            self._settle(engine)

    def loaded(self, engine: EngineRecord) -> None:
        """A new life of this engine has loaded, so it is awake."""
        self._settle(engine)

    def lost(self, engine: EngineRecord, reason: str) -> None:
        """An engine has died. If its answer is awaited, the death is the answer."""
        if self.falling:
            self._settle(engine)
        elif engine.number in self.waiting and self.done is not None and not self.done.done():
            self.done.set_exception(EngineLostError(f"an engine died while it was told ({reason})"))

    def _settle(self, engine: EngineRecord) -> None:
        self.waiting.discard(engine.number)
        if not self.waiting and self.done is not None and not self.done.done():
            self.done.set_result(None)
