"""Keeps engines alive. Owns: starting them, watching their progress, counting deaths, and restarting.

Every failure here is reported and tried again: a server that has silently given up its engines helps nobody.
Must not know: requests, HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tokenmill.engine.running.deaths import Deaths, pause_after
from tokenmill.engine.running.wire import EngineStats, News
from tokenmill.server.engines.links import Link
from tokenmill.server.engines.reserve import Reserve
from tokenmill.server.engines.state import EngineRecord, FleetOptions

log = logging.getLogger("tokenmill.server")
MakeLink = Callable[[int, int], Link]
"""(engine number, life number) -> a fresh link."""

PATIENCE = 4
"""An engine that computes may be silent for this many times the watchdog's time. An idle one may be silent for that
time once."""
STOPPED_S = 1.0
"""A process that somebody has stopped (SIGSTOP) is killed after this time, because waiting does not help."""
LEAST_WORK = 0.02
"""An engine that uses less than this share of a core counts as idle. Its own reports use far less."""


@dataclass(slots=True)
class Reports:
    """Callbacks."""

    news: Callable[[EngineRecord, int, News], None]
    """A life of an engine has said something."""
    loss: Callable[[EngineRecord, str], None]
    """An engine has died. Its next life begins after this call."""
    broken: Callable[[str], None]
    """There were too many deaths. No engine is started any more."""
    hopeless: Callable[[str], None]
    """No engine could be started for a long time. The keeper goes on trying."""


class Keeper:
    """Keeps a fleet's engines alive. The module's text describes it."""

    def __init__(self, make_link: MakeLink, options: FleetOptions, reports: Reports) -> None:
        self.make_link = make_link
        self.options = options
        self.reports = reports
        self.engines = [EngineRecord(i) for i in range(options.engines)]
        self.reserve = Reserve()
        self.deaths = Deaths(options.max_restarts_per_minute)
        self.restarts = 0
        self.failed_starts = 0
        self.broken: str | None = None
        self.watcher: asyncio.Task[None] | None = None
        self.closed = False
        self.resting = False
        """The engines sleep. One that dies now is started when it is woken."""

    def start(self) -> None:
        """Start all engines and the watchdog."""
        for engine in self.engines:
            self.launch(engine)
        self.watcher = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """End all engines."""
        self.closed = True
        if self.watcher is not None:
            self.watcher.cancel()
        await asyncio.gather(*(e.link.stop() for e in self.engines if e.link is not None), return_exceptions=True)
        self.reserve.close()

    def launch(self, engine: EngineRecord) -> None:
        """Begin a new life. If that fails, try again after a pause."""
        if self.closed or self.broken is not None or self.resting or engine.link is not None:
            return
        engine.begin()
        life = engine.life
        try:
            with self.reserve.lent():
                engine.link = self.make_link(engine.number, life)
                engine.link.start(partial(self.reports.news, engine, life), partial(self._died, engine, life))
        except Exception as error:
            engine.link = None
            self.failed_starts += 1
            self._again(engine, f"it cannot be started ({getattr(error, 'strerror', None) or error})")

    def failed_to_load(self, engine: EngineRecord, message: str) -> None:
        """A life reports why it could not load. Its death follows."""
        engine.unloaded = message

    def trouble(self) -> str | None:
        """Why no engine can serve soon. None: one can."""
        before = time.monotonic() - self.options.hopeless_s
        since = [e.trouble_since for e in self.engines]
        gone = all(at is not None and at < before for at in since)
        return f"no engine could be started: {self.engines[0].trouble}" if gone else None

    # ------------------------------------------------------------ deaths

    def _died(self, engine: EngineRecord, life: int, reason: str) -> None:
        if life != engine.life or self.broken is not None or self.closed:
            return
        engine.ready, engine.link = False, None
        try:
            self._bury(engine, reason)
        except Exception:
            log.exception("a death could not be handled")
            self._again(engine, "its last life ended in confusion")
        try:
            self.reports.loss(engine, reason)
        except Exception:
            log.exception("what a death means for requests could not be handled")
        if self.broken is not None:
            self.reports.broken(self.broken)

    def _bury(self, engine: EngineRecord, reason: str) -> None:
        log.error("engine %d died (%s) with %d requests", engine.number, reason, len(engine.requests))
        unloaded, was_ready = engine.unloaded, engine.loaded
        engine.before, engine.stats = engine.totals(), EngineStats()
        if unloaded is None:
            self.broken = self.deaths.count(time.monotonic())
        if self.broken is None:
            self.restarts += 1
            if self.resting:
                log.error("engine %d was asleep: it is loaded again when it is woken", engine.number)
            elif was_ready:  # at once, before its requests look for another engine
                self.launch(engine)
            else:
                self._again(engine, f"it did not load ({unloaded or reason})")

    def _again(self, engine: EngineRecord, why: str) -> None:
        """Start it again later, when what is missing now (descriptors, memory, disk) may be there again."""
        pause = pause_after(engine.vain)
        engine.vain += 1
        engine.trouble = why
        engine.trouble_since = engine.trouble_since or time.monotonic()
        log.error("engine %d: %s; the next try follows in %g s", engine.number, why, pause)
        asyncio.get_running_loop().call_later(pause, self.launch, engine)
        if (reason := self.trouble()) is not None:
            self.reports.hopeless(reason)

    # ------------------------------------------------------------ the watch

    async def _watch(self) -> None:
        """Kill engines that make no progress. Handling their death does the rest."""
        period = min(1.0, self.options.watchdog_s / 4)
        while True:
            began = time.monotonic()
            await asyncio.sleep(period)
            try:
                late = time.monotonic() - began - period
                if late > period:  # this process itself stood still, so it could not hear any engine
                    for engine in self.engines:
                        engine.forgive(late)
                self.reserve.refill()
                await self._look(period)
            except Exception:
                log.exception("the watch of the engines failed once; it goes on")

    async def _look(self, period: float) -> None:
        for engine in self.engines:
            if engine.link is not None:
                engine.look(engine.link.vitals(), LEAST_WORK * period)
        stuck = [e for e in self.engines if self._stuck(e)]
        if stuck:
            await asyncio.sleep(0.05)  # perhaps this process was late in listening
        for engine in stuck:
            if self._stuck(engine) and engine.link is not None:
                now = time.monotonic()
                log.error("engine %d is hung: no progress for %.1f s", engine.number, now - engine.heard)
                engine.link.dump_stacks()
                await asyncio.sleep(0.2)
                engine.ready, engine.hung = False, True
                if engine.link is not None:
                    await engine.link.kill()

    def _stuck(self, engine: EngineRecord) -> bool:
        now, limit = time.monotonic(), self.options.watchdog_s
        if engine.link is None or engine.hung:  # it has been told already
            return False
        if engine.stopped_since is not None and now - engine.stopped_since > min(STOPPED_S, limit):
            return True
        if engine.loaded:
            quiet = now - engine.heard
            return quiet > PATIENCE * limit or (quiet > limit and now - engine.moved > limit / 2)
        if not engine.visible:  # nothing shows how far its load has come
            return False
        return now - engine.moved > PATIENCE * limit
