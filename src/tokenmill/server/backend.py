"""What the HTTP side needs of whatever makes tokens. Owns: the Backend seam, ModelInfo, DeltaStream.

A Fleet of engines is one Backend, testing.fake_generator another. Must not know: HTTP, processes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill.core.request import Request, TextDelta
from tokenmill.engine.wire import EngineStats as EngineStats
from tokenmill.text.codec import Tokenizer

UNAVAILABLE = "unavailable: "
"""Begins the error of a delta when the engine, not the request, is to blame."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model: `names[0]` is the one that answers carry; its adapters' names follow the model's own."""

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
    """Those of the names that are adapters, with their numbers."""
    folders: dict[str, str] = field(default_factory=dict)
    """Where adapters lie."""


MAX_CHUNKS = 256


@dataclass(slots=True)
class Timeline:
    """When things happened to one request, on the monotonic clock."""

    arrival: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    replays: int = 0
    preemptions: int = 0
    engine: int = 0
    """Which one works on it, or did last."""
    prefill: list[tuple[float, int]] = field(default_factory=list)
    """When how many of the prompt's tokens were there, cached or computed; the first MAX_CHUNKS steps of it."""


class DeltaStream:
    """The way of deltas to their handler: everything that is ready comes in one batch. Requests may share one.

    `owner` names the key that asks, for fair turns; `session` the conversation, and `rank` the engine that it wants.
    """

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
        """All deltas that have come since the last call; waits for one."""
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
    """Makes tokens for checked requests. `observe` is called with each step's number of tokens, and its engine's."""

    observe: Callable[..., None]

    @property
    def info(self) -> ModelInfo: ...

    async def open(self, request: Request, stream: DeltaStream, pooling: str | None = None) -> Timeline:
        """Accept a request (UserError, EngineDeadError say why not); each of its outputs ends with one terminal
        delta in `stream`. With `pooling` the only delta carries a vector."""
        ...

    def abandon(self, request_id: str, index: int | None = None) -> None:
        """Nobody reads this request (or this output) any more: end it now. Unknown ids are ignored."""
        ...

    def health(self) -> str | None:
        """None, or why no progress is to be expected."""
        ...

    def stats(self) -> list[EngineStats]: ...

    def counters(self) -> dict[str, float]:
        """Further numbers for /metrics: restarts, replays, last_step_age_seconds."""
        ...

    async def close(self) -> None: ...
