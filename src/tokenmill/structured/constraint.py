"""The grammar that a sequence must follow. Owns: one sequence's walk through a compiled grammar.

Text that the grammar forces is written in its usual tokens: the mask allows only the next of them. So a sequence says
the same whether such tokens are sampled one by one, drafted, or appended without a step. If the shared lexer has hit a
limit, in whichever sequence, the walk continues from the same place on another lexer. Must not know: schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time

from llguidance import LLMatcher

from tokenmill.core.errors import OVER_LIMIT
from tokenmill.structured.compiled_grammar import NO_TOKEN, Compiled, reason
from tokenmill.structured.sheltered import FAILED
from tokenmill.structured.vocabulary import Vocabulary
from tokenmill.structured.walking_time import AGAIN_S, MOST_S, WalkingTime

FEWEST = 4
"""If a sequence's own lexer dies within this many tokens, it is not replaced."""
PIECE = 512
"""Tokens that a new lexer repeats between two masks; each mask restores its fuel."""
REFUSED = "a token that it allowed was not taken"
SLOW = "its tokens take too long to read, because too many ways of reading the text are open"


class GrammarConstraint:
    """`pending`: tokens that must come next (None: not looked up yet). `broken`: no token can follow any more, and
    `why`. `ready`: the next mask, if it was computed ahead. `said`: all tokens so far. `root`: the matcher whose lexer
    is used (None: a lexer of its own, since token `since`). `check`: called once with the finished text. `time`:
    shared by copies; `round`: the last one in it. `masked`: seconds that the last mask took."""

    __slots__ = (
        *("broken", "check", "compiled", "ended", "masked", "matcher", "pending"),
        *("ready", "root", "round", "said", "since", "time", "why"),
    )

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.root: LLMatcher | None = compiled.share()
        self.matcher: LLMatcher = self.root.deep_copy()
        self.said: list[int] = []
        self.since = 0
        self.time = WalkingTime(compiled.vocabulary.crowd)
        self.round = 0
        self.masked = 0.0
        self.pending: list[int] | None = None
        self.ready: bytes | None = None
        self.ended = False
        self.broken = False
        self.why: str | None = None
        self.check: Callable[[bytes], None] | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """The token table."""
        return self.compiled.vocabulary

    def wants_mask(self) -> bool:
        """Would `mask` have to walk the vocabulary? Those of a request that is slow are timed one by one."""
        usual = self.ready is None and not self.time.ended(AGAIN_S)
        return usual and not (self.broken or self.ended or self._forced())

    def give_mask(self, found: bytes) -> None:
        """Take the mask that the matcher gave for this place."""
        self.ready = found

    def mask(self) -> bytes:
        """Allowed next tokens. If the grammar's limits were hit, none are, which ends the sequence as failed."""
        if not (self.broken or self.ended) and self.time.ended(AGAIN_S if self.compiled.slow else MOST_S):
            self.compiled.slow = True
            self._break(SLOW)
        while not self.broken:
            forced = self._forced()
            if self.broken:
                break
            if forced or self.ended:
                return self._bits(forced[:1] or sorted(self.vocabulary.end_ids))
            found: bytes = self.ready if self.ready is not None else self._computed()
            if not self.matcher.is_error():  # with an error, its mask would allow the end
                found = found[: self.vocabulary.mask_bytes]  # it may be a word longer
                found = self.vocabulary.numerals.bounded(found, self.said) if self.compiled.has_json else found
                found = self._without_ends(found) if self.compiled.has_tokens else found
                if found != bytes(len(found)):
                    return found
                self._break(NO_TOKEN)
                break
            self._mend()
        return self._bits([])

    def accept(self, tokens: list[int]) -> None:
        """Advance by tokens that were said."""
        self.ready = None
        pending = self.pending
        if pending is not None and not (self.broken or self.ended):  # the common cases, written out for speed
            forced = bool(pending) and tokens == pending[: len(tokens)]
            if forced or (not pending and len(tokens) == 1 and tokens[0] not in self.vocabulary.end_ids):
                if self._consume(tokens) == len(tokens):
                    self.said += tokens
                    self.pending = pending[len(tokens) :] or None
                    return
                self._again(tokens)
                return
        walk = _Walk(self)
        for i, token in enumerate(tokens):
            if not self.ended and not walk.step(token):
                self._again(tokens[i:])
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
        """Has the text ended, or can no token follow?"""
        found = self.ended or (not self.broken and self.matcher.is_stopped() and self.matcher.is_accepting())
        if found and self.check is not None:
            check, self.check = self.check, None
            check(b"".join(map(self.vocabulary.bytes_of, self.said)))
        return found

    def failure(self) -> str | None:
        """Why no token can follow any more; None: one can."""
        if self.why is None:
            return None
        if self.why == REFUSED:
            return FAILED
        return f"{OVER_LIMIT}its structure cannot be followed any further ({self.why}). Simplify the structure."

    def fork(self) -> GrammarConstraint:
        """An independent copy at the same place."""
        twin = GrammarConstraint.__new__(GrammarConstraint)
        twin.compiled, twin.root, twin.since, twin.why = self.compiled, self.root, self.since, self.why
        twin.time, twin.round, twin.masked = self.time, self.round, self.masked
        twin.matcher, twin.check = self.matcher.deep_copy(), self.check
        twin.said = list(self.said)
        twin.pending = None if self.pending is None else list(self.pending)
        twin.ended, twin.broken, twin.ready = self.ended, self.broken, self.ready
        return twin

    def _mend(self) -> None:
        """The lexer is dead: continue from here on another one. Sets `broken` if no lexer can bear this grammar."""
        why = reason(self.matcher)
        self.ready = self.pending = None
        if self.root is None and len(self.said) - self.since < FEWEST:
            self._break(why)
            return
        if self.root is None or self.compiled.died(self.root):
            self.root, fresh = None, self.compiled.alone()
        else:
            self.root = self.compiled.share()
            fresh = self.root.deep_copy()
        self.since = len(self.said)
        for at in range(0, len(self.said), PIECE):
            piece = self.said[at : at + PIECE]
            if at:
                fresh.compute_bitmask()
            if fresh.try_consume_tokens(piece) != len(piece):
                self._break(why)
                return
        self.matcher = fresh

    def _again(self, tokens: list[int]) -> None:
        """The matcher refused these tokens: either the lexer is dead, or they are not allowed."""
        self.matcher.compute_bitmask()  # only this shows whether a lexer is dead
        if self.matcher.is_error():
            self._mend()
            walk = _Walk(self)
            if all(self.ended or walk.step(token) for token in tokens):
                return
        if not self.broken:
            self._break(reason(self.matcher))

    def _computed(self) -> bytes:
        """The matcher's mask."""
        begun = thread_time()
        found: bytes = self.matcher.compute_bitmask()
        self.masked = thread_time() - begun
        return found

    def _consume(self, tokens: list[int]) -> int:
        """How many of these tokens the matcher took."""
        begun = thread_time() - self.masked
        self.masked = 0.0
        count: int = self.matcher.try_consume_tokens(tokens)
        self.round = self.time.add(thread_time() - begun, len(tokens), self.round)
        return count

    def _break(self, why: str) -> None:
        self.broken = True
        self.why = why or REFUSED

    def _forced(self) -> list[int]:
        if self.pending is None:
            self.pending = [] if self.ended or self.matcher.is_stopped() else self.matcher.compute_ff_tokens()
            if self.compiled.has_tokens and not self.vocabulary.end_ids.isdisjoint(self.pending):
                at = next(i for i, token in enumerate(self.pending) if token in self.vocabulary.end_ids)
                self.pending = self.pending[:at]
                if not at:
                    self._break(NO_TOKEN)
        return self.pending

    def _without_ends(self, found: bytes) -> bytes:
        """The mask without end tokens, unless the text may end here: such a token can only end an answer."""
        if self.matcher.is_accepting():
            return found
        kept = bytearray(found)
        for token in self.vocabulary.end_ids:
            if token >> 3 < len(kept):
                kept[token >> 3] &= ~(1 << (token & 7))
        return bytes(kept)

    def _bits(self, tokens: list[int]) -> bytes:
        found = bytearray(self.vocabulary.mask_bytes)
        for token in tokens:
            found[token >> 3] |= 1 << (token & 7)
        return bytes(found)


class _Walk:
    """Steps of a constraint that can be taken back."""

    __slots__ = ("broken", "constraint", "consumed", "pending", "why")

    def __init__(self, constraint: GrammarConstraint) -> None:
        self.constraint = constraint
        self.consumed = 0
        self.pending = constraint.pending
        self.broken, self.why = constraint.broken, constraint.why

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
        if c._consume([token]) != 1:
            return False
        self.consumed += 1
        c.said.append(token)
        c.pending = forced[1:] or None
        return True

    def back(self) -> None:
        """Undo all steps."""
        c = self.constraint
        c.ended, c.broken, c.why = False, self.broken, self.why
        if self.consumed:
            c.matcher.rollback(self.consumed)
            del c.said[-self.consumed :]
            c.pending = self.pending
