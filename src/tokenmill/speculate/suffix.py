"""Suffix lookup: find where the text's longest suffix occurred before, and propose what followed it there.

Owns: an automaton per sequence, and stores of earlier answers, one per tenant and adapter (as in the prefix cache). A
store holds two generations of answers; when the younger one is full, the older one is dropped. Must not know: models.
Proposals are verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.sequence import Sequence
from tokenmill.speculate.automaton import Automaton

GENERATION = 1 << 15
"""Tokens of answers in one generation."""
STORES = 16
"""Tenants and adapters whose answers are kept."""
SHORTEST, NEVER_MORE = 2, 32
"""The length of a match that a sequence asks for at first, and the most that it asks for after wrong guesses."""
BETWEEN = -1
"""Stands between two answers; it is no token."""


@dataclass(slots=True)
class Generation:
    """Answers, one behind the other."""

    text: Automaton = field(default_factory=Automaton)
    answers: int = 0


@dataclass(slots=True)
class Generations:
    """Two generations, the younger one first; `turn` counts how often they changed."""

    generations: list[Generation] = field(default_factory=lambda: [Generation(), Generation()])
    turn: int = 0

    def keep(self, answer: list[int], most: int) -> None:
        """One more answer; at most `most` in a generation."""
        young = self.generations[0]
        if young.answers and (len(young.text.tokens) + len(answer) > GENERATION or young.answers >= most):
            self.generations = [Generation(), young]
            self.turn += 1
            young = self.generations[0]
        for token in [*answer[:GENERATION], BETWEEN]:
            young.text.add(token)
        young.answers += 1


@dataclass(slots=True)
class SuffixIndex:
    """A sequence's records: its own text, its place in each generation of its store, and how long a match it asks
    for."""

    store: Generations
    turn: int
    own: Automaton = field(default_factory=Automaton)
    places: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0), (0, 0)])
    need: int = SHORTEST


class SuffixDrafter:
    """The longest match first, be it in the text itself or in an earlier answer; a match of n tokens is worth at most
    n guesses."""

    def __init__(self, depth: int = 24, kept: int = 10_000) -> None:
        """depth: tokens of a text that a store is searched for; kept: answers."""
        self.depth = depth
        self.kept = kept
        self.indexes: dict[int, SuffixIndex] = {}
        self.stores: dict[str, Generations] = {}

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that followed the longest match."""
        index = self.indexes.get(seq.id)
        if index is None:
            store = self._store(seq)
            index = self.indexes[seq.id] = SuffixIndex(store, store.turn)
        self._extend(index, seq.tokens)
        matched, end = index.own.repeated()
        source = index.own.tokens
        for generation, (state, length) in zip(index.store.generations, index.places, strict=True):
            if length > matched:
                matched, end, source = length, generation.text.end[state], generation.text.tokens
        if matched < index.need:
            return []
        found = source[end : end + min(most, matched)]
        return found[: found.index(BETWEEN)] if BETWEEN in found else found

    def observe(self, seq: Sequence, proposed: int, accepted: int) -> None:
        """After a wrong guess a longer match is asked for, after right ones a shorter one."""
        index = self.indexes.get(seq.id)
        if index is None:
            return
        if accepted == 0:
            index.need = min(2 * index.need, NEVER_MORE)
        elif 2 * accepted >= proposed:
            index.need = max(SHORTEST, index.need - accepted)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended: keep its answer for others."""
        if self.indexes.pop(seq.id, None) is None or not self.kept:
            return
        answer = seq.tokens[seq.num_prompt :]
        if len(answer) > SHORTEST:
            self._store(seq).keep(answer, self.kept)

    def _store(self, seq: Sequence) -> Generations:
        request = seq.group.request
        key = f"{request.adapter}\x00{request.salt}"
        store = self.stores.pop(key, None) or Generations()
        self.stores[key] = store  # the store used last is dropped last
        if len(self.stores) > STORES:
            del self.stores[next(iter(self.stores))]
        return store

    def _extend(self, index: SuffixIndex, tokens: list[int]) -> None:
        """Add the new tokens."""
        own, store = index.own, index.store
        new = tokens[len(own.tokens) :]
        for token in new:
            own.add(token)
        if index.turn != store.turn:  # the younger generation is the older one now: begin again with the newest tokens
            index.turn, index.places, new = store.turn, [(0, 0), (0, 0)], tokens[-self.depth :]
        new = new[-self.depth :]
        for n, generation in enumerate(store.generations):
            state, matched = index.places[n]
            for token in new:
                state, matched = generation.text.walk(state, matched, token)
            index.places[n] = state, matched
