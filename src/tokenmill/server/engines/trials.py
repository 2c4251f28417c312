"""Which request is it that kills engines? Owns: the suspects, and whose turn it is to run apart from the others.

Requests that were there when engines died again and again are not given up together. An engine is kept free, and each
is tried on it: one that gets past the place where engines died joins the others again, one whose engine dies under it
is given up, and the rest go free. Must not know: links, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenmill.server.engines.state import Engine, Open

PASSED = 16
"""Tokens of each output: more than an engine may have been ahead of what it had reported when it died."""


@dataclass(frozen=True, slots=True)
class Ways:
    """What becomes of a request: sent to one engine, to any that serves all, or (those without an engine) looked at
    again."""

    send: Callable[[Open, int], None]
    dispatch: Callable[[Open], None]
    unpark: Callable[[], None]


@dataclass(slots=True)
class Trials:
    """`most`: deaths that make a suspect; `engine`: kept free for trials (-1: none); `current`: who is tried there;
    `left`: tokens until it has passed (None: only its end will do); `passed`: trials that were passed."""

    engines: Sequence[Engine]
    most: int
    ways: Ways
    engine: int = -1
    current: Open | None = None
    left: int | None = None
    waiting: list[Open] = field(default_factory=list)
    passed: int = 0

    def replay(self, entry: Open) -> None:
        """Its engine has died: it goes on elsewhere, or waits for its turn."""
        if entry.deaths < self.most:
            self.ways.dispatch(entry)
        else:
            self.waiting.append(entry)

    def lost(self, engine: Engine, *, explained: bool) -> None:
        """An engine has died, and all its requests were replayed; `explained`: the one to blame is known."""
        if not self.waiting:
            return
        if self.engine < 0:
            self.engine = engine.number
        if explained or engine.trouble is not None:  # or there is nowhere to try them
            free, self.waiting = self.waiting, []
            for entry in free:
                entry.deaths = self.most - 1  # another one makes a suspect again
                self.ways.dispatch(entry)
        self.go_on()

    def said(self, entry: Open, tokens: int) -> None:
        """Tokens have come."""
        if entry is self.current and self.left is not None:
            self.left -= tokens
            if self.left <= 0:
                self.passed += 1
                self.over(entry)

    def over(self, entry: Open) -> None:
        """It has passed, or it has ended."""
        if entry in self.waiting:
            self.waiting.remove(entry)
        if entry is self.current:
            self.current = None
            self.go_on()

    def go_on(self) -> None:
        """The next one's turn, once the engine that is kept free serves; after the last it serves all again."""
        if self.engine < 0 or self.current is not None:
            return
        if not self.waiting:
            self.engine = -1
            self.ways.unpark()
        elif self.engines[self.engine].ready:
            entry = min(self.waiting, key=lambda each: each.num_said)  # most harm is done by a prompt
            self.waiting.remove(entry)
            self.current = entry
            self.left = None if entry.deaths > 3 * self.most else PASSED * entry.num_outputs
            self.ways.send(entry, self.engine)
