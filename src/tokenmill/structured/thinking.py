"""A limit on reasoning. Owns: counting a sequence's reasoning tokens, and ending the reasoning when they are used up.

What follows (a grammar, or nothing) is a constraint of its own. Must not know: message formats, requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenmill.core.constraint import Constraint
from tokenmill.structured.vocabulary import Vocabulary

State = Literal["before", "inside", "ending", "done"]


@dataclass(frozen=True, slots=True)
class Border:
    """How reasoning begins (empty: it has begun) and ends, as bytes. `closing`: the tokens that end it."""

    opened: bytes
    close: bytes
    closing: tuple[int, ...]


class ThinkingBudget:
    """Allows no more than `left` further tokens of reasoning; `inner` sees every token as well. A grammar takes whole
    characters: one that a token has left unfinished is finished first."""

    __slots__ = ("border", "inner", "left", "pending", "state", "tail", "vocabulary")

    def __init__(self, border: Border, budget: int, vocabulary: Vocabulary, inner: Constraint | None) -> None:
        self.border = border
        self.left = budget
        self.vocabulary = vocabulary
        self.inner = inner
        self.tail = b""
        self.pending: list[int] = []
        self.state: State = "before" if border.opened else "inside"
        if self.state == "inside" and budget <= 0:
            self._end()

    def mask(self) -> bytes | None:
        """Allowed next tokens; None: all."""
        if self.pending:
            return self._only(self.pending[0])
        if self.inner is not None:
            return self.inner.mask()
        return None if self.state == "done" else self._all_but_ends()

    def accept(self, tokens: list[int]) -> None:
        """Tokens that were said."""
        for at, token in enumerate(tokens):
            done = self.state == "done"
            if self.inner is not None:
                self.inner.accept(tokens[at:] if done else [token])
            if done:
                return
            self._step(token)

    def forced(self) -> list[int]:
        """Tokens that must come next."""
        if self.pending:
            return list(self.pending)
        return [] if self.inner is None else self.inner.forced()

    def validate(self, tokens: list[int]) -> int:
        """How many of these tokens are allowed in a row from here."""
        trial = self.fork()
        for count, token in enumerate(tokens):
            if not trial._allows(token):
                return count
            trial.accept([token])
            if trial.finished():
                return count + 1
        return len(tokens)

    def finished(self) -> bool:
        """Has the text ended?"""
        return self.inner is not None and not self.pending and self.inner.finished()

    def failure(self) -> str | None:
        """What went wrong in the grammar."""
        return None if self.inner is None else self.inner.failure()

    def fork(self) -> ThinkingBudget:
        """An independent copy at the same place."""
        inner = None if self.inner is None else self.inner.fork()
        twin = ThinkingBudget(self.border, self.left, self.vocabulary, inner)
        twin.state, twin.tail, twin.pending = self.state, self.tail, list(self.pending)
        return twin

    def _allows(self, token: int) -> bool:
        if self.pending:
            return token == self.pending[0]
        if self.inner is not None:
            return self.inner.validate([token]) == 1
        return self.state == "done" or token not in self.vocabulary.end_ids

    def _step(self, token: int) -> None:
        if self.pending:
            self.pending = self.pending[1:] if token == self.pending[0] else []
            self.state = "ending" if self.pending else "done"
            return
        said = self.tail + self.vocabulary.bytes_of(token)
        border = self.border
        if self.state == "before":
            if border.opened not in said:
                self.tail = said
                if len(said.lstrip()) > len(border.opened):
                    self.state = "done"  # it answers without reasoning
                return
            self.state = "inside"
            said = said.partition(border.opened)[2]  # the same token may go on, even to the end of the reasoning
        else:
            self.left -= 1
        self.tail = said[-len(border.close) :]
        if border.close in said:
            self.state = "done"
        elif self.left <= 0:
            self._end()

    def _end(self) -> None:
        closing = list(self.border.closing)
        if self.inner is not None and self.inner.validate(closing) < len(closing):
            return
        self.pending = closing
        self.state = "ending"

    def _only(self, token: int) -> bytes:
        found = bytearray(self.vocabulary.mask_bytes)
        found[token >> 3] |= 1 << (token & 7)
        return bytes(found)

    def _all_but_ends(self) -> bytes | None:
        if self.state == "before":
            return None
        found = bytearray(b"\xff" * self.vocabulary.mask_bytes)
        for token in self.vocabulary.end_ids:
            if token >> 3 < len(found):
                found[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        return bytes(found)
