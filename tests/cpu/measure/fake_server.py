"""An OpenAI-compatible server of known delays, in the test's own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Fake:
    """`first` and `gap` seconds; tokens come `per_event` at a time; what was asked is kept in `bodies`."""

    first: float = 0.02
    gap: float = 0.004
    per_event: int = 1
    usage: bool = True
    fail: dict[int, Any] = field(default_factory=dict)
    at_once: int = 10_000
    bodies: list[dict] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    """Of each request: when it came, and when each event went out."""
    open: int = 0
    most_open: int = 0
    gate: asyncio.Semaphore | None = None
    metrics: Any = None
    """Gives the text of /metrics; None: there is no such page."""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}, {"id": "other"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.times.append([time.perf_counter()])
        number = len(self.bodies) - 1
        kind = self.fail.get(number)
        if isinstance(kind, int):
            return web.json_response({"error": {"message": "no"}}, status=kind)
        self.gate = self.gate or asyncio.Semaphore(self.at_once)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async with self.gate:
                return await self._stream(request, body, kind, self.times[number])
        finally:
            self.open -= 1

    async def _stream(self, request: web.Request, body: dict, kind: Any, times: list[float]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        loop = asyncio.get_running_loop()
        due, sent, total = loop.time() + self.first, 0, body["max_tokens"]
        prompt = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 7
        while sent < total:
            await asyncio.sleep(max(0.0, due - loop.time()))
            count = min(self.per_event, total - sent)
            sent += count
            due += self.gap * count
            text = "word " * count
            choice: dict = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
            if body.get("return_token_ids"):
                choice["token_ids"] = list(range(count))
            event = {"choices": [choice]}
            if self.usage and body["stream_options"].get("continuous_usage_stats"):
                event["usage"] = {"prompt_tokens": prompt, "completion_tokens": sent}
            times.append(time.perf_counter())
            await self._send(response, event)
            if kind == "break":
                request.transport.close()
                return response
            if kind == "event":
                await self._send(response, {"error": {"message": "lost"}})
                return response
        if self.usage:
            await self._send(response, {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": sent}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, event: dict) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextlib.asynccontextmanager
async def running(fake: Fake):
    """-> the base URL."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/v1/models", fake.models)
    app.router.add_get("/health", fake.models)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=fake.metrics()) if fake.metrics else web.Response(status=404)

    app.router.add_get("/metrics", metrics)
    app.router.add_post("/v1/completions", fake.complete)
    app.router.add_post("/v1/chat/completions", fake.complete)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
