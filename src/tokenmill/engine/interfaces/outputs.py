"""Gathering results. Owns: adding up one request's text deltas to a RequestOutput.

Must not know: how deltas are made (steps/deliveries.py), threads, HTTP. One Accumulator serves one caller.
"""

from __future__ import annotations

import time

import msgspec

from tokenmill.core.params import LoRARequest, RequestOutputKind
from tokenmill.core.request import (
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    ScoredRows,
    TextDelta,
    TokenLogprob,
)


class Accumulator:
    """Adds up one request's TextDeltas to a RequestOutput. lora_request: its adapter, as the caller named it."""

    def __init__(self, request: Request, lora_request: LoRARequest | None = None) -> None:
        self.request = request
        self.lora_request = lora_request
        params = request.params
        self.expected = params.num_outputs
        self.outputs: dict[int, CompletionOutput] = {}
        self.ended = 0
        self._prompt_rows: list[dict[int, TokenLogprob] | None] = [None]
        self._unread: list[ScoredRows] = []
        self.metrics = RequestMetrics(arrival=request.arrival)
        self.pooled: list[float] | None = None
        self._told = 0
        """How many rows of prompt_logprobs `news` has told of."""

    @property
    def kind(self) -> int:
        """What to tell after a step. Of best_of candidates only the end shows which are told of."""
        return RequestOutputKind.FINAL_ONLY if self._ranked else self.request.params.output_kind

    @property
    def _ranked(self) -> bool:
        """Are these candidates, of which the likeliest are the outputs?"""
        params = self.request.params
        return params.best_of is not None and params.best_of > params.n and not params.use_beam_search

    @property
    def finished(self) -> bool:
        """Has every output ended?"""
        return self.ended == self.expected

    def add(self, delta: TextDelta) -> None:
        """Take in one delta."""
        out = self.outputs.get(delta.index)
        if out is None:
            out = self.outputs[delta.index] = CompletionOutput(index=delta.index, token_ids=[])
        now = time.perf_counter()
        if delta.token_ids:
            out.text += delta.text
            out.token_ids += delta.token_ids
            self.metrics.first_token = self.metrics.first_token or now
            self.metrics.last_token = now
        elif delta.text:
            out.text += delta.text
        if delta.logprobs is not None:
            out.logprobs = (out.logprobs or []) + delta.logprobs
        if delta.score is not None:
            out.cumulative_logprob = delta.score
        elif delta.logprobs is not None:
            total = out.cumulative_logprob or 0.0
            for entry, token in zip(delta.logprobs, delta.token_ids, strict=False):
                total += entry[token].logprob  # one by one: its last bit must not depend on how many come at a time
            out.cumulative_logprob = total
        if delta.prompt_logprobs is not None:
            self._unread.append(delta.prompt_logprobs)
        self.metrics.num_cached_tokens = max(self.metrics.num_cached_tokens, delta.num_cached_tokens)
        self.metrics.drafted_tokens += delta.drafted
        self.metrics.accepted_tokens += delta.accepted
        self.metrics.draft_saved_s += delta.saved
        self.pooled = delta.pooled or self.pooled
        if delta.finish_reason is not None:
            out.finish_reason = delta.finish_reason
            out.stop_reason = delta.error if delta.error is not None else delta.stop_reason
            self.ended += 1

    def output(self) -> RequestOutput:
        """Everything so far; with best_of, the n likeliest per token once all have ended. Later deltas do not change an
        output that was handed out."""
        request, params = self.request, self.request.params
        for out in self.outputs.values():
            out.lora_request = self.lora_request
        outputs = [self.outputs[i] for i in sorted(self.outputs)]
        if self._ranked:
            if self.finished:
                outputs.sort(key=lambda o: -(o.cumulative_logprob or 0.0) / max(1, len(o.token_ids)))
                outputs = outputs[: params.n]
                for index, out in enumerate(outputs):
                    out.index = index
            else:
                outputs = []
        metrics = self.metrics
        if not self.finished:
            outputs = [_as_it_is(out) for out in outputs]
            metrics = msgspec.structs.replace(metrics)
        return RequestOutput(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=self._prompt_logprobs(),
            num_cached_tokens=self.metrics.num_cached_tokens,
            metrics=metrics,
            lora_request=self.lora_request,
        )

    def news(self, deltas: list[TextDelta]) -> RequestOutput:
        """The new tokens alone; `deltas` have been added, and no news has told of them yet. Sums are of the whole."""
        piece = Accumulator(self.request, self.lora_request)
        for delta in deltas:
            piece.add(delta)
        new = piece.output()
        for out in new.outputs:
            out.cumulative_logprob = self.outputs[out.index].cumulative_logprob
        rows = self._prompt_logprobs()
        if rows is not None:
            rows, self._told = rows[self._told :], len(rows)
        return msgspec.structs.replace(
            new,
            finished=self.finished,
            prompt_logprobs=rows,
            num_cached_tokens=self.metrics.num_cached_tokens,
            metrics=msgspec.structs.replace(self.metrics),
        )

    def _prompt_logprobs(self) -> list[dict[int, TokenLogprob] | None] | None:
        if self.request.params.prompt_logprobs is None:
            return None
        for rows in self._unread:
            self._prompt_rows += rows
        self._unread.clear()
        return self._prompt_rows if self.finished else self._prompt_rows[:]


def _as_it_is(out: CompletionOutput) -> CompletionOutput:
    """A copy that does not grow with later deltas."""
    logprobs = None if out.logprobs is None else out.logprobs[:]
    return msgspec.structs.replace(out, token_ids=out.token_ids[:], logprobs=logprobs)
