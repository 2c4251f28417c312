"""Metrics of the whole server, and the one text that Prometheus reads. Owns: the registry of metrics that belong to no
model.

Must not know: endpoints, engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from tokenmill.server.log_writer import dropped_lines
from tokenmill.server.logs import NAMES as LOGGERS

LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BODY = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)


class SeriesSource(Protocol):
    """Where series are read from."""

    def collect(self) -> Iterable[Metric]: ...


class ServerMetrics:
    """The series that belong to no model."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.more: Callable[[], Iterable[SeriesSource]] = tuple
        """The series of all models in the catalogue."""
        self.listeners: set[Callable[[str], None]] = set()
        """Called for every refusal."""
        names = ["handler", "method", "status"]
        self.http = Counter("http_requests", "HTTP requests.", names, registry=self.registry)
        self.http_seconds = Histogram(
            "http_request_duration_seconds", "HTTP durations.", ["handler", "method"], registry=self.registry
        )
        self.http_bytes = Histogram(
            "http_request_size_bytes", "Bodies.", ["handler"], buckets=BODY, registry=self.registry
        )
        self.rejected = Counter("tokenmill:rejected", "Refused requests.", ["reason"], registry=self.registry)
        self.ignored = Counter(
            "tokenmill:ignored_fields",
            "Names in bodies, queries and headers that have no effect.",
            ["plan"],
            registry=self.registry,
        )
        self.lag = Histogram(
            "tokenmill:event_loop_lag_seconds", "How late the event loop was.", buckets=LAG, registry=self.registry
        )
        self.worst_lag = Gauge(
            "tokenmill:event_loop_worst_lag_seconds", "The most since the last look.", registry=self.registry
        )
        self._worst = 0.0
        dropped = Gauge("tokenmill:dropped_log_lines", "Log lines that nobody took.", registry=self.registry)
        dropped.set_function(lambda: dropped_lines(LOGGERS))
        self.kept = Gauge("tokenmill:kept_responses_bytes", "Responses kept for later.", registry=self.registry)
        self.load = Gauge("tokenmill:open_http_requests", "HTTP requests being served.", registry=self.registry)
        ProcessCollector(registry=self.registry)

    def saw_lag(self, seconds: float) -> None:
        """The event loop was late by this many seconds."""
        self.lag.observe(seconds)
        self._worst = max(self._worst, seconds)

    def series_of(self, handler: str, method: str, status: str) -> tuple[Counter, Histogram, Histogram]:
        """For answers of one kind: their counts, durations, and sizes of their bodies."""
        durations = self.http_seconds.labels(handler, method)
        return self.http.labels(handler, method, status), durations, self.http_bytes.labels(handler)

    def reject(self, reason: str) -> None:
        """Count a request that was refused before any work."""
        self.rejected.labels(reason).inc()
        for listener in self.listeners:
            listener(reason)

    def collect(self) -> Iterator[Metric]:
        """All series. Those of one name come together, whichever models they belong to."""
        found: dict[str, Metric] = {}
        for source in (self.registry, *self.more()):
            for metric in source.collect():
                if metric.name in found:
                    found[metric.name].samples.extend(metric.samples)
                else:
                    found[metric.name] = metric
        yield from found.values()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        self.worst_lag.set(self._worst)
        self._worst = 0.0
        return generate_latest(self)
