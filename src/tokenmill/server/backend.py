"""What the HTTP side needs from whatever makes tokens. Owns: the Backend protocol, ModelInfo, DeltaStream.

A Fleet of engines is one Backend, testing.fake_generator is another. Must not know: HTTP, processes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill.core.request import Request, TextDelta
from tokenmill.engine.running.wire import EngineStats as EngineStats
from tokenmill.text.codec import Tokenizer

UNAVAILABLE = "unavailable: "
"""Prefix of a delta's error when the engine, not the request, is to blame."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model. Answers carry `names[0]`; the names of adapters follow the model's own names."""

    names: tuple[str, ...]
    root: str
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None
    generation: dict[str, Any]
    max_rows: int = 256
    priorities: bool = False
    details: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, int] = field(default_factory=dict)
    """The number of each adapter, by name."""
    folders: dict[str, str] = field(default_factory=dict)
    """The folder of each adapter, by name."""


MAX_CHUNKS = 256


@dataclass(slots=True)
class Timeline:
    """The times of one request's events, on the monotonic clock."""

    arrival: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    replays: int = 0
    preemptions: int = 0
    engine: int = 0
    """The engine that works on the request, or did so last."""
    prefill: list[tuple[float, int]] = field(default_factory=list)
    """(time, prompt tokens that were cached or computed by then), for the first MAX_CHUNKS steps."""


class DeltaStream:
    """Brings deltas to their handler, all that are ready in one batch. Several requests may share a stream.

    `owner`: the key that asks, so that keys get fair shares. `session`: the conversation. `rank`: the engine that the
    request wants."""

    __slots__ = ("_ready", "_waiter", "owner", "rank", "session")

    def __init__(self, owner: str = "") -> None:
        self.owner = owner
        self.session: str | None = None
        self.rank: int | None = None
        self._ready: deque[TextDelta] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._ready)

    def put(self, delta: TextDelta) -> None:
        """Hand over one delta (event loop's thread only)."""
        self._ready.append(delta)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def batch(self) -> list[TextDelta]:
        """All deltas since the last call. Waits for at least one."""
        if not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        found = list(self._ready)
        self._ready.clear()
        return found


class Backend(Protocol):
    """Makes tokens for checked requests. `observe` is called with each step's number of tokens and its engine."""

    observe: Callable[..., None]

    @property
    def info(self) -> ModelInfo: ...

    async def open(self, request: Request, stream: DeltaStream, pooling: str | None = None) -> Timeline:
        """Accept a request, or raise UserError or EngineDeadError. Every output ends with one terminal delta in
        `stream`. With `pooling`, the only delta carries a vector."""
        ...

    def abandon(self, request_id: str) -> None:
        """End this request now, because nobody reads it any more. Unknown ids are ignored."""
        ...

    def health(self) -> str | None:
        """None, or why no progress is to be expected."""
        ...

    def stats(self) -> list[EngineStats]: ...

    def counters(self) -> dict[str, float]:
        """More numbers for /metrics: restarts, replays, last_step_age_seconds."""
        ...

    async def close(self) -> None: ...
