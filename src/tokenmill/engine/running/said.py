"""What a request has said so far, so that another engine can continue it. Owns: this record, and the request that goes
on from it. Must not know: engines, who reads the answers.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import msgspec

from tokenmill.core.request import Request, TokenDelta

PASSED = 16
"""Tokens per output after which a trial is passed: more than a dying engine can have been ahead of its reports."""
MOST_DEATHS = 2
"""A request that was present at so many deaths may be what engines die of: it takes no other requests' engine with it.
(A server has an option for it.)"""
REPEATEDLY = "engines died repeatedly while they worked on this request"


@dataclass(slots=True, eq=False)
class Said:
    """A request with unfinished outputs, and everything that these have said so far. `engine`: the one that works on it
    (-1: none does)."""

    request: Request
    pooling: str | None
    _: KW_ONLY
    engine: int = -1
    emitted: list[list[int]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    prompt_rows: int = 0
    skip_rows: int = 0
    deaths: int = 0

    @property
    def num_outputs(self) -> int:
        """The number of the request's outputs. Each of them ends by itself."""
        return len(self.emitted)

    @property
    def num_said(self) -> int:
        """Tokens of all outputs so far."""
        return sum(map(len, self.emitted))

    def say(self, delta: TokenDelta) -> None:
        """Keep what an output has said, and the state on which its next token depends. The prompt's scores that an
        earlier engine has already sent are removed from the delta."""
        if delta.prompt_logprobs is not None:
            seen = min(len(delta.prompt_logprobs), self.skip_rows)
            self.skip_rows -= seen
            delta.prompt_logprobs = delta.prompt_logprobs[seen:] or None
            self.prompt_rows += len(delta.prompt_logprobs or ())
        self.emitted[delta.index] += delta.tokens
        if delta.mu is not None:
            self.request.mus = self.request.mus or [None] * self.num_outputs
            self.request.mus[delta.index] = delta.mu

    def died(self, reached: int) -> None:
        """Its engine has died, which had counted so many of the prompt's tokens."""
        self.engine = -1
        self.deaths += 1
        self.request.again = True
        self.request.reached = max(self.request.reached, reached)

    def replayed(self) -> Request:
        """The request for an engine that does not know what was said so far."""
        request = self.request
        self.skip_rows = self.prompt_rows
        if not any(self.emitted) and not self.ended:
            return request
        params = request.params
        if params.prompt_logprobs is not None:  # complete once a token has been said, or an output has ended
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        emitted = [list(tokens) for tokens in self.emitted]
        return msgspec.structs.replace(request, params=params, emitted=emitted, ended=sorted(self.ended))
