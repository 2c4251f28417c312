"""The lives of recent requests, for GET /v1/requests/{id}. Owns: a bounded ring of records without any text.

Must not know: HTTP, engines.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tokenmill.server.backend import Timeline

MAX_RECORDS = 1000


@dataclass(slots=True)
class Life:
    """One prompt's figures within a record."""

    timeline: Timeline
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    reasons: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Record:
    """One HTTP request; `owner` is the key's name, and nobody else may read it."""

    id: str
    owner: str
    created: float
    began: float
    lives: list[Life] = field(default_factory=list)
    ended: float | None = None


class History:
    """Records by id, the oldest dropped first."""

    def __init__(self, most: int = MAX_RECORDS) -> None:
        self.most = most
        self.records: OrderedDict[str, Record] = OrderedDict()

    def begin(self, request_id: str, owner: str, began: float) -> Record:
        """A new record; one with the same id is replaced."""
        record = Record(request_id, owner, time.time(), began)
        self.records.pop(request_id, None)
        self.records[request_id] = record
        while len(self.records) > self.most:
            self.records.popitem(last=False)
        return record

    def find(self, request_id: str, owner: str) -> dict[str, Any] | None:
        """A record as JSON; None for an unknown id, and for somebody else's."""
        record = self.records.get(request_id)
        return None if record is None or record.owner != owner else _shown(record)

    def recent(self, owner: str, most: int) -> list[dict[str, Any]]:
        """An owner's newest records as JSON, the newest first."""
        own = (record for record in reversed(self.records.values()) if record.owner == owner)
        return [_shown(record) for record in islice(own, most)]


def _shown(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "request",
        "created": int(record.created),
        "state": "ended" if record.ended is not None else "open",
        "duration_ms": _ms(record.began, record.ended or time.monotonic()),
        "prompts": [_life(life, record.began) for life in record.lives],
    }


def _life(life: Life, began: float) -> dict[str, Any]:
    t = life.timeline
    points = (
        ("accepted", t.arrival),
        ("started", t.started),
        ("first_token", t.first_token),
        ("last_token", t.last_token),
    )
    return {
        "events": list(_events([*points, ("ended", t.ended)], began)),
        "prompt_tokens": life.prompt_tokens,
        "cached_tokens": life.cached_tokens,
        "output_tokens": life.output_tokens,
        "prefill": [{"at_ms": _ms(began, at), "tokens": tokens} for at, tokens in t.prefill],
        "preemptions": t.preemptions,
        "replays": t.replays,
        "finish_reasons": list(life.reasons),
    }


def _events(points: Iterable[tuple[str, float | None]], began: float) -> Iterable[dict[str, Any]]:
    for name, at in points:
        if at is not None:
            yield {"event": name, "at_ms": _ms(began, at)}


def _ms(start: float, end: float) -> float:
    return round((end - start) * 1e3, 3)
