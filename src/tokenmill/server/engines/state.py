"""What the server knows of its engines and of the requests at them. Owns: the records, and how they are added up.

Must not know: links, restarts, HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenmill.core.request import Request
from tokenmill.server.backend import DeltaStream, EngineStats, Timeline
from tokenmill.server.engines.links import Link

_TOTALS = (
    *("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "failures", "steps"),
    *("drafts", "drafted", "accepted"),
    *("flops", "read_bytes", "written_bytes", "kernel_calls", "fallback_calls"),
)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """When an engine counts as hung, and how often it may die. `fair`: several keys take turns."""

    engines: int = 1
    watchdog_s: float = 120.0
    max_restarts_per_minute: int = 5
    max_deaths_per_request: int = 2
    fair: bool = False


@dataclass(slots=True)
class Open:
    """A request that has outputs to come, with what it has said so far."""

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
        """Outputs that end one by one."""
        return len(self.emitted)

    def replayed(self) -> Request:
        """The request as an engine must see it that knows nothing of what has been said."""
        request = self.request
        self.skip_rows = self.prompt_rows
        if not any(self.emitted):
            return request
        params = request.params
        if params.prompt_logprobs is not None:  # complete once a token has been said
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        emitted = [list(tokens) for tokens in self.emitted]
        return msgspec.structs.replace(request, params=params, emitted=emitted, ended=sorted(self.ended))


@dataclass(slots=True)
class Engine:
    """What the server knows of one engine."""

    number: int
    life: int = 0
    link: Link | None = None
    ready: bool = False
    requests: set[str] = field(default_factory=set)
    heard: float = 0.0
    stats: EngineStats = field(default_factory=EngineStats)
    before: EngineStats = field(default_factory=EngineStats)
    """Totals of earlier lives."""

    def totals(self) -> EngineStats:
        """Gauges of now with the totals of all lives."""
        now, before = self.stats, self.before
        summed: dict[str, Any] = {name: getattr(now, name) + getattr(before, name) for name in _TOTALS}
        pairs = itertools.zip_longest(now.accepted_at, before.accepted_at, fillvalue=0)
        summed["accepted_at"] = [a + b for a, b in pairs]
        return msgspec.structs.replace(now, **summed)
