"""Stop strings over streamed text. Owns: finding the first stop string that completes, however the text is cut into
pieces, and holding back only what may still become one. Must not know: tokens, sequences, requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _Node:
    """One prefix of some stop strings (an Aho-Corasick state)."""

    __slots__ = ("depth", "fallback", "found", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.fallback: _Node | None = None
        self.found = ""  # the longest stop string that ends here


class StopChecker:
    """Feed it text with push(); it gives what may be shown and the stop string that ended the text.

    The stop string that completes first wins; of those that complete together, the longest. So the answer never
    depends on how the text was cut, and no token is generated after a stop string is complete."""

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        self._include = include_stop
        self._root = _automaton(stop)
        self._at = self._root
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, stop string that completed or None); after a stop, nothing more comes."""
        if self._stopped is not None:
            return "", self._stopped
        at, root = self._at, self._root
        if at is root and root.next.keys().isdisjoint(text):
            return text, None
        for index, char in enumerate(text, 1):
            while char not in at.next and at.fallback is not None:
                at = at.fallback
            at = at.next.get(char, root)
            if at.found:
                return self._end(text[:index], at.found)
        self._at = at
        whole = self._held + text
        cut = len(whole) - at.depth
        self._held = whole[cut:]
        return whole[:cut], None

    def flush(self) -> str:
        """What was held back, when the text has ended without a stop string."""
        rest, self._held, self._at = self._held, "", self._root
        return rest

    def _end(self, text: str, found: str) -> tuple[str, str]:
        self._stopped = found
        whole = self._held + text
        self._held, self._at = "", self._root
        return (whole if self._include else whole[: len(whole) - len(found)]), found


def _automaton(words: Sequence[str]) -> _Node:
    root = _Node(0)
    for word in words:
        node = root
        for depth, char in enumerate(word, 1):
            node = node.next.setdefault(char, _Node(depth))
        node.found = word
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        for char, child in node.next.items():
            other = node.fallback
            while other is not None and char not in other.next:
                other = other.fallback
            child.fallback = root if other is None else other.next[char]
            child.found = child.found or child.fallback.found
            waiting.append(child)
    return root
