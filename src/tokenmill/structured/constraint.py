"""A grammar that a sequence is held to. Owns: the walk of one sequence through a compiled grammar.

Text that the grammar forces is forced in its usual tokens: the mask allows just the next of them, so a sequence says
the same whether such tokens were sampled one by one, drafted, or appended without a step. Must not know: schemas.
"""

from __future__ import annotations

from llguidance import LLMatcher

from tokenmill.structured.vocabulary import Vocabulary


class GrammarConstraint:
    """`pending`: tokens that must come next (None: not looked up yet); `broken`: nothing can be said any more;
    `ready`: the next mask, if it has been worked out ahead."""

    __slots__ = ("broken", "ended", "matcher", "pending", "ready", "vocabulary")

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.pending: list[int] | None = None
        self.ready: bytes | None = None
        self.ended = False
        self.broken = False

    def wants_mask(self) -> bool:
        """Would `mask` have to walk the vocabulary?"""
        return self.ready is None and not (self.broken or self.ended or self._forced())

    def give_mask(self, found: bytes) -> None:
        """The mask that the matcher gave for this place."""
        self.ready = found

    def mask(self) -> bytes:
        """Allowed next tokens; none at all when the grammar's limits were hit, which ends the sequence as failed."""
        if self.broken:
            return self._bits([])
        forced = self._forced()
        if forced or self.ended:
            return self._bits(forced[:1] or sorted(self.vocabulary.end_ids))
        found: bytes = self.ready if self.ready is not None else self.matcher.compute_bitmask()
        if self.matcher.is_error():  # its mask would allow the end
            self.broken = True
            return self._bits([])
        return found[: self.vocabulary.mask_bytes]  # it may be a word longer

    def accept(self, tokens: list[int]) -> None:
        """Tokens that were said."""
        self.ready = None
        pending = self.pending
        if pending is not None and not (self.broken or self.ended):  # the common cases, spelled out
            if pending and tokens == pending[: len(tokens)]:
                self.broken = self.matcher.try_consume_tokens(tokens) != len(tokens)
                self.pending = pending[len(tokens) :] or None
                return
            if not pending and len(tokens) == 1 and tokens[0] not in self.vocabulary.end_ids:
                self.broken = self.matcher.try_consume_tokens(tokens) != 1
                self.pending = None
                return
        walk = _Walk(self)
        for token in tokens:
            if not self.ended and not walk.step(token):
                self.broken = True
                return

    def forced(self) -> list[int]:
        """Tokens that must come next whatever the model says."""
        return [] if self.ended or self.broken else list(self._forced())

    def validate(self, tokens: list[int]) -> int:
        """How many of these tokens are allowed in a row from here."""
        walk = _Walk(self)
        count = 0
        while count < len(tokens) and not self.ended and walk.step(tokens[count]):
            count += 1
        walk.back()
        return count

    def finished(self) -> bool:
        """Has the text ended, or can nothing follow?"""
        return self.ended or (not self.broken and self.matcher.is_stopped() and self.matcher.is_accepting())

    def fork(self) -> GrammarConstraint:
        """The same place in a walk of its own."""
        twin = GrammarConstraint(self.matcher.deep_copy(), self.vocabulary)
        twin.pending = None if self.pending is None else list(self.pending)
        twin.ended, twin.broken, twin.ready = self.ended, self.broken, self.ready
        return twin

    def _forced(self) -> list[int]:
        if self.pending is None:
            self.pending = [] if self.ended or self.matcher.is_stopped() else self.matcher.compute_ff_tokens()
        return self.pending

    def _bits(self, tokens: list[int]) -> bytes:
        found = bytearray(self.vocabulary.mask_bytes)
        for token in tokens:
            found[token >> 3] |= 1 << (token & 7)
        return bytes(found)


class _Walk:
    """Steps of a constraint that can be taken back."""

    __slots__ = ("broken", "constraint", "consumed", "pending")

    def __init__(self, constraint: GrammarConstraint) -> None:
        self.constraint = constraint
        self.consumed = 0
        self.pending = constraint.pending
        self.broken = constraint.broken

    def step(self, token: int) -> bool:
        """Take one allowed token; False (and no change) if it is not."""
        c = self.constraint
        forced = [] if c.broken else c._forced()
        if forced:
            if token != forced[0]:
                return False
        elif c.broken or token in c.vocabulary.end_ids:
            c.ended = not c.broken and c.matcher.is_accepting()
            return c.ended
        if c.matcher.try_consume_tokens([token]) != 1:
            return False
        self.consumed += 1
        c.pending = forced[1:] or None
        return True

    def back(self) -> None:
        """Undo all steps."""
        c = self.constraint
        c.ended, c.broken = False, self.broken
        if self.consumed:
            c.matcher.rollback(self.consumed)
            c.pending = self.pending
