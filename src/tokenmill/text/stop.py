"""Stop strings in streamed text. Owns: finding the first stop string that completes, however the text is cut into
pieces, and holding back only text that may still become one. Must not know: tokens, sequences, requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class Stops:
    """Stop strings, prepared once for all texts that they may end.

    `falls[i][k]`: how much of string i still matches if its first k + 1 characters matched and the next did not. This
    takes a few bytes per character, because a request may bring thousands of characters for a hundred texts."""

    __slots__ = ("__weakref__", "falls", "firsts", "words")

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(dict.fromkeys(filter(None, words)))
        self.firsts = frozenset(word[0] for word in self.words)
        self.falls = [_falls(word) for word in self.words]


class StopChecker:
    """Takes text with push(); gives the text that may be shown, and the stop string that ended the text.

    The stop string that completes first wins; among those that complete together, the longest. So the result does not
    depend on how the text was cut, and no token is generated after a stop string is complete."""

    def __init__(self, stop: Sequence[str] | Stops, include_stop: bool = False) -> None:
        self._stops = stop if isinstance(stop, Stops) else Stops(stop)
        self._include = include_stop
        self._matched = [0] * len(self._stops.words)
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, stop string that completed or None); after a stop, nothing more comes."""
        if self._stopped is not None:
            return "", self._stopped
        if not self._held and self._stops.firsts.isdisjoint(text):
            return text, None
        words = enumerate(self._stops.words)
        ends = [(at, -len(word), word) for number, word in words if (at := self._walk(number, text))]
        if ends:
            at, _, found = min(ends)
            return self._end(text[:at], found)
        whole = self._held + text
        cut = len(whole) - max(self._matched)
        self._held = whole[cut:]
        return whole[:cut], None

    def flush(self) -> str:
        """The text that was held back; call it when the text has ended without a stop string."""
        rest, self._held = self._held, ""
        self._matched = [0] * len(self._matched)
        return rest

    def _walk(self, number: int, text: str) -> int:
        """Where in the text this string is complete; 0: nowhere."""
        word, matched = self._stops.words[number], self._matched[number]
        if not matched and word[0] not in text:
            return 0
        falls = self._stops.falls[number]
        for at, char in enumerate(text, 1):
            while matched and word[matched] != char:
                matched = falls[matched - 1]
            if word[matched] == char:
                matched += 1
                if matched == len(word):
                    return at
        self._matched[number] = matched
        return 0

    def _end(self, text: str, found: str) -> tuple[str, str]:
        self._stopped = found
        whole = self._held + text
        self._held = ""
        return (whole if self._include else whole[: len(whole) - len(found)]), found


def _falls(word: str) -> array[int]:
    falls = array("I", bytes(array("I").itemsize * len(word)))
    matched = 0
    for at in range(1, len(word)):
        while matched and word[matched] != word[at]:
            matched = falls[matched - 1]
        matched += word[matched] == word[at]
        falls[at] = matched
    return falls
