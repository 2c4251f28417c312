"""From token deltas to text. Owns: per-output detokenising, stop strings, logprobs with text, and gathering results.

Must not know: the scheduler, threads, HTTP. One OutputProcessor serves one engine, one Accumulator one caller.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import msgspec

from tokenmill.core.request import (
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    ScoredRows,
    TextDelta,
    TokenDelta,
    TokenLogprob,
)
from tokenmill.core.step import RowLogprobs
from tokenmill.text.codec import Tokenizer
from tokenmill.text.stop import StopChecker, Stops
from tokenmill.text.stream_decoder import StreamDecoder


@dataclass(slots=True)
class Track:
    """The decoding state of one output of a request."""

    decoder: StreamDecoder | None
    stop: StopChecker | None
    num_tokens: int = 0
    ended: bool = False


@dataclass(slots=True)
class OpenRequest:
    """A request with outputs still to come."""

    request: Request
    tracks: dict[int, Track] = field(default_factory=dict)


class OutputProcessor:
    """Turns TokenDeltas into TextDeltas; `stopped` names the outputs that a stop string has ended."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.open: dict[str, OpenRequest] = {}
        self.stopped: list[tuple[str, int]] = []
        self._stops: WeakValueDictionary[tuple[str, ...], Stops] = WeakValueDictionary()
        """The stop strings of outputs in progress, shared by the outputs of a request."""

    def add(self, request: Request) -> None:
        """Expect deltas of this request."""
        self.open[request.id] = OpenRequest(request)

    def drop(self, request_id: str) -> None:
        """Expect no more deltas of this request."""
        self.open.pop(request_id, None)

    def process(self, deltas: Iterable[TokenDelta]) -> list[TextDelta]:
        """The text of each delta; deltas of unknown requests and of ended outputs are left out."""
        texts = []
        for delta in deltas:
            entry = self.open.get(delta.request_id)
            if entry is None:
                continue
            track = entry.tracks.get(delta.index)
            if track is None or not track.ended:
                try:
                    if track is None:
                        track = entry.tracks[delta.index] = self._track(entry.request)
                    texts.append(self._text(entry.request, track, delta))
                except Exception as error:  # an error in one output's text must not end the others
                    entry.tracks[delta.index] = Track(None, None, ended=True)
                    texts.append(self._broken(delta, error))
        return texts

    def _broken(self, delta: TokenDelta, error: Exception) -> TextDelta:
        if delta.finish is None:
            self.stopped.append((delta.request_id, delta.index))
        text = f"its text could not be made ({type(error).__name__})"
        return TextDelta(request_id=delta.request_id, index=delta.index, finish_reason="error", error=text)

    def _track(self, request: Request) -> Track:
        params = request.params
        if self.tokenizer is None or not params.detokenize:
            return Track(None, None)
        decoder = StreamDecoder(
            self.tokenizer, request.prompt_ids, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        if not params.stops:
            return Track(decoder, None)
        words = tuple(params.stops)
        stops = self._stops.get(words)
        if stops is None:
            stops = self._stops[words] = Stops(words)
        return Track(decoder, StopChecker(stops, params.include_stop_str_in_output))

    def _text(self, request: Request, track: Track, delta: TokenDelta) -> TextDelta:
        out = TextDelta(
            request_id=delta.request_id,
            index=delta.index,
            token_ids=delta.tokens,
            num_cached_tokens=delta.cached,
            score=delta.score,
            pooled=delta.pooled,
            error=delta.error,
            drafted=delta.drafted,
            accepted=delta.accepted,
            saved=delta.saved,
        )
        if track.decoder is None:
            track.num_tokens += len(delta.tokens)
            stopped = None
        else:
            stopped = self._decode(request, track, delta, out)
        shown = request.params.detokenize
        if delta.logprobs is not None and request.params.logprobs is not None:
            out.logprobs = [self._logprobs(row, shown) for row in delta.logprobs[: len(out.token_ids)]]
        elif delta.logprobs is not None:
            out.score = sum(row.logprobs[0] for row in delta.logprobs[: len(out.token_ids)])
        if delta.prompt_logprobs is not None:
            out.prompt_logprobs = ScoredRows(delta.prompt_logprobs, partial(self._logprobs, shown=shown))
        if stopped is not None:
            out.finish_reason, out.stop_reason = "stop", stopped
            if delta.finish is None:
                self.stopped.append((delta.request_id, delta.index))
        elif delta.finish is not None:
            out.finish_reason = delta.finish
            if delta.finish == "stop" and delta.stop_token in (request.params.stop_token_ids or ()):
                out.stop_reason = delta.stop_token
        track.ended = out.finish_reason is not None
        return out

    def _decode(self, request: Request, track: Track, delta: TokenDelta, out: TextDelta) -> str | None:
        """Fill in the delta's text; returns the stop string that ended it, if one did."""
        params, decoder = request.params, track.decoder
        assert decoder is not None
        tokens = delta.tokens
        hidden = delta.stop_token is not None and not params.include_stop_str_in_output
        shown = tokens[:-1] if hidden else tokens
        if track.stop is None:
            track.num_tokens += len(tokens)
            out.text = decoder.push(shown)
        else:
            for n, token in enumerate(shown):
                track.num_tokens += 1
                text = decoder.push([token])
                if track.num_tokens < params.min_tokens:
                    out.text += text
                    continue
                emit, stopped = track.stop.push(text)
                out.text += emit
                if stopped is not None:
                    out.token_ids = tokens[: n + 1]
                    return stopped
        if delta.finish is not None:
            rest = decoder.flush()
            if track.stop is None:
                out.text += rest
            else:
                emit, stopped = track.stop.push(rest)
                out.text += emit
                if stopped is not None:
                    return stopped
                out.text += track.stop.flush()
        return None

    def _logprobs(self, row: RowLogprobs, shown: bool) -> dict[int, TokenLogprob]:
        """The chosen token first; it appears once even if it is among the likeliest. shown: add the tokens' text."""
        found: dict[int, TokenLogprob] = {}
        for place, (token, logprob) in enumerate(zip(row.ids, row.logprobs, strict=True)):
            if token not in found:
                rank = row.rank if place == 0 else place
                found[token] = TokenLogprob(logprob, rank, self._show(token) if shown else None)
        return found

    def _show(self, token: int) -> str | None:
        if self.tokenizer is None or token >= self.tokenizer.vocab_size:
            return None
        return self.tokenizer.decode([token], skip_special_tokens=False)


class Accumulator:
    """Adds up one request's TextDeltas to a RequestOutput."""

    def __init__(self, request: Request) -> None:
        self.request = request
        params = request.params
        self.expected = params.num_outputs
        self.outputs: dict[int, CompletionOutput] = {}
        self.ended = 0
        self._prompt_rows: list[dict[int, TokenLogprob] | None] = [None]
        self._unread: list[ScoredRows] = []
        self.metrics = RequestMetrics(arrival=request.arrival)
        self.pooled: list[float] | None = None

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
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + delta.score
        elif delta.logprobs is not None:
            pairs = zip(delta.logprobs, delta.token_ids, strict=False)
            gained = sum(entry[token].logprob for entry, token in pairs)
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + gained
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
        outputs = [self.outputs[i] for i in sorted(self.outputs)]
        if params.best_of is not None and params.best_of > params.n and not params.use_beam_search:
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
