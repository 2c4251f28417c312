"""A backend without a model. Owns: nothing. Endpoints that are about no model get it while no model is loaded."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.core.errors import EngineDeadError
from tokenmill.core.request import Request
from tokenmill.server.backend import DeltaStream, EngineStats, ModelInfo, Timeline


class NoModelBackend:
    """A Backend that takes no requests."""

    def __init__(self) -> None:
        self.observe: Callable[[int], None] = lambda tokens: None
        self.info = ModelInfo(("",), "", 1, 1, None, {})

    async def open(self, request: Request, stream: DeltaStream, pooling: str | None = None) -> Timeline:
        raise EngineDeadError("no model is loaded")

    def abandon(self, request_id: str) -> None:
        """There are no requests."""

    def health(self) -> str | None:
        return None

    def stats(self) -> list[EngineStats]:
        return [EngineStats()]

    def counters(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """There is nothing to close."""
