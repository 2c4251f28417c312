"""Which request is sent to an engine next. Owns: requests that wait in the server, ordered by priority and then shared
fairly between keys.

Used only if several keys share the server. Engines serve first come, first served, so one key's long queue must not
wait inside them. Must not know: engines, HTTP.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class FairQueue:
    """`limit`: most outputs in the engines at once (0: no limit, so nothing waits here)."""

    limit: int = 0
    sent: int = 0
    by_owner: Counter[str] = field(default_factory=Counter)
    waiting: dict[tuple[int, str], deque[tuple[str, int]]] = field(default_factory=dict)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait here."""
        return sum(map(len, self.waiting.values()))

    def take(self, owner: str, request_id: str, count: int, priority: int) -> bool:
        """True: send it now (it counts as sent). False: it waits, and `next` will return it."""
        if not self.limit or (self.sent + count <= self.limit and not self.waiting) or self.sent == 0:
            self._send(owner, count)
            return True
        self.waiting.setdefault((priority, owner), deque()).append((request_id, count))
        return False

    def done(self, owner: str, count: int) -> None:
        """Outputs of this owner have left the engines."""
        self.sent -= count
        self.by_owner[owner] -= count
        if self.by_owner[owner] <= 0:
            del self.by_owner[owner]

    def next(self) -> str | None:
        """A request that may be sent now: the most urgent one; among equals, one of the owner with the fewest outputs
        in the engines."""
        if not self.waiting:
            return None
        key = min(self.waiting, key=lambda k: (k[0], self.by_owner[k[1]], self.waiting[k][0][0]))
        request_id, count = self.waiting[key][0]
        if self.sent and self.sent + count > self.limit:
            return None
        self.waiting[key].popleft()
        if not self.waiting[key]:
            del self.waiting[key]
        self._send(key[1], count)
        return request_id

    def drop(self, owner: str, request_id: str, priority: int) -> bool:
        """Remove a request whose caller has left. Returns whether it was waiting here."""
        queue = self.waiting.get((priority, owner))
        if queue is None:
            return False
        kept = deque(item for item in queue if item[0] != request_id)
        found = len(kept) != len(queue)
        if kept:
            self.waiting[priority, owner] = kept
        else:
            del self.waiting[priority, owner]
        return found

    def _send(self, owner: str, count: int) -> None:
        self.sent += count
        self.by_owner[owner] += count
