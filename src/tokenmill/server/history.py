"""What became of recent requests, for GET /v1/requests/{id}. Owns: a bounded number of records, without any text.

Must not know: HTTP, engines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from tokenmill.server.backend import Timeline
from tokenmill.server.byte_ring import ByteRing

MAX_RECORDS = 1000
MAX_BYTES = 1 << 20
"""Most bytes of ended records of all keys. It is twice the size of a thousand requests with short prompts."""
MOST_PROMPTS = 128
"""Most prompts of one request whose figures are shown."""
LEAST_RECORDS, LEAST_BYTES = 100, 1 << 16
"""The records and bytes that each key may have, however many keys there are."""
_KINDS = ("chatcmpl-", "cmpl-", "msg_", "embd-", "rerank-", "score-", "classify-")
"""What stands before the header X-Request-Id in ids of records. Several APIs have no id in their answers."""
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class PromptFigures:
    """One prompt's figures within a record."""

    timeline: Timeline
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_saved_s: float = 0.0
    reasons: list[str] = field(default_factory=list)
    by_output: dict[int, int] = field(default_factory=dict)
    """Output tokens by output, where there are several."""

    @property
    def longest(self) -> int:
        """The tokens of the longest output. Outputs grow side by side."""
        return max(self.by_output.values(), default=self.output_tokens)


@dataclass(slots=True)
class Record:
    """One HTTP request. `owner` is the name of its key; nobody else may read it."""

    id: str
    owner: str
    created: float
    began: float
    prompts: list[PromptFigures] = field(default_factory=list)
    ended: float | None = None


class History:
    """Open records, and ended ones in the form in which they are shown. A key's oldest records are dropped first.

    Every key has a ring of its own, so that none pushes out another's records. An id is looked up together with its
    key, because two clients may choose the same id."""

    def __init__(self, most: int = MAX_RECORDS, size: int = MAX_BYTES, *, owners: int = 1) -> None:
        self.most = max(min(most, LEAST_RECORDS), most // owners)
        self.size = max(min(size, LEAST_BYTES), size // owners)
        self.open: dict[tuple[str, str], Record] = {}
        self.rings: dict[str, ByteRing] = {}

    def __len__(self) -> int:
        return len(self.open) + sum(map(len, self.rings.values()))

    def begin(self, request_id: str, owner: str, began: float) -> Record:
        """Begin a record. An open one of this key with the same id is replaced. The gate limits how many are open."""
        record = self.open[owner, request_id] = Record(request_id, owner, time.time(), began)
        return record

    def end(self, record: Record, now: float) -> None:
        """The request has ended."""
        record.ended = now
        if self.open.get((record.owner, record.id)) is record:
            del self.open[record.owner, record.id]
        ring = self.rings.get(record.owner)
        if ring is None:
            ring = self.rings[record.owner] = ByteRing(self.size, self.most)
        ring.add(_key(record.owner, record.id) + _encode(record.began) + _encode(_shown(record)))

    def find(self, request_id: str, owner: str) -> dict[str, Any] | None:
        """A record as JSON: of the answer's id, or of the header X-Request-Id that is part of it. None for an unknown
        id, and for a record of somebody else."""
        for name in (request_id, *(kind + request_id for kind in _KINDS)):
            if (record := self.open.get((owner, name))) is not None:
                return _shown(record)
            for data in self._ended(_key(owner, name), owner):
                return _decoded(data)[1]
        return None

    def recent(self, owner: str, most: int) -> list[dict[str, Any]]:
        """An owner's newest records as JSON, the newest first."""
        found = [_decoded(data) for data in islice(self._ended(_key(owner), owner), most)]
        found += [(record.began, _shown(record)) for record in self.open.values() if record.owner == owner]
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [shown for _, shown in found[:most]]

    def _ended(self, prefix: bytes, owner: str) -> Iterator[bytes]:
        ring = self.rings.get(owner)
        return ring.newest(prefix) if ring is not None else iter(())


def _key(owner: str, request_id: str | None = None) -> bytes:
    """The beginning of an ended record: a record is an array of four parts, and these are the first two."""
    return b"\x94" + _encode(owner) + (b"" if request_id is None else _encode(request_id))


def _decoded(data: bytes) -> tuple[float, dict[str, Any]]:
    _, _, began, shown = msgspec.msgpack.decode(data)
    return began, shown


def _shown(record: Record) -> dict[str, Any]:
    left_out = len(record.prompts) - MOST_PROMPTS
    return {
        "id": record.id,
        "object": "request",
        "created": int(record.created),
        "state": "ended" if record.ended is not None else "open",
        "duration_ms": _ms(record.began, record.ended or time.monotonic()),
        "prompts": [_shown_prompt(figures, record.began) for figures in record.prompts[:MOST_PROMPTS]],
        **({"prompts_left_out": left_out} if left_out > 0 else {}),
    }


def _shown_prompt(figures: PromptFigures, began: float) -> dict[str, Any]:
    t = figures.timeline
    points = (
        ("accepted", t.arrival),
        ("started", t.started),
        ("first_token", t.first_token),
        ("last_token", t.last_token),
    )
    return {
        "events": list(_events([*points, ("ended", t.ended)], began)),
        "prompt_tokens": figures.prompt_tokens,
        "cached_tokens": figures.cached_tokens,
        "output_tokens": figures.output_tokens,
        "prefill": [{"at_ms": _ms(began, at), "tokens": tokens} for at, tokens in t.prefill],
        "preemptions": t.preemptions,
        "replays": t.replays,
        "finish_reasons": list(figures.reasons),
        **_shown_drafts(figures),
    }


def _shown_drafts(figures: PromptFigures) -> dict[str, Any]:
    """A prompt's figures of drafts, if it has any. Most records have none and need no room for them."""
    if not figures.drafted_tokens:
        return {}
    saved_ms = round(figures.draft_saved_s * 1e3, 3)
    return {"drafts": {"tried": figures.drafted_tokens, "right": figures.accepted_tokens, "saved_ms": saved_ms}}


def _events(points: Iterable[tuple[str, float | None]], began: float) -> Iterable[dict[str, Any]]:
    for name, at in points:
        if at is not None:
            yield {"event": name, "at_ms": _ms(began, at)}


def _ms(start: float, end: float) -> float:
    return round((end - start) * 1e3, 3)
