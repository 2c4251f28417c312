"""DRY's sequence breakers: from strings to token ids. Owns: which tokens a string may begin in, and how it goes on.

A string may lie within a token, or begin at one token's end and continue in the next ones, as in llama.cpp. Must not
know: requests, tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

Breaker = tuple[list[int], list[int]]
"""The tokens that a breaker may begin in, and the tokens that then follow."""
REMEMBERED = 256
"""How many strings' tokens are kept; most requests have the usual strings."""
MOST_TOKENS = 20
"""How many tokens behind a breaker's first one are compared; later tokens are ignored."""


class BreakerIndex:
    """The vocabulary, read when a breaker is first asked for. A request may bring many long breakers, and its engine
    answers others: tokens are found by their ends, and only as many cuts of a breaker are tried as tokens end so."""

    def __init__(self, texts: Callable[[], list[bytes]], encode: Callable[[str], list[int]]) -> None:
        self._texts = texts
        self._encode = encode
        self._known: list[bytes] | None = None
        self._backwards: list[tuple[bytes, int]] = []
        self._joined = b""
        self._begins: list[int] = []
        """Where each token begins in the joined text of all tokens."""
        self.find = lru_cache(REMEMBERED)(self._find)

    def _find(self, text: str) -> tuple[Breaker, ...]:
        """All ways in which this text may lie in tokens."""
        if self._known is None:
            self._known = self._texts()
            self._backwards = sorted((token[::-1], i) for i, token in enumerate(self._known))
            self._joined = b"".join(self._known)
            self._begins = [0, *accumulate(map(len, self._known))]
        needle = text.encode("utf-8", "surrogatepass")
        within = self._holding(needle)
        found: list[Breaker] = [(within, [])] if within else []
        for cut in range(1, len(text)):
            start = text[:cut].encode("utf-8", "surrogatepass")
            heads = [i for i in self._ending(start) if needle not in self._known[i]]
            rest = self._encode(text[cut:])[:MOST_TOKENS] if heads else []
            if rest:
                found.append((heads, rest))
        return tuple(found)

    def _holding(self, needle: bytes) -> list[int]:
        """The tokens that contain it, in order."""
        found: list[int] = []
        at = self._joined.find(needle) if needle else -1
        while at >= 0:
            token = bisect_right(self._begins, at) - 1
            inside = at + len(needle) <= self._begins[token + 1]
            if inside:
                found.append(token)
            at = self._joined.find(needle, self._begins[token + 1] if inside else at + 1)
        return found

    def _ending(self, start: bytes) -> list[int]:
        """The tokens that end with it, in order."""
        key = start[::-1]
        at, found = bisect_left(self._backwards, (key, -1)), []
        while at < len(self._backwards) and self._backwards[at][0].startswith(key):
            found.append(self._backwards[at][1])
            at += 1
        return sorted(found)
