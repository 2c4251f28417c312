"""A compiled grammar. Owns: the lexers that its sequences walk with, and their limits.

Copies of a matcher share one lexer and add states to it as they walk. That makes masks quick, but one sequence can use
up a limit for all. A lexer that has hit a limit is dead for everybody and is replaced: the sequence that hit it
continues with a lexer of its own, the others share a new one. Must not know: what was said, schemas, caches.
"""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits

from tokenmill.structured.limits import refuse
from tokenmill.structured.vocabulary import Vocabulary

MAX_GRAMMAR_BYTES = 1 << 20
STEP_FUEL = 200_000
"""Most work for one mask, in the engine's units: about 14,000 take a millisecond."""
ALONE = 3
"""A sequence's own lexer may work this many times as long for a mask, because it starts cold."""
MOST_STATES = 20_000
"""Most states of one lexer: about 14 MB."""
UNFORCED = '%llguidance {"no_forcing": true}'
"""Said of grammars in which a lexeme may go on for ever without an end, such as `/x*/ "x"`: there the engine would look
for the end of the forced text for ever."""
NO_TOKEN = "no token of this model's vocabulary says what must follow"
_JSON = re.compile(r'"json_schema":\s*\{|%json')
_TOKENS = re.compile(r"<[\w|\[]")
"""Finds grammars that may name tokens. A grammar that only looks like it costs one check."""


class Compiled:
    """`root`: a matcher at its start, on the shared lexer (None: that lexer is dead). `has_json`: the grammar has JSON
    parts. `has_tokens`: it may name tokens. `slow`: a request's tokens took too long to read."""

    __slots__ = ("has_json", "has_tokens", "root", "slow", "text", "vocabulary")

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        """Compile; refuses a grammar that is too large or that the engine does not take."""
        if len(text) > MAX_GRAMMAR_BYTES:
            refuse("the grammar is too large once it is written out. Simplify it.")
        self.text = text
        self.slow = False
        self.has_json = _JSON.search(text) is not None
        self.has_tokens = _TOKENS.search(text) is not None
        self.vocabulary = vocabulary
        self.root: LLMatcher | None = self._fresh(1)
        if self.root.is_error():
            refuse(f"the grammar engine refuses it: {reason(self.root)}")

    def share(self) -> LLMatcher:
        """The root, on a new lexer if the shared one is dead."""
        root = self.root
        if root is None:
            root = self.root = self._fresh(1)
        return root

    def alone(self) -> LLMatcher:
        """A matcher at its start, on a lexer of its own."""
        return self._fresh(ALONE)

    def died(self, root: LLMatcher) -> bool:
        """Note that the lexer of `root` hit a limit; -> is this the first report?"""
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
    """The engine's own error message, shortened."""
    text = re.split(r"\n<state>|\s*<backtrace>", str(matcher.get_error()))[0]
    found = " ".join(line.strip() for line in text.splitlines() if UNFORCED not in line)[:300]
    return NO_TOKEN if found.startswith("NoExtension") else found
