"""What the server knows of its engines and of the requests at them. Owns: these records and their totals.

Must not know: links, restarts, HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenmill.core.request import Request, TokenDelta
from tokenmill.server.backend import DeltaStream, EngineStats, Timeline
from tokenmill.server.engines.links import Link, Vitals

_TOTALS = (
    *("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "failures", "steps"),
    *("drafts", "drafted", "accepted", "saved_s", "spent_s", "expert_moves"),
    *("states_saved", "states_used", "states_evicted"),
    *("flops", "read_bytes", "written_bytes", "kernel_calls", "fallback_calls", "joules"),
)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """When an engine counts as hung, and how often it may die. `fair`: several keys share the engines fairly."""

    engines: int = 1
    watchdog_s: float = 15.0
    max_restarts_per_minute: int = 5
    max_deaths_per_request: int = 2
    fair: bool = False
    hopeless_s: float = 60.0
    """How long requests wait for engines that cannot be started."""


@dataclass(slots=True, eq=False)
class Open:
    """A request with unfinished outputs, and what it has said so far."""

    request: Request
    pooling: str | None
    stream: DeltaStream
    timeline: Timeline
    engine: int = -1
    emitted: list[list[int]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    prompt_rows: int = 0
    skip_rows: int = 0
    deaths: int = 0
    sent: bool = False
    ack: asyncio.Future[None] | None = None

    @property
    def num_outputs(self) -> int:
        """How many outputs the request has; each ends by itself."""
        return len(self.emitted)

    @property
    def num_said(self) -> int:
        """Tokens that have come, of all outputs."""
        return sum(map(len, self.emitted))

    def answer(self, error: Exception | None) -> bool:
        """Tell the caller that waits for the engine's first answer; -> is there such a caller?"""
        if self.ack is None or self.ack.done():
            return False
        self.ack.set_exception(error) if error is not None else self.ack.set_result(None)
        return True

    def say(self, delta: TokenDelta) -> None:
        """Keep what an output has said, and the state that its next token depends on."""
        self.emitted[delta.index] += delta.tokens
        if delta.mu is not None:
            self.request.mus = self.request.mus or [None] * self.num_outputs
            self.request.mus[delta.index] = delta.mu

    def drop_seen_rows(self, delta: TokenDelta) -> None:
        """Remove what an earlier engine has said of the prompt already."""
        rows = delta.prompt_logprobs or []
        seen = min(len(rows), self.skip_rows)
        self.skip_rows -= seen
        delta.prompt_logprobs = rows[seen:] or None

    def replayed(self) -> Request:
        """The request for an engine that does not know what has been said so far."""
        request = self.request
        self.skip_rows = self.prompt_rows
        if not any(self.emitted):
            return request
        params = request.params
        if params.prompt_logprobs is not None:  # complete once a token has been said
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        emitted = [list(tokens) for tokens in self.emitted]
        return msgspec.structs.replace(request, params=params, emitted=emitted, ended=sorted(self.ended))


class Engine:
    """What the server knows of one engine, and of its present life."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.life = 0
        self.requests: set[str] = set()
        self.before = EngineStats()
        """Totals of earlier lives."""
        self.stats = EngineStats()
        self.link: Link | None = None
        self.vain = 0
        """Lives in a row that failed to load or start."""
        self.trouble: str | None = None
        self.trouble_since: float | None = None
        self._fresh()

    def _fresh(self) -> None:
        now = time.monotonic()
        self.ready = self.loaded = self.hung = self.visible = False
        self.unloaded: str | None = None
        self.heard = self.moved = now
        """When the engine last reported progress, and when its process last did any work."""
        self.stopped_since: float | None = None
        """Since when its process is stopped (SIGSTOP)."""
        self.done = -1
        self.worked_s, self.read_bytes = 0.0, 0

    def begin(self) -> None:
        """Reset for a new life."""
        self.life += 1
        self._fresh()

    def serves(self) -> None:
        """It has loaded."""
        self.ready = self.loaded = True
        self.vain, self.trouble, self.trouble_since = 0, None, None

    def beat(self, done: int) -> None:
        """Take a beat of a long step. It is progress if more is done than at the last beat."""
        if done != self.done:
            self.done, self.heard = done, time.monotonic()

    def look(self, vitals: Vitals | None, least_s: float) -> None:
        """Note what its process did since the last look. Less work than `least_s` counts as none, and so does a system
        that reports nothing."""
        self.visible = vitals is not None
        if vitals is None:
            self.moved = 0.0
            return
        if vitals.worked_s - self.worked_s > least_s or vitals.read_bytes != self.read_bytes:
            self.moved = time.monotonic()
        self.worked_s, self.read_bytes = vitals.worked_s, vitals.read_bytes
        self.stopped_since = (self.stopped_since or time.monotonic()) if vitals.stopped else None

    def forgive(self, seconds: float) -> None:
        """Do not count these seconds: no engine could be heard."""
        self.heard += seconds
        self.moved += seconds
        if self.stopped_since is not None:
            self.stopped_since += seconds

    def totals(self) -> EngineStats:
        """Its present gauges, with the totals of all lives."""
        now, before = self.stats, self.before
        summed: dict[str, Any] = {name: getattr(now, name) + getattr(before, name) for name in _TOTALS}
        pairs = itertools.zip_longest(now.accepted_at, before.accepted_at, fillvalue=0)
        summed["accepted_at"] = [a + b for a, b in pairs]
        return msgspec.structs.replace(now, **summed)
