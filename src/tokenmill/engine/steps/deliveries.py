"""Who hears of which request. Owns: turning token deltas into text, stop strings, logprobs with text, and giving each
delta to whoever asked for it.

The engine may be in this process or in another. Must not know: engines, how messages travel, HTTP; imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

from tokenmill.core.request import Request, ScoredRows, TextDelta, TokenDelta, TokenLogprob
from tokenmill.core.step import RowLogprobs
from tokenmill.text.codec import Tokenizer
from tokenmill.text.stop import StopChecker, Stops
from tokenmill.text.stream_decoder import StreamDecoder

Hear = Callable[[TextDelta], None]


@dataclass(slots=True)
class Track:
    """The decoding state of one output of a request. score: the sum of log-probabilities that rank candidates."""

    decoder: StreamDecoder | None
    stop: StopChecker | None
    num_tokens: int = 0
    ended: bool = False
    score: float = 0.0


@dataclass(slots=True)
class Asked:
    """A request with outputs still to come: who receives them, how many there are, and how far each is decoded."""

    request: Request
    hear: Hear
    left: int
    tracks: dict[int, Track] = field(default_factory=dict)


class Deliveries:
    """Takes token deltas and gives each text delta to whoever asked for it. abort: ends an output whose text has
    stopped.

    mistake: called with a request whose delivery raised an unexpected exception; other requests get their deltas."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        abort: Callable[[str, int], object],
        mistake: Callable[[str], object] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.abort = abort
        self.mistake = mistake
        self.asked: dict[str, Asked] = {}
        self.stopped: list[tuple[str, int]] = []
        """The outputs that a stop string has ended, until the engine is told."""
        self._stops: WeakValueDictionary[tuple[str, ...], Stops] = WeakValueDictionary()
        """The stop strings of outputs in progress, shared by the outputs of a request."""

    def add(self, request: Request, hear: Hear) -> None:
        """`hear` is called with every delta of this request from now on."""
        self.asked[request.id] = Asked(request, hear, request.params.num_outputs)

    def drop(self, request_id: str) -> None:
        """Deliver nothing more of this request."""
        self.asked.pop(request_id, None)

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """Make the text of each delta, abort outputs that a stop string has ended, then deliver all text. Deltas of
        unknown requests and of ended outputs are left out."""
        texts = []
        for delta in deltas:
            asked = self.asked.get(delta.request_id)
            track = None if asked is None else asked.tracks.get(delta.index)
            if asked is None or (track is not None and track.ended):
                continue
            try:
                if track is None:
                    track = asked.tracks[delta.index] = self._track(asked.request)
                texts.append(self._text(asked.request, track, delta))
            except Exception as error:  # an error in one output's text must not end the others
                asked.tracks[delta.index] = Track(None, None, ended=True)
                texts.append(self._broken(delta, error))
        for request_id, index in self.stopped:
            self.safely(request_id, self.abort, request_id, index)
        self.stopped.clear()
        for text in texts:
            asked = self.asked.get(text.request_id)
            if asked is None:
                continue
            if text.finish_reason is not None:
                asked.left -= 1
                if not asked.left:
                    self.drop(text.request_id)
            try:  # not `safely`, because this runs for every delta
                asked.hear(text)
            except Exception:
                self._note_mistake(text.request_id)

    def safely(self, request_id: str, work: Callable[..., object], *args: object) -> None:
        """Do work for one request; if it raises an unexpected exception, call `mistake`."""
        try:
            work(*args)
        except Exception:
            self._note_mistake(request_id)

    def _note_mistake(self, request_id: str) -> None:
        """Call it while an exception is handled: reports it to `mistake`, or else raises it to the caller."""
        if self.mistake is None:
            raise
        self.mistake(request_id)

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
            for row in delta.logprobs[: len(out.token_ids)]:
                track.score += row.logprobs[0]
            out.score = track.score
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
                    out.accepted = min(delta.accepted, n + 1)
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
