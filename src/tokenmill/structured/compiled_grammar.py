"""A compiled grammar. Owns: the lexers that its sequences walk with, and their limits.

Copies of a matcher share one lexer, whose states they find as they go: that makes masks quick, and it lets one sequence
use a limit up for all. A lexer that has hit one is dead for everybody, so it is replaced: the sequence that hit it goes
on with a lexer of its own, the others share a new one. Must not know: what was said, schemas, caches.
"""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits

from tokenmill.structured.limits import refuse
from tokenmill.structured.vocabulary import Vocabulary

MAX_GRAMMAR_BYTES = 1 << 20
STEP_FUEL = 200_000
"""Work of one mask, in the engine's units: about 14,000 a millisecond."""
ALONE = 3
"""A lexer of one's own may work so many times as long for a mask: it begins cold, where the shared one was warm."""
MOST_STATES = 20_000
"""Of one lexer: about 14 MB."""
NO_TOKEN = "no token of this model's vocabulary says what must follow"
_JSON = re.compile(r'"json_schema":\s*\{|%json')
_TOKENS = re.compile(r"<[\w|\[]")
"""Where a grammar may name tokens; texts that hold such signs only cost a look."""


class Compiled:
    """`root`: a matcher at its start, on the lexer that is shared; None: that one has died. `has_json`: it has JSON
    parts; `has_tokens`: it may name tokens."""

    __slots__ = ("has_json", "has_tokens", "root", "text", "vocabulary")

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        """Compile; refuses what is too large or what the engine does not take."""
        if len(text) > MAX_GRAMMAR_BYTES:
            refuse("the grammar is too large once it is written out. Simplify it.")
        self.text = text
        self.has_json = _JSON.search(text) is not None
        self.has_tokens = _TOKENS.search(text) is not None
        self.vocabulary = vocabulary
        self.root: LLMatcher | None = self._fresh(1)
        if self.root.is_error():
            refuse(f"the grammar engine refuses it: {reason(self.root)}")

    def share(self) -> LLMatcher:
        """The root on a living lexer."""
        root = self.root
        if root is None:
            root = self.root = self._fresh(1)
        return root

    def alone(self) -> LLMatcher:
        """A matcher at its start, on a lexer that nobody shares."""
        return self._fresh(ALONE)

    def died(self, root: LLMatcher) -> bool:
        """The lexer of `root` hit a limit; -> was nobody here before to say so?"""
        first = self.root is root
        if first:
            self.root = None
        return first

    def _fresh(self, times: int) -> LLMatcher:
        return LLMatcher(self.vocabulary.trie, self.text, log_level=0, limits=limits(times))


def limits(times: int = 1) -> LLParserLimits:
    """Budgets of compiling and of each mask."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=times * STEP_FUEL,
        max_items_in_row=5000,  # an object with 1000 optional properties has 4000
        step_max_items=50_000,
        max_lexer_states=MOST_STATES,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def reason(matcher: LLMatcher) -> str:
    """What the engine says about its error, short."""
    found = str(matcher.get_error()).split("<")[0].strip().replace("\n", " ")[:300]
    return NO_TOKEN if found.startswith("NoExtension") else found
