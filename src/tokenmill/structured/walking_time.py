"""How long a request's tokens may take to read. Owns: the sum over all of its sequences, and its limits.

The engine's own limits count states and items. An ambiguous grammar stays below them, while each token takes longer
than the last, and everybody else's tokens wait. Must not know: grammars, tokens.
"""

from __future__ import annotations

EASY_S = 0.005
"""Seconds of work that a token and its mask may take."""
ROUND_S = 0.05
"""Seconds that one token of each of a request's sequences may take together."""
MOST_S, AGAIN_S = 0.5, 0.05
"""How much more a request may take in all; in a grammar that was too slow for an earlier request, less."""


class WalkingTime:
    """`over`: seconds beyond what tokens may take. A round ends when a sequence reads its next token."""

    __slots__ = ("in_round", "over", "round")

    def __init__(self) -> None:
        self.over = self.in_round = 0.0
        self.round = 0

    def add(self, seconds: float, tokens: int, last: int) -> int:
        """Add the work of a sequence's tokens; `last` is the round that it was in before. -> its round now."""
        if last == self.round:
            self.round, self.in_round = last + 1, 0.0
        usual = min(seconds / tokens, EASY_S)
        self.over += max(0.0, seconds - EASY_S * tokens) + min(usual, max(0.0, self.in_round + usual - ROUND_S))
        self.in_round += usual
        return self.round

    def ended(self, most: float) -> bool:
        """Has the request taken too much?"""
        return self.over > most
