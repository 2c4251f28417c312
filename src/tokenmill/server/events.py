"""What an operator should know: restarts, engines that do not start, refusals. Owns: the newest events with their
times. A refusal that repeats within a minute is counted, not listed again. Must not know: HTTP, who was refused.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST = 100
TOGETHER_S = 60.0
COUNTED = {
    "engine_restarts": "An engine was started again; its requests went on.",
    "engine_failed_starts": "An engine could not be started; another try follows.",
}
REFUSED = {
    "queue_full": "the queue was full",
    "model": "a model could not be had",
    "share": "a key had its share of the places",
    "requests_per_minute": "too many requests a minute for a key",
    "tokens_per_minute": "too many tokens a minute for a key",
    "draining": "the server was shutting down",
    "logprobs": "no room for log-probabilities",
    "slow_reader": "an answer was not read",
    "connections": "too many connections",
}


@dataclass(slots=True)
class Event:
    """Something that happened `count` times, the last time at `at` (Unix time)."""

    at: float
    kind: str
    text: str
    count: int = 1


class Events:
    """The newest events of one server."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.kept: deque[Event] = deque(maxlen=MOST)
        self.counted: dict[str, float] = {}

    def refused(self, reason: str) -> None:
        """Note that a request was refused for this reason."""
        why = REFUSED.get(reason, reason.replace("_", " "))
        self._note("refusal", f"Refused: {why}.", 1)

    def counters(self, found: Mapping[str, float]) -> None:
        """Compare totals with those of the last call, and note what has changed."""
        for name, text in COUNTED.items():
            new = found.get(name, 0)
            if new > self.counted.get(name, 0):
                self._note("restart", text, round(new - self.counted.get(name, 0)))
            self.counted[name] = new

    def _note(self, kind: str, text: str, count: int) -> None:
        now = self.clock()
        for event in reversed(self.kept):
            if event.text == text and now - event.at < TOGETHER_S:
                event.at, event.count = now, event.count + count
                return
        self.kept.append(Event(now, kind, text, count))

    def shown(self) -> list[dict[str, Any]]:
        """All events, the newest first."""
        ordered = sorted(self.kept, key=lambda event: event.at, reverse=True)
        return [{"at": e.at, "kind": e.kind, "text": e.text, "count": e.count} for e in ordered]
