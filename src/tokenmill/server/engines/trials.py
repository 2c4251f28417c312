"""Finding the request that kills engines. Owns: the suspects, and which of them runs apart from the others.

When engines die again and again, the requests that ran on them are not all given up. One engine is set aside, and the
suspects are tried on it, one after the other. A request that gets past the point where engines died has passed and goes
on there. If the engine dies under one alone, that one is given up, and the other suspects go free. If it dies under one
and others that had passed, each of them is tried anew, to its end and alone. Must not know: links, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tokenmill.engine.running.said import PASSED
from tokenmill.server.engines.state import EngineRecord, Open


@dataclass(slots=True)
class Trials:
    """`most`: deaths that make a request a suspect. `engine`: the engine set aside for trials (-1: none). `current`:
    the request on trial. `left`: tokens until it passes (None: it must end). `passed`: how many trials were passed."""

    engines: Sequence[EngineRecord]
    most: int
    dispatch: Callable[..., None]
    """Sends a request to one engine, or without a number to any engine that is not set aside."""
    unpark: Callable[[], None]
    """Looks again at requests without an engine."""
    engine: int = -1
    current: Open | None = None
    left: int | None = None
    doubt: bool = False
    """The caller of the one before has left, and the engine may still die of its request."""
    contested: set[str] = field(default_factory=set)
    """Requests whose trial was no proof: the engine died with others, too."""
    waiting: list[Open] = field(default_factory=list)
    passed: int = 0

    def replay(self, entry: Open) -> None:
        """The request's engine has died: continue the request elsewhere, or let it wait for its trial."""
        if entry.deaths < self.most:
            self.dispatch(entry)
        else:
            self.waiting.append(entry)

    def contest(self, entries: Iterable[Open]) -> None:
        """The engine for trials has died, and the one on trial need not be the cause."""
        self.current = None
        self.contested.update(entry.request.id for entry in entries)

    def lost(self, engine: EngineRecord, *, explained: bool) -> None:
        """An engine has died, and all its requests were replayed. `explained`: the guilty request is known."""
        self.doubt = False
        if not self.waiting:
            return
        if self.engine < 0:
            self.engine = engine.number
        if explained or engine.trouble is not None:  # or there is no engine for trials
            free, self.waiting = self.waiting, []
            self.contested.clear()
            for entry in free:
                entry.deaths = self.most - 1  # one more death makes it a suspect again
                self.dispatch(entry)
        self.go_on()

    def said(self, entry: Open, tokens: int) -> None:
        """Count tokens of the request on trial."""
        if entry is not self.current:
            return
        self.doubt = False  # the engine goes on without the one before
        if self.left is not None:
            self.left -= tokens
            if self.left <= 0:
                self.passed += 1
                self.over(entry)

    def over(self, entry: Open) -> None:
        """The request has passed its trial, or it has ended."""
        self.contested.discard(entry.request.id)
        if entry in self.waiting:
            self.waiting.remove(entry)
        if entry is self.current:
            passed = self.left is not None and self.left <= 0
            self.current, self.doubt = None, not passed and len(entry.ended) < entry.num_outputs
            self.go_on()

    def go_on(self) -> None:
        """Try the next suspect when the engine for trials is ready. After the last one, that engine serves all requests
        again."""
        if self.engine < 0 or self.current is not None:
            return
        if not self.waiting:
            self.engine = -1
            self.unpark()
        elif self.engines[self.engine].ready:
            entry = min(self.waiting, key=lambda each: each.num_said)  # prompts do most harm
            self.waiting.remove(entry)
            self.current = entry
            to_its_end = entry.request.id in self.contested or entry.deaths > 3 * self.most
            self.left = None if to_its_end else PASSED * entry.num_outputs
            self.dispatch(entry, self.engine)
