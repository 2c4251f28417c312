"""One model's numbers for Prometheus under vLLM's names, by engine. Owns: one registry per model.

What concerns the whole server is in `server_metrics.py`. Must not know: endpoints, engines' insides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from tokenmill.core.request import Request
from tokenmill.server.backend import Backend, Timeline
from tokenmill.server.engine_series import EngineSeries

TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
RECENT = 4096
"""Latencies that are kept for readers of the last seconds."""
REASONS = ("stop", "length", "abort", "error", "repetition")


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended."""

    request: Request
    timeline: Timeline
    num_tokens: int
    longest: int
    """Tokens of the longest output."""
    reason: str
    at: float
    num_cached: int = 0


def token_edges(longest: int) -> list[int]:
    """1, 2, 5, 10, ... up to the context's length."""
    edges: list[int] = []
    scale = 1
    while scale <= longest:
        edges += [m * scale for m in (1, 2, 5) if m * scale <= longest]
        scale *= 10
    return edges or [1]


class ByEngine:
    """One series per engine, made when it is first used."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make
        self.made: dict[int, Any] = {}

    def begin(self, number: int) -> None:
        """Show the series from now on."""
        if number not in self.made:
            self.made[number] = self.make(number)

    def __getitem__(self, number: int) -> Any:
        self.begin(number)
        return self.made[number]


class Metrics:
    """All series of one model, loaded or not. The events of a request count for the engine that ended it. The sum over
    the label `engine` is the model's value."""

    def __init__(self, backend: Backend, model: str) -> None:
        self.registry = CollectorRegistry()
        self.recent_ttft: deque[float] = deque(maxlen=RECENT)
        self.recent_gaps: deque[float] = deque(maxlen=RECENT)
        self.model = model
        edges = token_edges(backend.info.max_model_len)
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT)
        self.gap = self._histogram("vllm:inter_token_latency_seconds", "Between tokens.", GAP)
        self.per_token = self._histogram("vllm:request_time_per_output_token_seconds", "Mean gap of a request.", GAP)
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", LATENCY)
        self.queue = self._histogram("vllm:request_queue_time_seconds", "Arrival to first step.", LATENCY)
        self.prefill = self._histogram("vllm:request_prefill_time_seconds", "First step to first token.", LATENCY)
        self.decode = self._histogram("vllm:request_decode_time_seconds", "First to last token.", LATENCY)
        self.inference = self._histogram("vllm:request_inference_time_seconds", "First step to last token.", LATENCY)
        self.prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens.", edges)
        self.generation = self._histogram("vllm:request_generation_tokens", "Output tokens.", edges)
        self.max_generation = self._histogram("vllm:request_max_num_generation_tokens", "Longest output.", edges)
        self.computed = self._histogram("vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed.", edges)
        self.params_n = self._histogram("vllm:request_params_n", "Outputs asked for.", (1, 2, 5, 10, 20))
        self.params_max = self._histogram("vllm:request_params_max_tokens", "Most tokens asked for.", edges)
        self.step_tokens = self._histogram("vllm:iteration_tokens", "Tokens per step.", STEP_TOKENS, "_total")
        success = Counter(
            "vllm:request_success",
            "Ended requests.",
            ["model_name", "engine", "finished_reason"],
            registry=self.registry,
        )
        self.success = ByEngine(lambda n: {r: success.labels(model, str(n), r) for r in REASONS})
        names = ["model_name", "mode", "outcome", "request_type"]
        self.calls = Counter(
            "vllm:tool_call_parser_invocations", "Outputs read for tool calls.", names, registry=self.registry
        )
        self.series = EngineSeries(backend, model)
        self.registry.register(self.series)
        self.attach(backend)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], suffix: str = "") -> ByEngine:
        made = Histogram(name + suffix, text, ["model_name", "engine"], buckets=tuple(buckets), registry=self.registry)
        return ByEngine(lambda number: made.labels(self.model, str(number)))

    def saw_gap(self, seconds: float, engine: int = 0) -> None:
        """One inter-token latency."""
        self.gap[engine].observe(seconds)
        self.recent_gaps.append(seconds)

    def saw_first(self, seconds: float) -> None:
        """Note how long after its request a first token came. The histogram counts it when the request has ended."""
        self.recent_ttft.append(seconds)

    def attach(self, backend: Backend | None) -> None:
        """The model is loaded again, or (None) is no longer loaded. Counts stay, and series begin at zero."""
        self.series.backend = backend
        for number in range(len(backend.stats()) if backend is not None else 0):
            for each in vars(self).values():
                if isinstance(each, ByEngine):
                    each.begin(number)

    def read_calls(self, kind: str, *, found: bool, streamed: bool) -> None:
        """Count an output of a request with tools, once, when it is complete. (vLLM counts streamed ones once per
        delta.)"""
        mode, outcome = "streaming" if streamed else "non_streaming", "tool_call" if found else "no_tool_call"
        self.calls.labels(self.model, mode, outcome, kind).inc()

    def saw_step(self, tokens: int, engine: int = 0) -> None:
        """A step computed this many tokens."""
        if tokens:
            self.step_tokens[engine].observe(tokens)

    def finished(self, end: Finished) -> None:
        """Count everything about a request that has ended."""
        t, params, n = end.timeline, end.request.params, end.timeline.engine
        self.success[n].get(end.reason, self.success[n]["error"]).inc()
        self.e2e[n].observe(end.at - t.arrival)
        self.prompt[n].observe(len(end.request.prompt_ids))
        self.computed[n].observe(max(0, len(end.request.prompt_ids) - end.num_cached))
        self.generation[n].observe(end.num_tokens)
        self.max_generation[n].observe(end.longest)
        self.params_n[n].observe(params.n)
        if params.max_tokens is not None:
            self.params_max[n].observe(params.max_tokens)
        if t.started is not None:
            self.queue[n].observe(max(0.0, t.started - t.arrival))
        if t.first_token is not None and t.last_token is not None:
            started = min(t.started if t.started is not None else t.arrival, t.first_token)
            self.ttft[n].observe(t.first_token - t.arrival)
            self.prefill[n].observe(t.first_token - started)
            self.decode[n].observe(t.last_token - t.first_token)
            self.inference[n].observe(t.last_token - started)
            if end.longest > 1:  # several outputs grow side by side
                self.per_token[n].observe((t.last_token - t.first_token) / (end.longest - 1))
