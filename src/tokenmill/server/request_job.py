"""One HTTP request's work. Owns: its engine requests, their merged deltas, its deadline, its places in the gate, and
its figures.

Endpoints differ in how they make a prompt and what their answers look like; everything in between is here.
Must not know: routes, shapes of answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill.core.errors import (
    OUR_FAULT,
    OVER_LIMIT,
    OWN_FAULT,
    TOO_FEW,
    ContextError,
    EngineDeadError,
    ParameterError,
    TooLargeError,
)
from tokenmill.core.request import CompletionOutput, Request, SamplingParams, TextDelta
from tokenmill.engine.interfaces.outputs import Accumulator
from tokenmill.engine.interfaces.prompts import make_request
from tokenmill.server.backend import UNAVAILABLE, DeltaStream
from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError
from tokenmill.server.history import PromptFigures, Record
from tokenmill.server.many_models.sleepers import without_folders
from tokenmill.server.metrics import Finished

log = logging.getLogger("tokenmill.server")
MOST_COPIED = 16 << 20
"""Most bytes for a request's parameters times its prompts, and for what its outputs repeat of the prompts."""
TOKEN = 8
"""Bytes of a token id in an answer."""
MOST_LOGPROBS = 1 << 19
"""Most log-probabilities that one answer may hold until it is complete."""
NUMBER = 24
"""Bytes of a vector's component in an answer."""
ENTRY = 64
"""Bytes of a log-probability in an answer."""
COUNTED = 32
"""Prompts that are counted in one go when a job ends."""
LISTED = 1024
"""So many tokens of a request's prompts put off its next prompt as if it had come a second later: whoever asks for
little while a long list is read need not wait for the rest of it."""
BAD_WORD = 8192
"""The work for one bad word, expressed as bytes of parameters that cost the same."""


@dataclass(slots=True)
class PromptTask:
    """One prompt of the job. `index`: its place among the job's prompts."""

    request: Request
    index: int
    figures: PromptFigures | None = None
    ended: int = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, of all outputs."""
        return self.figures.output_tokens if self.figures is not None else 0

    @property
    def cached(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.figures.cached_tokens if self.figures is not None else 0

    @property
    def has_its_scores(self) -> bool:
        """Have the prompt's scores come, if any are wanted? They come before the first token."""
        begun = self.figures is not None and self.figures.timeline.first_token is not None
        return self.request.params.prompt_logprobs is None or begun

    @property
    def num_outputs(self) -> int:
        """Outputs that the engine makes (best_of counts all candidates)."""
        return self.request.params.num_outputs


Batch = list[tuple[PromptTask, TextDelta]]
"""Deltas that came together."""
Gathered = list[tuple[PromptTask, Accumulator]]
"""Complete outputs, in the order of their prompts."""


class Job:
    """The work of one HTTP request, which the gate counts from creation until `close`."""

    def __init__(self, context: Context, tenant: str) -> None:
        context.gate.enter(tenant)
        self.context, self.backend, self.gate = context, context.backend, context.gate
        self.parent: dict[str, str] = {}
        self.adapter = 0
        """The number of the adapter that the request's model name stands for; 0: none."""
        self.priority: int | None = None
        """The priority from a header. It overrides the body's."""
        self.tenant = tenant
        self.count = 1
        """Outputs that count in the gate."""
        self.record: Record | None = None
        self.called: str | None = None
        """The id in the answer, if it is not the name of the work."""
        self.asked = self.began = time.monotonic()
        self.inbox = DeltaStream(tenant)
        self.tasks: dict[str, PromptTask] = {}
        self.deadline: float | None = None
        self.on_sent: Callable[[], None] | None = None
        """Called when the engines have all of it."""
        self.closed = False
        self.failed = False
        self.size = 0
        """Bytes of the request's body."""
        self.copies = 1
        """How often the answer repeats each prompt's scores."""
        self.held = 0
        """Log-probabilities that wait until the answer is complete."""
        self.silent = False
        """Only the prompts are read. The token that the engine needs for this is no output: nobody sees or pays it."""
        self.tells_cuts = False
        """The answer can say that somebody ended it early. Without that a part would pass for the whole."""

    def grow(self, count: int, param: str | None) -> None:
        """Take more places in the gate, because the field `param` gives the job `count` outputs."""
        if count > self.count:
            self.gate.grow(self.tenant, count - self.count, self.count, param)
            self.count = count

    def set_deadline(self, seconds: float | None) -> None:
        """End the job this long after its request came in."""
        self.deadline = None if not seconds else self.asked + seconds

    async def start(
        self,
        name: str,
        prompts: list[tuple[str | None, list[int]]],
        params: SamplingParams,
        *,
        pooling: str | None = None,
        scored_from: Sequence[int] = (),
        **fields: Any,
    ) -> None:
        """Open one engine request per prompt. An error in any of them is raised before a byte is sent.
        `pooling`: it asks for a vector. `scored_from`: for each prompt, the first token whose score is wanted."""
        self._check_sizes(prompts, params, text=pooling is None)
        fields = {"adapter": self.adapter, **fields}
        fields["priority"] = self._priority(fields.get("priority", 0))
        if self.context.scoped:
            fields["salt"] = f"{self.tenant}/{fields.get('salt', '')}"
        before = 0
        for index, (text, ids) in enumerate(prompts):
            await asyncio.sleep(0)  # other requests get their turn after every thousand prompts
            arrival, before = self.began + before / LISTED, before + len(ids)
            unique = f"{name}-{index}-{uuid.uuid4().hex[:8]}"
            start = scored_from[index] if scored_from else 0
            request = make_request(unique, text, ids, params, scored_from=start, arrival=arrival, **fields)
            task = self.tasks[unique] = PromptTask(request, index)
            timeline = await self.backend.open(request, self.inbox, pooling)
            task.figures = PromptFigures(timeline, len(request.prompt_ids))
            if self.record is None:
                self.record = self.context.history.begin(self.called or name, self.tenant, self.began)
            self.record.prompts.append(task.figures)
        if self.on_sent is not None:
            self.on_sent()

    def _priority(self, asked: int) -> int:
        """The priority that a header or else the body asks for, if this server has priorities."""
        priority = asked if self.priority is None else self.priority
        if priority and not self.backend.info.priorities:
            raise ParameterError("priority needs a server started with --scheduling-policy priority.", param="priority")
        return priority

    async def embed(
        self, name: str, prompts: list[tuple[str | None, list[int]]], pooling: str, **fields: Any
    ) -> list[list[float]]:
        """One vector per prompt."""
        await self.start(name, prompts, SamplingParams(max_tokens=1), pooling=pooling, **fields)
        vectors: dict[int, list[float]] = {}
        async for batch in self.batches():
            for task, delta in batch:
                if delta.pooled is not None:
                    vectors[task.index] = delta.pooled
        return [vectors[i] for i in range(len(prompts))]

    @staticmethod
    def check_repeated(size: int, outputs: int) -> None:
        """Refuse an answer that would repeat too much of the request: `size` bytes in each of `outputs`."""
        if outputs > 1 and size * outputs > MOST_COPIED:
            raise TooLargeError(
                f"{outputs} outputs would repeat {size} bytes of the prompt each, over {MOST_COPIED >> 20} MiB in all.",
                param="n",
            )

    def _check_sizes(self, prompts: list[tuple[str | None, list[int]]], params: SamplingParams, *, text: bool) -> None:
        """Refuse oversized requests early: admission would first read them to the end."""
        most = self.backend.info.max_model_len
        new = params.max_tokens or 0
        for _, ids in prompts:
            if len(ids) + text > most:
                raise ContextError(most, len(ids), text=text)
            if len(ids) + new > most and text:
                raise ContextError(most, len(ids), new)
        if params.prompt_logprobs is not None:
            count = (params.prompt_logprobs + 1) * sum(len(ids) for _, ids in prompts)
            self._check_held(self.copies * count, "prompt_logprobs")
        if len(prompts) > 1:  # every prompt has a copy of the parameters
            size = len(msgspec.msgpack.encode(params)) + BAD_WORD * len(params.bad_words or ())
            if size * len(prompts) > MOST_COPIED:
                raise TooLargeError("The parameters are too large for so many prompts in one request.", param="prompt")

    @staticmethod
    def _check_held(count: int, param: str) -> None:
        if count > MOST_LOGPROBS:
            raise TooLargeError(
                f"The answer would hold {count} log-probabilities or more; the limit is {MOST_LOGPROBS}. Ask for "
                "fewer, or for fewer or shorter texts.",
                param=param,
            )

    def _hold(self, count: int, param: str) -> None:
        self.held += count
        self.gate.hold(count)
        self._check_held(self.held, param)

    def batches(self) -> AsyncIterator[Batch]:
        """Deltas for the client as they come, until every output has ended. An engine's error raises HttpError(500).
        With best_of, only the chosen candidates appear, once all candidates have ended."""
        shown = all(task.num_outputs == task.request.params.n for task in self.tasks.values())
        return self._batches() if shown else self._chosen()

    async def _chosen(self) -> AsyncIterator[Batch]:
        scored: Batch = []
        gathered = await self.gather(scored)
        yield scored
        for task, accumulator in gathered:
            yield [(task, _whole(task.request.id, out)) for out in accumulator.output().outputs]

    async def _batches(self) -> AsyncIterator[Batch]:
        """All deltas, including those of all candidates of best_of."""
        left = sum(task.num_outputs for task in self.tasks.values())
        while left:
            async with asyncio.timeout(None if self.deadline is None else self.deadline - time.monotonic()):
                batch = await self.inbox.batch()
            now = time.monotonic()
            found = []
            for delta in batch:
                task = self.tasks[delta.request_id]
                self._note(task, delta, now)
                if delta.finish_reason is not None:
                    left -= 1
                found.append((task, delta))
            yield found

    def _note(self, task: PromptTask, delta: TextDelta, now: float) -> None:
        figures = task.figures
        if figures is None:
            return
        if delta.error is not None:
            self.failed = True
            figures.reasons.append("error")
            log.warning("request failed", extra={"data": {"id": task.request.id, "reason": "error"}})
            raise _failure(delta.error, task.request.id)
        timeline = figures.timeline
        if delta.token_ids:
            if timeline.first_token is None:
                timeline.first_token = now
                self.context.metrics.saw_first(now - timeline.arrival)
            elif timeline.last_token is not None:
                self.context.metrics.saw_gap(now - timeline.last_token, timeline.engine)
            timeline.last_token = now
            self._count_tokens(task, figures, delta)
        if delta.prompt_logprobs is not None:
            self._hold(self.copies * delta.prompt_logprobs.count, "prompt_logprobs")
        figures.drafted_tokens += delta.drafted
        figures.accepted_tokens += delta.accepted
        figures.draft_saved_s += delta.saved
        if delta.num_cached_tokens > figures.cached_tokens:
            figures.cached_tokens = delta.num_cached_tokens
        if delta.finish_reason is not None:
            task.ended += 1
            figures.reasons.append(delta.finish_reason)
            if delta.finish_reason == "abort" and not (self.tells_cuts and task.has_its_scores):
                raise HttpError(
                    503, "The model was put to sleep before the answer was complete; try again.", retry_after=1
                )

    def _count_tokens(self, task: PromptTask, figures: PromptFigures, delta: TextDelta) -> None:
        if self.silent:
            return
        figures.output_tokens += len(delta.token_ids)
        if task.num_outputs > 1:
            by_output = figures.by_output
            by_output[delta.index] = by_output.get(delta.index, 0) + len(delta.token_ids)

    async def gather(self, scored: Batch | None = None) -> Gathered:
        """The outputs of all prompts, in prompt order. `scored` receives deltas that are only about prompts."""
        found = {task.request.id: (task, Accumulator(task.request)) for task in self.tasks.values()}
        async for batch in self._batches():
            for task, delta in batch:
                if delta.logprobs is not None:
                    self._hold(sum(map(len, delta.logprobs)), "logprobs")
                if scored is not None and delta.prompt_logprobs is not None:
                    rows = delta.prompt_logprobs
                    scored.append((task, TextDelta(request_id=task.request.id, index=0, prompt_logprobs=rows)))
                found[task.request.id][1].add(delta)
        return sorted(found.values(), key=lambda pair: pair[0].index)

    @property
    def weight(self) -> int:
        """The bytes that the written answer may take."""
        prompts = sum(len(task.request.prompt_ids) * task.num_outputs for task in self.tasks.values())
        generated = sum(task.num_tokens for task in self.tasks.values())
        return ENTRY * (self.held + prompts // 8) + TOKEN * generated

    def abandon(self) -> None:
        """Tell the engines at once that the client has left. `close` follows when the handler has been cancelled."""
        for task in self.tasks.values():
            if task.ended < task.num_outputs:
                self.backend.abandon(task.request.id)

    def close(self) -> None:
        """End all of the job's work, free its places and count its figures, whatever has happened. It may be called
        twice."""
        if self.closed:
            return
        self.closed = True
        used = 0
        now = time.monotonic()
        ends: list[Finished] = []
        for task in self.tasks.values():
            used += task.num_tokens + len(task.request.prompt_ids)
            figures = task.figures
            if figures is None:
                self.backend.abandon(task.request.id)
                continue
            if task.ended < task.num_outputs:
                self.backend.abandon(task.request.id)
                figures.reasons.append("error" if self.failed else "abort")
            figures.timeline.ended = now
            ends.append(
                Finished(
                    task.request,
                    figures.timeline,
                    figures.output_tokens,
                    figures.longest,
                    figures.reasons[-1],
                    now,
                    figures.cached_tokens,
                )
            )
            if (recorder := self.context.recorder) is not None:
                each = int(figures.timeline.first_token is not None) if self.silent else figures.output_tokens
                recorder.note(task.request, self.began, each // task.num_outputs)
        self._count(ends)
        if self.record is not None:
            self.context.history.end(self.record, now)
            if (traces := self.context.traces) is not None:
                traces.note(self.record, self.parent)
        self.gate.let_go(self.held)
        self.gate.leave(self.tenant, self.count, used)

    # ------------------------------------------------------------ figures

    def _count(self, ends: list[Finished]) -> None:
        """Count ended prompts, a few at a time: a thousand take half a second, in which nobody else would be heard."""
        for end in ends[:COUNTED]:
            self.context.metrics.finished(end)
        if left := ends[COUNTED:]:
            asyncio.get_running_loop().call_soon(self._count, left)

    def usage(self, said: int | None = None) -> dict[str, Any]:
        """OpenAI's usage object for all prompts so far. `said`: the output tokens to report, if not all."""
        prompt = sum(len(task.request.prompt_ids) for task in self.tasks.values())
        output = sum(task.num_tokens for task in self.tasks.values()) if said is None or self.silent else said
        cached = sum(task.cached for task in self.tasks.values())
        found: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        figures = [task.figures for task in self.tasks.values() if task.figures is not None]
        if drafted := sum(each.drafted_tokens for each in figures):
            right = sum(each.accepted_tokens for each in figures)
            found["completion_tokens_details"] = {
                "accepted_prediction_tokens": right,
                "rejected_prediction_tokens": drafted - right,
                "prediction_saved_ms": round(1e3 * sum(each.draft_saved_s for each in figures), 3),
            }
        if (prices := self.context.prices) is not None:
            found["cost"] = prices.cost(prompt, cached, output)
        return found

    def timings(self) -> dict[str, float | None]:
        """The phases of the first prompt in milliseconds, under the names of vLLM's metrics per request."""
        task = next(iter(self.tasks.values()))
        t = task.figures.timeline if task.figures is not None else None
        if task.figures is None or t is None or t.first_token is None or t.last_token is None:
            return {"time_to_first_token_ms": None}
        span = t.last_token - t.first_token
        return {
            "time_to_first_token_ms": (t.first_token - self.began) * 1e3,
            "generation_time_ms": span * 1e3,
            "queue_time_ms": ((t.started or t.first_token) - t.arrival) * 1e3,
            "mean_itl_ms": span * 1e3 / (task.figures.longest - 1) if task.figures.longest > 1 else None,
            "tokens_per_second": task.num_tokens / max(1e-9, t.last_token - self.began),
        }


def _whole(request_id: str, out: CompletionOutput) -> TextDelta:
    """A complete output as one delta."""
    return TextDelta(
        request_id=request_id,
        index=out.index,
        text=out.text,
        token_ids=out.token_ids,
        logprobs=out.logprobs,
        finish_reason=out.finish_reason,
        stop_reason=out.stop_reason,
    )


def _failure(error: str, request_id: str) -> Exception:
    """The exception for an engine's error: try again later; the request cannot be answered as it is; or it failed."""
    if error.startswith(UNAVAILABLE):
        return EngineDeadError(error)
    if error.startswith((OWN_FAULT, TOO_FEW, OVER_LIMIT)):
        return HttpError(400, error)
    if error.startswith(OUR_FAULT):
        return HttpError(503, error, retry_after=1)
    return HttpError(500, f"The request {request_id} could not be computed: {without_folders(error).rstrip('.')}.")
