"""When a drafter of the host had better be silent. Owns: a balance of each sequence's right and wrong guesses.

A guess that is tried takes a part of a step's time, and a right one saves a step. Where the balance is spent, nothing
is guessed for some tokens, and for twice as many each time that nothing comes of it: so text in which guesses fail
loses next to nothing. Counts alone decide, no clock. Must not know: where guesses come from.
"""

from __future__ import annotations

from dataclasses import dataclass

COST = 0.2
"""Of a guess, in steps: what small models pay on a CPU."""
CREDIT, MOST_CREDIT = 2.0, 6.0
"""The balance that a sequence begins with, and the most that it may save up."""
SHORTEST, LONGEST = 4, 128
"""Tokens without guesses after a balance was spent."""


@dataclass(slots=True)
class Patience:
    """Of one sequence: `until`: the number of tokens from which on it may guess again."""

    balance: float = CREDIT
    pause: int = SHORTEST
    until: int = 0

    def waits(self, tokens: int) -> bool:
        """Is nothing to be guessed behind so many tokens?"""
        return tokens < self.until

    def learn(self, tokens: int, proposed: int, accepted: int) -> None:
        """Of a sequence's guesses so many were right; it has about so many tokens now."""
        self.balance = min(MOST_CREDIT, self.balance + accepted - COST * proposed)
        if self.balance >= 0:
            if accepted:
                self.pause = SHORTEST
            return
        self.balance, self.until = 0.0, tokens + self.pause
        self.pause = min(2 * self.pause, LONGEST)
