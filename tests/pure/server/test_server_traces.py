"""Traces: a collector on a local port receives a span per request, in its caller's trace, without a word of text."""

from __future__ import annotations

import asyncio
import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.pure.server.conftest import Starter
from tokenmill.core.errors import UserError
from tokenmill.server.traces import Traces
from tokenmill.testing.fake_generator import FakeOptions

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector(BaseHTTPRequestHandler):
    """Keeps the bodies that it is sent."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []
    server = HTTPServer(("127.0.0.1", 0), type("Kept", (Collector,), {"bodies": bodies}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    server.server_close()
    thread.join()


async def test_a_request_becomes_a_span_with_its_phases(start: Starter, collector: tuple[str, list[bytes]]) -> None:
    url, bodies = collector
    served = await start(FakeOptions(step_s=0.002), otlp_traces_endpoint=url)
    body = {"prompt": "SECRET-WORDS", "max_tokens": 5, "request_id": "mine"}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
    assert (await served.post("/v1/completions", body, **headers)).status_code == 200
    left = asyncio.create_task(served.post("/v1/completions", {"prompt": "abc", "max_tokens": 4000, "timeout": 0.1}))
    assert (await left).status_code == 408
    assert (await served.post("/v1/completions", {"prompt": "abc", "temperature": "x"})).status_code == 400
    assert served.context.traces is not None
    await asyncio.to_thread(served.context.traces.close)
    spans = []
    for data in bodies:
        for resource in trace_service.ExportTraceServiceRequest.FromString(data).resource_spans:
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert b"SECRET" not in b"".join(bodies)
    roots = [span for span in spans if span.name == "llm_request"]
    assert len(roots) == 2  # what was refused before any work has none
    ours = next(span for span in roots if span.trace_id.hex() == TRACE)
    assert ours.parent_span_id.hex() == PARENT and ours.trace_state == "a=b" and ours.status.code == 0
    said = {a.key: a.value for a in ours.attributes}
    assert said["gen_ai.request.id"].string_value == "cmpl-mine"
    assert said["gen_ai.usage.completion_tokens"].int_value == 5
    assert said["gen_ai.latency.time_to_first_token"].double_value > 0
    phases = [span for span in spans if span.parent_span_id == ours.span_id]
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    times = [t for span in phases for t in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert times == sorted(times) and ours.start_time_unix_nano <= times[0] + 10**6
    cut = next(span for span in roots if span is not ours)
    assert cut.status.code == 2 and cut.parent_span_id == b""


def test_what_cannot_be_sent_to_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="must be an http"):
        Traces("localhost:4318", "m")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UserError, match="pip install"):
        Traces("http://localhost:4318", "m")


async def test_nothing_is_imported_without_an_endpoint(start: Starter) -> None:
    served = await start()
    assert served.context.traces is None
    assert (await served.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})).status_code == 200
