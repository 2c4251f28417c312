"""What the engines did in the last minutes. Owns: one sample per second while they work, in a bounded ring.

Nothing runs while engines are idle: a step starts the clock, and a second without steps stops it. Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from math import isnan, nan
from typing import Protocol

from tokenmill.server.backend import Backend, EngineStats
from tokenmill.server.events import Events

PERIOD_S = 1.0
MAX_SAMPLES = 900
TOTALS = (
    *("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "drafted", "accepted", "steps"),
    *("flops", "read_bytes", "written_bytes"),
)
BLOCKS = ("kv_blocks", "kv_shared", "kv_idle")
QUANTILES = (0.5, 0.9, 0.99)
COLUMNS = (
    *("at", "running", "waiting", "kv_usage", "kv_shared", "kv_idle", *TOTALS, "restarts"),
    *(f"{name}_p{round(q * 100)}" for name in ("ttft", "itl") for q in QUANTILES),
)
"""`at` is Unix time. Totals count since the engines started. Latencies are in seconds, None if no request ended."""

Sample = list[float | None]


class Latencies(Protocol):
    """The object that holds the latencies since the last sample."""

    recent_ttft: deque[float]
    recent_gaps: deque[float]


class Activity:
    """The last minutes of one server."""

    def __init__(
        self,
        backend: Backend,
        latencies: Latencies,
        events: Events | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.backend = backend
        self.latencies = latencies
        self.events = events or Events(clock)
        self.clock = clock
        self.figures = array("d", bytes(8 * MAX_SAMPLES * len(COLUMNS)))
        """One row per sample, NaN where there is no value. Objects would make the heap grow for a quarter of an
        hour."""
        self.taken = 0
        self.timer: asyncio.TimerHandle | None = None
        self.busy = False

    def watch(self) -> None:
        """Listen to every step. A listener that is already there is called first."""
        inner = self.backend.observe

        def observe(tokens: int, *engine: int) -> None:
            inner(tokens, *engine)
            if tokens:
                self.busy = True
                if self.timer is None:
                    self.timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)

        self.backend.observe = observe

    def since(self, moment: float) -> list[Sample]:
        """Samples after `moment`. The newest one is taken now."""
        if not self.taken or self.clock() - self._row(self.taken - 1)[0] > PERIOD_S / 2:
            self.take()
        rows = (self._row(number) for number in range(max(0, self.taken - MAX_SAMPLES), self.taken))
        return [[None if isnan(x) else x for x in row] for row in rows if row[0] > moment]

    def _row(self, number: int) -> array[float]:
        start = number % MAX_SAMPLES * len(COLUMNS)
        return self.figures[start : start + len(COLUMNS)]

    def take(self) -> None:
        """Take a sample now."""
        total = whole(self.backend.stats())
        sample: Sample = [self.clock(), total.running, total.waiting, round(total.kv_usage, 4)]
        sample += [total.kv_shared, total.kv_idle]
        sample += [getattr(total, name) for name in TOTALS]
        counters = self.backend.counters()
        self.events.counters(counters)
        sample.append(counters.get("engine_restarts", 0))
        for values in (self.latencies.recent_ttft, self.latencies.recent_gaps):
            sample += quantiles(values)
            values.clear()
        start = self.taken % MAX_SAMPLES * len(COLUMNS)
        self.figures[start : start + len(COLUMNS)] = array("d", (nan if x is None else x for x in sample))
        self.taken += 1

    def _tick(self) -> None:
        """Take one more sample after the last step, so that a plot falls back to zero."""
        self.take()
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(PERIOD_S, self._tick) if self.busy else None
        self.busy = False


def whole(engines: Iterable[EngineStats]) -> EngineStats:
    """The figures of all engines together. The use of K/V is weighted by blocks."""
    engines = list(engines)
    names = ("running", "waiting", *BLOCKS, *TOTALS)
    summed = {name: sum(getattr(stats, name) for stats in engines) for name in names}
    weight = sum(max(1, stats.kv_blocks) for stats in engines)
    used = sum(stats.kv_usage * max(1, stats.kv_blocks) for stats in engines)
    return EngineStats(**summed, kv_usage=used / weight if weight else 0.0)


def quantiles(values: Iterable[float]) -> list[float | None]:
    """The QUANTILES of these values: each is the smallest value that is not exceeded by its share of them. None without
    values."""
    found = sorted(values)
    if not found:
        return [None] * len(QUANTILES)
    return [round(found[min(len(found) - 1, int(q * len(found)))], 6) for q in QUANTILES]
