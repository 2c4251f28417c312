"""One HTTP request's work. Owns: its engine requests, their merged deltas, deadline, places in the gate, and figures.

Chat and completions differ in how a prompt is made and how answers look; everything between is here.
Must not know: HTTP, shapes of answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.errors import EngineDeadError
from tokenmill.core.request import Request, SamplingParams, TextDelta
from tokenmill.engine.outputs import Accumulator
from tokenmill.engine.prompts import make_request
from tokenmill.server.backend import UNAVAILABLE, Backend, DeltaStream, Timeline
from tokenmill.server.errors import HttpError
from tokenmill.server.gate import Gate
from tokenmill.server.metrics import Finished, Metrics

log = logging.getLogger("tokenmill.server")


@dataclass(slots=True)
class Task:
    """One prompt of the job. `index`: its place among the job's prompts."""

    request: Request
    index: int
    timeline: Timeline | None = None
    num_tokens: int = 0
    cached: int = 0
    ended: int = 0
    reasons: list[str] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        """Outputs that the engine makes (best_of counts all candidates)."""
        params = self.request.params
        return params.n if params.use_beam_search else params.num_sequences


class Job:
    """`count`: outputs that count against the gate; entered on creation, left by `close`."""

    def __init__(self, backend: Backend, gate: Gate, metrics: Metrics, tenant: str, count: int) -> None:
        gate.enter(tenant, count)
        self.backend, self.gate, self.metrics, self.tenant, self.count = backend, gate, metrics, tenant, count
        self.began = time.monotonic()
        self.inbox = DeltaStream()
        self.tasks: dict[str, Task] = {}
        self.deadline: float | None = None
        self.closed = False
        self.failed = False

    def grow(self, count: int) -> None:
        """The job turned out to have more outputs than one."""
        self.gate.enter(self.tenant, count)
        self.count += count

    def set_deadline(self, seconds: float | None) -> None:
        """End the job this long after it came in."""
        self.deadline = None if not seconds else self.began + seconds

    async def start(
        self, name: str, prompts: list[tuple[str | None, list[int]]], params: SamplingParams, **fields: Any
    ) -> None:
        """Open one engine request per prompt; what is wrong with any of them raises before a byte is sent."""
        for index, (text, ids) in enumerate(prompts):
            unique = f"{name}-{index}-{uuid.uuid4().hex[:8]}"
            request = make_request(unique, text, ids, params, arrival=self.began, **fields)
            task = self.tasks[request.id] = Task(request, index)
            task.timeline = await self.backend.open(request, self.inbox)

    async def embed(
        self, prompts: list[tuple[str | None, list[int]]], pooling: str, **fields: Any
    ) -> list[list[float]]:
        """One vector per prompt."""
        for index, (text, ids) in enumerate(prompts):
            request = make_request(uuid.uuid4().hex, text, ids, SamplingParams(max_tokens=1), **fields)
            task = self.tasks[request.id] = Task(request, index)
            task.timeline = await self.backend.open(request, self.inbox, pooling)
        vectors: dict[int, list[float]] = {}
        async for batch in self.batches():
            for task, delta in batch:
                if delta.pooled is not None:
                    vectors[task.index] = delta.pooled
        return [vectors[i] for i in range(len(prompts))]

    async def batches(self) -> AsyncIterator[list[tuple[Task, TextDelta]]]:
        """Everything that has come, until each output has ended. An engine's error raises HttpError(500)."""
        left = sum(task.num_outputs for task in self.tasks.values())
        while left:
            batch = await self._next()
            now = time.monotonic()
            found = []
            for delta in batch:
                task = self.tasks[delta.request_id]
                self._note(task, delta, now)
                if delta.finish_reason is not None:
                    left -= 1
                found.append((task, delta))
            yield found

    async def _next(self) -> list[TextDelta]:
        if self.deadline is None:
            return await self.inbox.batch()
        async with asyncio.timeout(self.deadline - time.monotonic()):
            return await self.inbox.batch()

    def _note(self, task: Task, delta: TextDelta, now: float) -> None:
        if delta.error is not None:
            self.failed = True
            task.reasons.append("error")
            log.warning("request failed", extra={"data": {"id": task.request.id, "reason": "error"}})
            raise _failure(delta.error, task.request.id)
        timeline = task.timeline
        if timeline is not None and delta.token_ids:
            if timeline.first_token is None:
                timeline.first_token = now
            elif timeline.last_token is not None:
                self.metrics.saw_gap(now - timeline.last_token)
            timeline.last_token = now
            task.num_tokens += len(delta.token_ids)
        task.cached = max(task.cached, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            task.ended += 1
            task.reasons.append(delta.finish_reason)

    async def gather(self) -> list[tuple[Task, Accumulator]]:
        """All prompts' outputs, in prompt order."""
        found = {task.request.id: (task, Accumulator(task.request)) for task in self.tasks.values()}
        async for batch in self.batches():
            for task, delta in batch:
                found[task.request.id][1].add(delta)
        return sorted(found.values(), key=lambda pair: pair[0].index)

    def close(self) -> None:
        """Whatever happened: nothing of this job goes on, its places are free, its figures are counted. Idempotent."""
        if self.closed:
            return
        self.closed = True
        used = 0
        now = time.monotonic()
        for task in self.tasks.values():
            used += task.num_tokens + len(task.request.prompt_ids)
            if task.ended < task.num_outputs:
                self.backend.abandon(task.request.id)
                task.reasons.append("error" if self.failed else "abort")
            if task.timeline is not None:
                self.metrics.finished(Finished(task.request, task.timeline, task.num_tokens, task.reasons[-1], now))
        self.gate.leave(self.tenant, self.count, used)

    # ------------------------------------------------------------ figures

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object for all prompts so far."""
        prompt = sum(len(task.request.prompt_ids) for task in self.tasks.values())
        output = sum(task.num_tokens for task in self.tasks.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(task.cached for task in self.tasks.values())},
        }

    def timings(self) -> dict[str, float | None]:
        """Milliseconds of the first prompt's life, as vLLM's per-request metrics name them."""
        task = next(iter(self.tasks.values()))
        t = task.timeline
        if t is None or t.first_token is None or t.last_token is None:
            return {"time_to_first_token_ms": None}
        span = t.last_token - t.first_token
        return {
            "time_to_first_token_ms": (t.first_token - self.began) * 1e3,
            "generation_time_ms": span * 1e3,
            "queue_time_ms": ((t.started or t.first_token) - t.arrival) * 1e3,
            "mean_itl_ms": span * 1e3 / (task.num_tokens - 1) if task.num_tokens > 1 else None,
            "tokens_per_second": task.num_tokens / max(1e-9, t.last_token - self.began),
        }


def _failure(error: str, request_id: str) -> Exception:
    """What the client is told: try again, or that this request is at fault."""
    if error.startswith(UNAVAILABLE):
        return EngineDeadError(error)
    return HttpError(500, f"The request {request_id} could not be computed: {error}.")
