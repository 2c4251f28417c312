"""DRY's sequence breakers: from strings to token ids. Owns: which tokens a string may begin in, and how it goes on.

A string may lie within a token, or begin at one token's end and go on in others, as in llama.cpp. Must not know:
requests, tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

Breaker = tuple[list[int], list[int]]
"""Tokens that it may begin in, and the tokens that then follow."""
REMEMBERED = 256
"""Strings whose tokens are kept; most requests have the usual ones."""
MOST_TOKENS = 20
"""Behind the first one: what comes later is not looked at."""


class BreakerIndex:
    """The vocabulary, read when a breaker is first asked for."""

    def __init__(self, texts: Callable[[], list[bytes]], encode: Callable[[str], list[int]]) -> None:
        self._texts = texts
        self._encode = encode
        self._known: list[bytes] | None = None
        self.find = lru_cache(REMEMBERED)(self._find)

    def _find(self, text: str) -> tuple[Breaker, ...]:
        """All ways in which this text may lie in tokens."""
        if self._known is None:
            self._known = self._texts()
        needle = text.encode("utf-8", "surrogatepass")
        within = [i for i, token in enumerate(self._known) if needle in token]
        found: list[Breaker] = [(within, [])] if within else []
        for cut in range(1, len(text)):
            start, rest = text[:cut].encode("utf-8", "surrogatepass"), self._encode(text[cut:])[:MOST_TOKENS]
            heads = [i for i, token in enumerate(self._known) if token.endswith(start) and needle not in token]
            if heads and rest:
                found.append((heads, rest))
        return tuple(found)
