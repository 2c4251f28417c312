"""Prompt lookup: if the last n tokens occurred before, propose what followed them then.

Owns: an index of n-grams per sequence, which grows with the tokens. Must not know: models. Proposals are verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.errors import ParameterError, shown
from tokenmill.core.sequence import Sequence

MOST_TOKENS = 64
"""Longest n-gram: each length costs one more entry per token, or one more search of all tokens."""


@dataclass(slots=True)
class NgramIndex:
    """Where each n-gram of a sequence last ended, not counting its very end; `done` tokens are indexed. patience: while
    guesses fail."""

    last: dict[tuple[int, ...], int] = field(default_factory=dict)
    done: int = 0


class NgramDrafter:
    """Longest match first, from `longest` down to `shortest` tokens."""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if type(shortest) is not int or type(longest) is not int or not 1 <= shortest <= longest <= MOST_TOKENS:
            raise ParameterError(
                f"prompt_lookup_min ({shown(shortest)}) must be at least 1 and at most prompt_lookup_max "
                f"({shown(longest)}), which is at most {MOST_TOKENS}, both whole numbers.",
                param="speculative_config",
            )
        self.longest = longest
        self.shortest = shortest
        self.indexes: dict[int, NgramIndex] = {}

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that followed the latest earlier occurrence of the longest matching suffix."""
        tokens = seq.tokens
        index = self.indexes.get(seq.id)
        if index is None:
            index = self.indexes[seq.id] = NgramIndex()
        self._extend(index, tokens)
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            end = index.last.get(tuple(tokens[-n:]))
            if end is not None:
                return tokens[end : end + most]
        return []

    def observe(self, seq: Sequence, proposed: int, accepted: int) -> None:
        """Nothing to learn here: patience.py finds out how many guesses pay."""

    def forget(self, seq: Sequence) -> None:
        self.indexes.pop(seq.id, None)

    def _extend(self, index: NgramIndex, tokens: list[int]) -> None:
        """Index n-grams that end before the last token, so that a suffix never finds itself."""
        for end in range(max(index.done, 1), len(tokens)):
            for n in range(self.shortest, min(self.longest, end) + 1):
                index.last[tuple(tokens[end - n : end])] = end
        index.done = len(tokens)
