"""What the engines report, as Prometheus reads it. Owns: series by label, and shares of the device's ceilings.

vLLM's names where it has one, so that its dashboards work; series of features that are not here stay at zero.
Must not know: requests, endpoints.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tokenmill.engine.running.metrics import COUNTERS, GAUGES, PER_PLACE, statistic
from tokenmill.measure.devices import Device, recognise
from tokenmill.server.backend import Backend, EngineStats

_BY_LABEL = {
    "vllm:num_requests_waiting_by_reason": (
        "Outputs that wait for the batch.",
        "reason",
        {"capacity": "waiting", "deferred": ""},
        GaugeMetricFamily,
    ),
    "vllm:prompt_tokens_by_source": (
        "Prompt tokens computed, or found in a cache.",
        "source",
        {"local_compute": "prompt_tokens", "local_cache_hit": "cached_tokens", "external_kv_transfer": ""},
        CounterMetricFamily,
    ),
    "vllm:engine_sleep_state": (
        "1: the engine is in this state.",
        "sleep_state",
        {"awake": "awake", "weights_offloaded": "offloaded", "discard_all": "discarded"},
        GaugeMetricFamily,
    ),
}


class EngineSeries:
    """Gauges and totals of all engines, read when Prometheus asks."""

    def __init__(self, backend: Backend, model: str) -> None:
        self.backend: Backend | None = backend
        """None while the model is not loaded."""
        self.model = model
        self.info = backend.info
        self.device = recognise(str(backend.info.details.get("device_name", "")))
        self.seen: dict[int, tuple[float, EngineStats]] = {}

    def describe(self) -> list[Metric]:
        """Nothing: the names follow from `collect`."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All series."""
        backend = self.backend
        if backend is None:
            return
        engines = backend.stats()
        labels = ["model_name", "engine"]
        for table, family in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, (field, text) in table.items():
                made: Any = family(name, text, labels=labels)
                for number, stats in enumerate(engines):
                    made.add_metric([self.model, str(number)], _value(stats, field))
                yield made
        for name, (text, label, parts, kind) in _BY_LABEL.items():
            made = kind(name, text, labels=[*labels, label])
            for number, stats in enumerate(engines):
                for part, field in parts.items():
                    made.add_metric([self.model, str(number), part], _value(stats, field))
            yield made
        yield self._by_place(engines)
        yield self._cache_info(engines)
        yield self._device_info()
        yield from self._shares(engines)
        yield from self._energy(engines)
        for name, value in backend.counters().items():
            made = GaugeMetricFamily(f"tokenmill:{name}", name.replace("_", " "), labels=labels[:1])
            made.add_metric([self.model], value)
            yield made

    def _by_place(self, engines: list[EngineStats]) -> Metric:
        """How often drafts were right, by their place in the sequence of drafts."""
        name, labels = PER_PLACE, ["model_name", "engine", "position"]
        made = CounterMetricFamily(name, "Draft tokens that were right, by their place.", labels=labels)
        for number, stats in enumerate(engines):
            for place, count in enumerate(stats.accepted_at):
                made.add_metric([self.model, str(number), str(place)], count)
        return made

    def _cache_info(self, engines: list[EngineStats]) -> Metric:
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The K/V cache.", labels=["model_name", "engine", "block_size", "num_gpu_blocks"]
        )
        size = str(self.info.details.get("block_size", ""))
        for number, stats in enumerate(engines):
            info.add_metric([self.model, str(number), size, str(stats.kv_blocks)], 1)
        return info

    def _device_info(self) -> Metric:
        """The device of the engines, and the types that they compute in."""
        names = ["device", "device_name", "dtype", "quantization"]
        info = GaugeMetricFamily("tokenmill:device_info", "What the engines run on.", labels=["model_name", *names])
        info.add_metric([self.model, *(str(self.info.details.get(name, "")) for name in names)], 1)
        return info

    def _shares(self, engines: list[EngineStats]) -> Iterator[Metric]:
        """Shares of the device's ceilings that were used since the last call. Only for devices whose ceilings are
        known."""
        if self.device is None:
            return
        labels = ["model_name", "engine"]
        bandwidth = GaugeMetricFamily("tokenmill:bandwidth_share", "MBU: of the bytes per second.", labels=labels)
        compute = GaugeMetricFamily("tokenmill:compute_share", "MFU: of the operations per second.", labels=labels)
        now = time.monotonic()
        for number, stats in enumerate(engines):
            since, before = self.seen.get(number, (now, stats))
            self.seen[number] = now, stats
            moved, computed = _shares_of(self.device, self._dtype(), max(1e-9, now - since), before, stats)
            bandwidth.add_metric([self.model, str(number)], moved)
            compute.add_metric([self.model, str(number)], computed)
        yield bandwidth
        yield compute

    def _energy(self, engines: list[EngineStats]) -> Iterator[Metric]:
        """Energy, if the device reports it: of a GPU's board, or of all processor packages of the machine. Idle times
        count."""
        labels = ["model_name", "engine"]
        reporting = [(str(number), stats) for number, stats in enumerate(engines) if stats.joules]
        joules = CounterMetricFamily("tokenmill:energy_joules", "Energy that the device took.", labels=labels)
        watts = GaugeMetricFamily("tokenmill:power_watts", "Power that the device takes.", labels=labels)
        each = GaugeMetricFamily("tokenmill:joules_per_token", "Energy by generated tokens, in all.", labels=labels)
        for number, stats in reporting:
            joules.add_metric([self.model, number], stats.joules)
            watts.add_metric([self.model, number], stats.watts)
            if stats.output_tokens:
                each.add_metric([self.model, number], stats.joules / stats.output_tokens)
        if reporting:
            yield from (joules, watts, each)

    def _dtype(self) -> str:
        return str(self.info.details.get("dtype", "bfloat16"))


def _shares_of(device: Device, dtype: str, seconds: float, a: EngineStats, b: EngineStats) -> tuple[float, float]:
    moved = b.read_bytes + b.written_bytes - a.read_bytes - a.written_bytes
    ceiling = device.flops_in(dtype)
    return (
        moved / seconds / device.bytes_per_s,
        (b.flops - a.flops) / seconds / ceiling if ceiling else 0.0,
    )


def _value(stats: EngineStats, field: str) -> float:
    return 1.0 if field == "one" else statistic(stats, field)
