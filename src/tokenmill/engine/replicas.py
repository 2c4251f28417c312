"""Several engines of one model behind the interface of one, for callers in this process (data parallel). Owns: which
engine works on what, and waiting for whichever has something to commit.

Each engine has processes of its own, so all compute at once while this thread plans for one after the other. Must not
know: text, HTTP.
"""

from __future__ import annotations

import select
from collections import deque
from typing import Any

from tokenmill.core.errors import IdInUseError
from tokenmill.core.request import Request, TokenDelta
from tokenmill.engine.engine import Engine
from tokenmill.engine.routing import Router, asked_of
from tokenmill.process.pipe import LOOK_S


class Replicas:
    """Several engines, with the interface that callers use of an Engine."""

    def __init__(self, parts: list[Engine], prefix_block: int = 0) -> None:
        """prefix_block: tokens per block of the engines' prefix caches; 0: they have none."""
        self.parts = parts
        self.admission, self.executor, self.scheduler = parts[0].admission, parts[0].executor, parts[0].scheduler
        self.router = Router(prefix_block)
        self.owners: dict[str, int] = {}
        self.news = select.poll()
        for part in parts:
            executor: Any = part.executor
            for file in executor.files:
                self.news.register(file, select.POLLIN)

    @property
    def flying(self) -> deque[Any]:
        """The plans in flight of all engines."""
        return deque(plan for part in self.parts for plan in part.flying)

    @property
    def has_work(self) -> bool:
        """Does any engine have work?"""
        return any(part.has_work for part in self.parts)

    def add(self, request: Request, pooling: str | None = None) -> None:
        """Accept a request, or raise a UserError that says why not."""
        if request.id in self.owners:
            raise IdInUseError(request.id)
        for number, part in enumerate(self.parts):
            self.router.cached(number, *part.scheduler.tables.cache.listener.take())
        number = self.router.pick_engine(range(len(self.parts)), asked_of(request))
        try:
            self.parts[number].add(request, pooling)
        except BaseException:
            self.router.done(number, request.id)
            raise
        self.owners[request.id] = number

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> list[TokenDelta]:
        """End a request, or one of its outputs; returns the terminal deltas."""
        number = self.owners.get(request_id)
        if number is None:
            return []
        return self._seen(number, self.parts[number].abort(request_id, index, reason))

    def forget_prefixes(self) -> None:
        """Empty the prefix caches."""
        for part in self.parts:
            part.forget_prefixes()

    def begin(self, tokens: int) -> None:
        """See Engine.begin; each engine has been given its share."""
        for part in self.parts:
            part.begin(tokens // len(self.parts))

    def step(self) -> list[TokenDelta]:
        """Submit all plans that the engines can take, and commit results that have come; waits for at least one."""
        for part in self.parts:
            while part.has_work and len(part.flying) < part.executor.depth and part.submit():
                pass
        waiting = [(number, part) for number, part in enumerate(self.parts) if part.flying]
        while waiting:
            ready = [(number, part) for number, part in waiting if _is_ready(part.flying[0][1])]
            if ready:
                return [delta for number, part in ready for delta in self._seen(number, part.commit())]
            self.news.poll(LOOK_S * 1000)
        return []

    def close(self) -> None:
        """Stop all engines."""
        for part in self.parts:
            part.close()

    def _seen(self, number: int, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """The deltas unchanged; what they say about an engine's load is noted."""
        for delta in deltas:
            self.router.answered(number, delta.request_id, len(delta.tokens))
        ended = {delta.request_id for delta in deltas if delta.finish is not None}
        for name in ended - self.parts[number].scheduler.roster.groups.keys():
            self.owners.pop(name, None)
            self.router.done(number, name)
        return deltas


def _is_ready(ticket: Any) -> bool:
    """Have all ranks answered? Only tickets of processes know."""
    ready: bool = ticket.ready()
    return ready
