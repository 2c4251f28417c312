"""Requests that were present at several deaths of engines, as callers in this process have them. Owns: which engine is
set aside for them, and whose turn it is there.

They are tried one after the other, as in a server (server/engines/trials.py). Must not know: text, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenmill.engine.running.said import MOST_DEATHS, PASSED, Said


class Turns:
    """See the module's text. owners: the engine of every request that has one."""

    def __init__(self, owners: Mapping[str, int]) -> None:
        self.owners = owners
        self.waiting: list[str] = []
        self.engine = -1
        """The engine that is set aside (-1: none)."""
        self.current: Said | None = None
        self.goal = 0
        """The current request has passed when it has said so many tokens."""
        self.passed: set[str] = set()

    def engines(self, living: Sequence[int], said: Said | None) -> Sequence[int]:
        """Those of the living engines that may have this request now; it asks again while there is none."""
        if said is None or said.deaths < MOST_DEATHS:
            return [number for number in living if number != self.engine]
        if said is not self.current:
            self._ask(living, said)
        return [self.engine] if said is self.current else []

    def _ask(self, living: Sequence[int], said: Said) -> None:
        name = said.request.id
        if name not in self.waiting:
            self.waiting.append(name)
        if self.current is not None or self.waiting[0] != name:
            return
        if self.engine not in living:
            self.engine = min(living, key=list(self.owners.values()).count, default=-1)
        first = said.deaths == MOST_DEATHS  # otherwise an engine died with several: each of them goes on alone
        beside = {other for other, number in self.owners.items() if number == self.engine}
        if not beside - (self.passed if first else set()):
            self.current = said
            self.goal = said.num_said + PASSED * said.num_outputs if first else 1 << 62

    def answered(self, name: str) -> None:
        """Look how much the request has said."""
        if self.current is not None and self.current.request.id == name and self.current.num_said >= self.goal:
            self.leave(name)
            self.passed.add(name)

    def leave(self, name: str) -> None:
        """The request has ended, waits no longer, or has lost its engine."""
        self.passed.discard(name)
        if name in self.waiting:
            self.waiting.remove(name)
        if self.current is not None and self.current.request.id == name:
            self.current = None
        if not self.waiting:
            self.engine = -1
