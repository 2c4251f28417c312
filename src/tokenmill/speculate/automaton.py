"""A suffix automaton that grows token by token. Owns: which strings have occurred, and where each last ended.

Each state stands for the strings that have ended at the same places; a link leads to the longest suffix that has ended
elsewhere, too. Growing takes constant time on average. Knows nothing of sequences or drafts.
"""

from __future__ import annotations

REFRESHED = 4
"""Links along which a newer end replaces an older one: the longest matches are the ones that are asked for."""


class Automaton:
    """Over `tokens`; state 0 stands for the empty string."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [0]
        self.last = 0

    def add(self, token: int) -> None:
        """One token more."""
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
        """A state of its own for what ends here with `token` and is shorter than the rest of its kind."""
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
        """What the text ends with has ended here, too."""
        at, here = self.link[self.last], len(self.tokens)
        for _ in range(REFRESHED):
            if at <= 0:
                return
            self.end[at] = here
            at = self.link[at]

    def repeated(self) -> tuple[int, int]:
        """The longest end of the text that has occurred before -> its length, and where it ended."""
        at = self.link[self.last]
        return (self.length[at], self.end[at]) if at > 0 else (0, 0)

    def walk(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """From the longest end of another text that occurs here, by one token of it -> the same."""
        while state and token not in self.next[state]:
            state = self.link[state]
            matched = self.length[state]
        found = self.next[state].get(token)
        return (found, matched + 1) if found is not None else (0, 0)
