"""Spans of requests for OpenTelemetry. Owns: what a span holds, and sending it to a collector (extra `otel`).

There is one span per HTTP request, made at its end, with the children queue, prefill and decode. Spans never hold
texts. OpenTelemetry is imported only if --otlp-traces-endpoint is given. Must not know: HTTP, engines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from tokenmill.core.errors import UserError
from tokenmill.core.extras import pip_install
from tokenmill.server.history import PromptFigures, Record

PATH = "/v1/traces"
FAILED = ("error", "abort")


def check_endpoint(endpoint: str) -> None:
    """Refuse an endpoint that is not an address, and any endpoint if OpenTelemetry is not installed."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port such as 99999
        usable = False
    if not usable:
        raise UserError(
            f"--otlp-traces-endpoint must be an http(s) URL such as http://localhost:4318, got {endpoint!r}.",
            param="otlp_traces_endpoint",
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401  (is it here?)
    except ImportError as error:
        raise UserError(
            f"--otlp-traces-endpoint needs OpenTelemetry: {pip_install('otel')}", param="otlp_traces_endpoint"
        ) from error


class Traces:
    """Sends spans to `endpoint` in the background, over OTLP/HTTP."""

    def __init__(self, endpoint: str, model: str) -> None:
        check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.model = model
        self.provider = TracerProvider(resource=Resource.create({"service.name": "tokenmill"}))
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self.tracer = self.provider.get_tracer("tokenmill")
        self.propagator = TraceContextTextMapPropagator()

    def note(self, record: Record, parent: dict[str, str]) -> None:
        """Send the span of a request that has ended. `parent`: its traceparent and tracestate headers, if it has
        any."""
        from opentelemetry import trace

        shift = time.time_ns() - time.monotonic_ns()
        ended = record.ended if record.ended is not None else time.monotonic()
        context = self.propagator.extract(parent) if parent else None
        span = self.tracer.start_span(
            "llm_request",
            context=context,
            kind=trace.SpanKind.SERVER,
            start_time=_ns(record.began, shift),
            attributes=self._attributes(record.id, record.prompts, record.began),
        )
        inner = trace.set_span_in_context(span)
        for index, figures in enumerate(record.prompts):
            for name, start, end in _phases(figures, ended):
                child = self.tracer.start_span(
                    name, context=inner, start_time=_ns(start, shift), attributes={"tokenmill.prompt": index}
                )
                child.end(_ns(end, shift))
        if any(reason in FAILED for figures in record.prompts for reason in figures.reasons):
            span.set_status(trace.StatusCode.ERROR)
        span.end(_ns(ended, shift))

    def close(self) -> None:
        """Send the spans that still wait."""
        self.provider.shutdown()

    def _attributes(self, name: str, prompts: Sequence[PromptFigures], began: float) -> dict[str, Any]:
        firsts = [figures.timeline.first_token for figures in prompts if figures.timeline.first_token is not None]
        found = {
            "gen_ai.request.id": name,
            "gen_ai.response.model": self.model,
            "gen_ai.usage.prompt_tokens": sum(figures.prompt_tokens for figures in prompts),
            "gen_ai.usage.completion_tokens": sum(figures.output_tokens for figures in prompts),
            "gen_ai.response.finish_reasons": [reason for figures in prompts for reason in figures.reasons],
            "tokenmill.cached_tokens": sum(figures.cached_tokens for figures in prompts),
            "tokenmill.preemptions": sum(figures.timeline.preemptions for figures in prompts),
            "tokenmill.replays": sum(figures.timeline.replays for figures in prompts),
        }
        if firsts:
            found["gen_ai.latency.time_to_first_token"] = min(firsts) - began
        return found


def _phases(figures: PromptFigures, ended: float) -> list[tuple[str, float, float]]:
    """(name, start, end) of each phase that the request reached."""
    t = figures.timeline
    end = t.ended if t.ended is not None else ended
    started = t.started if t.started is not None else t.first_token
    found = [("queue", t.arrival, started if started is not None else end)]
    if started is not None:
        found.append(("prefill", started, t.first_token if t.first_token is not None else end))
    if t.first_token is not None:
        found.append(("decode", t.first_token, t.last_token if t.last_token is not None else end))
    return [(name, start, max(start, stop)) for name, start, stop in found]


def _ns(moment: float, shift: int) -> int:
    return int(moment * 1e9) + shift
