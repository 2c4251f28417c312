"""The catalogue's metrics for Prometheus: each series has one sample per configured model.

Must not know: HTTP, engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tokenmill.server.many_models.catalogue import Catalogue
from tokenmill.server.many_models.entry import State


class ModelSeries:
    """States, sizes and queues, read when Prometheus asks."""

    def __init__(self, models: Catalogue[Any]) -> None:
        self.models = models

    def collect(self) -> Iterator[Metric]:
        """All series."""
        entries = list(self.models.entries.values())
        state = GaugeMetricFamily("tokenmill:model_state", "Where a model stands.", labels=["model", "state"])
        for entry in entries:
            for each in State:
                state.add_metric([entry.name, each.value], float(entry.state is each))
        yield state
        gauges: dict[str, tuple[str, list[float]]] = {
            "bytes": ("What a model takes, or would take.", [entry.size for entry in entries]),
            "waiting": ("Requests that wait for a load.", [entry.life.waiting for entry in entries]),
            "open": ("Requests that hold a model.", [entry.life.open for entry in entries]),
            "load_seconds": ("What its last load took.", [entry.life.load_s for entry in entries]),
        }
        for name, (text, values) in gauges.items():
            made = GaugeMetricFamily(f"tokenmill:model_{name}", text, labels=["model"])
            for entry, value in zip(entries, values, strict=True):
                made.add_metric([entry.name], value)
            yield made
        loads = CounterMetricFamily("tokenmill:model_loads", "How often a model was loaded.", labels=["model"])
        for entry in entries:
            loads.add_metric([entry.name], entry.life.loads)
        yield loads
