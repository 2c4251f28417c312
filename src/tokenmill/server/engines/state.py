"""What the server knows of its engines and of the requests at them. Owns: these records and their totals.

Must not know: links, restarts, HTTP.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import KW_ONLY, dataclass

from tokenmill.engine.running.deaths import HOPELESS_S, MOST_A_MINUTE
from tokenmill.engine.running.said import MOST_DEATHS, Said
from tokenmill.process.vitals import Vitals
from tokenmill.server.backend import DeltaStream, EngineStats, Timeline
from tokenmill.server.engines.links import Link


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """When an engine counts as hung, and how often it may die. `fair`: several keys share the engines fairly."""

    engines: int = 1
    watchdog_s: float = 15.0
    max_restarts_per_minute: int = MOST_A_MINUTE
    max_deaths_per_request: int = MOST_DEATHS
    fair: bool = False
    hopeless_s: float = HOPELESS_S
    """How long requests wait if no engine can be started."""


@dataclass(slots=True, eq=False)
class Open(Said):
    """A request at the server, with its reader and its times."""

    stream: DeltaStream
    timeline: Timeline
    _: KW_ONLY
    sent: bool = False
    ack: asyncio.Future[None] | None = None

    def answer(self, error: Exception | None) -> bool:
        """Give the engine's first answer to the caller that waits for it. Returns whether one waits."""
        if self.ack is None or self.ack.done():
            return False
        self.ack.set_exception(error) if error is not None else self.ack.set_result(None)
        return True

    def lost(self, counted_at: float) -> None:
        """Its engine has died, whose totals were last heard at this time: they hold the prompt's tokens up to then."""
        self.timeline.replays += 1
        self.died(max((tokens for at, tokens in self.timeline.prefill if at <= counted_at), default=0))


class EngineRecord:
    """The server's record of one engine and its present life."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.life = 0
        self.requests: set[str] = set()
        self.before = EngineStats()
        """The totals of earlier lives."""
        self.stats = EngineStats()
        self.link: Link | None = None
        self.counted_at = 0.0
        """When the totals of `stats` were heard."""
        self.vain = 0
        """How many lives in a row have failed to load or start."""
        self.trouble: str | None = None
        self.trouble_since: float | None = None
        self._fresh()

    def _fresh(self) -> None:
        now = time.monotonic()
        self.ready = self.loaded = self.hung = self.visible = False
        self.unloaded: str | None = None
        self.heard = self.moved = now
        """heard: when the engine last reported progress; moved: when its process last did any work."""
        self.stopped_since: float | None = None
        """When its process was stopped (SIGSTOP). None: it is not stopped."""
        self.done = -1
        self.worked_s, self.read_bytes = 0.0, 0

    def begin(self) -> None:
        """Reset for a new life."""
        self.life += 1
        self._fresh()

    def serves(self) -> None:
        """Has it loaded?"""
        self.ready = self.loaded = True
        self.vain, self.trouble, self.trouble_since = 0, None, None

    def beat(self, done: int) -> None:
        """Take a report of a long step. It is progress only if more is done than at the last report."""
        if done != self.done:
            self.done, self.heard = done, time.monotonic()

    def look(self, vitals: Vitals | None, least_s: float) -> None:
        """Note what its process has done since the last call. Work below `least_s` counts as none, and so does a system
        that shows nothing. A process that is stopped now but has worked since (cpulimit stops one ten times a second)
        counts as stopped from now on."""
        self.visible = vitals is not None
        if vitals is None:
            self.moved = 0.0
            return
        worked = vitals.worked_s - self.worked_s > least_s
        if worked or vitals.read_bytes != self.read_bytes:
            self.moved = time.monotonic()
        self.worked_s, self.read_bytes = vitals.worked_s, vitals.read_bytes
        if worked or not vitals.stopped:
            self.stopped_since = None
        if vitals.stopped:
            self.stopped_since = self.stopped_since or time.monotonic()

    def forgive(self, seconds: float) -> None:
        """Do not count these seconds, in which no engine could be heard."""
        self.heard += seconds
        self.moved += seconds
        if self.stopped_since is not None:
            self.stopped_since += seconds

    def absence(self, watchdog_s: float) -> str | None:
        """Why it does not serve now. None: it does."""
        if not self.ready:
            return f"engine {self.number}: {self.trouble or 'it is starting'}"
        quiet = time.monotonic() - self.heard
        return f"engine {self.number} has made no progress for {quiet:.1f} s" if quiet > watchdog_s else None

    def totals(self) -> EngineStats:
        """Its present gauges, with the totals of all lives."""
        return self.stats.after(self.before)
