"""How long a request's tokens may take to read. Owns: the sum over all of its sequences, and its limits; what the
grammars of all requests take together.

The engine's own limits count states and items. An ambiguous grammar stays below them, while each token takes longer
than the last, and everybody else's tokens wait. Must not know: grammars, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

EASY_S = 0.005
"""Seconds of work that a token and its mask may take."""
ROUND_S = 0.05
"""Seconds that one token of each of a request's sequences may take together."""
MOST_S, AGAIN_S = 0.5, 0.05
"""How much more a request may take in all; in a grammar that was too slow for an earlier request, less."""
CROWD_S = 0.1
"""Seconds that one token of each request may take together. If they take more, the slow ones among them must be
quicker than EASY_S, in proportion; those that most requests have stay far below."""


@dataclass(slots=True)
class Crowd:
    """Seconds of work for all requests of an engine."""

    total: float = 0.0


class WalkingTime:
    """`over`: seconds beyond what tokens may take. A round ends when a sequence reads its next token; `easy` holds for
    one. `before`: the crowd's seconds when it began (None: there was none)."""

    __slots__ = ("before", "crowd", "easy", "in_round", "over", "round")

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.over = self.in_round = 0.0
        self.easy = EASY_S
        self.before: float | None = None
        self.round = 0

    def add(self, seconds: float, tokens: int, last: int) -> int:
        """Add the work of a sequence's tokens; `last` is the round that it was in before. -> its round now."""
        self.crowd.total += seconds
        if last == self.round:
            together = 0.0 if self.before is None else self.crowd.total - self.before
            self.before, self.easy = self.crowd.total, EASY_S * CROWD_S / max(together, CROWD_S)
            self.round, self.in_round = last + 1, 0.0
        usual = min(seconds / tokens, self.easy)
        beyond = min(usual, max(0.0, self.in_round + usual - ROUND_S))
        self.over += max(0.0, seconds - self.easy * tokens) + beyond
        self.in_round += usual
        return self.round

    def ended(self, most: float) -> bool:
        """Has the request taken too much?"""
        return self.over > most
