"""A suffix automaton that grows token by token. Owns: which strings have occurred, and where each last ended.

Each state stands for the strings that have ended at the same places. A state's link leads to its longest suffix that
has ended at other places, too. Adding a token takes constant time on average. Must not know: sequences, drafts.
"""

from __future__ import annotations

REFRESHED = 4
"""How many links a newer end is passed along to replace older ones. Only the longest matches are asked for."""


class Automaton:
    """The automaton of `tokens`; state 0 stands for the empty string."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [0]
        self.last = 0

    def add(self, token: int) -> None:
        """Append one token."""
        follow, link, length, end = self.next, self.link, self.length, self.end
        self._refresh()
        self.tokens.append(token)
        made, at = len(length), self.last
        follow.append({})
        length.append(length[at] + 1)
        end.append(len(self.tokens))
        link.append(0)
        while at >= 0 and token not in follow[at]:
            follow[at][token] = made
            at = link[at]
        if at >= 0:
            found = follow[at][token]
            link[made] = found if length[found] == length[at] + 1 else self._split(at, token, found)
        self.last = made

    def _split(self, at: int, token: int, found: int) -> int:
        """Split a state: the shorter strings, which also end here with `token`, get a state of their own."""
        twin = len(self.length)
        self.next.append(dict(self.next[found]))
        self.length.append(self.length[at] + 1)
        self.link.append(self.link[found])
        self.end.append(self.end[found])
        while at >= 0 and self.next[at].get(token) == found:
            self.next[at][token] = twin
            at = self.link[at]
        self.link[found] = twin
        return twin

    def _refresh(self) -> None:
        """Note the new end in the states of the text's longest suffixes."""
        at, here = self.link[self.last], len(self.tokens)
        for _ in range(REFRESHED):
            if at <= 0:
                return
            self.end[at] = here
            at = self.link[at]

    def repeated(self) -> tuple[int, int]:
        """The longest suffix of the text that occurred before -> its length, and where it ended."""
        at = self.link[self.last]
        return (self.length[at], self.end[at]) if at > 0 else (0, 0)

    def walk(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Follow another text by one token: from the state and length of its longest suffix that occurs here -> the new
        ones."""
        while state and token not in self.next[state]:
            state = self.link[state]
            matched = self.length[state]
        found = self.next[state].get(token)
        return (found, matched + 1) if found is not None else (0, 0)
