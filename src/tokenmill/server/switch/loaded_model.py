"""A loaded model: its engines, and what endpoints need from it. Owns: making and ending it.

Must not know: other models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.server.backend import ModelInfo
from tokenmill.server.context import Context
from tokenmill.server.engines.fleet import Fleet


@dataclass(slots=True)
class Loaded:
    """One loaded model. The module's text describes it."""

    fleet: Fleet
    context: Context

    def open_requests(self) -> int:
        return len(self.fleet.open_requests)

    def held_bytes(self) -> int:
        return bytes_of(self.fleet.info) * len(self.fleet.engines)

    def kept_bytes(self) -> int:
        return self.fleet.rest.kept

    async def sleep(self, level: int) -> None:
        await self.fleet.rest.sleep(level)

    async def wake(self, tags: Sequence[str]) -> list[str]:
        await self.fleet.rest.wake(tags)
        return self.fleet.rest.asleep

    async def abort_all(self) -> None:
        """End every open request now, with what it has said so far."""
        for name in list(self.fleet.open_requests):
            await self.fleet.abort(name)

    def end_all(self, reason: str) -> None:
        """End every open request now, with an error that says why."""
        self.fleet.end_all(reason)

    async def close(self) -> None:
        """End its engines first, then its parts, which no request uses any more."""
        await self.fleet.close()
        await let_go(self.context)


async def let_go(context: Context) -> None:
    """End a context's threads and listeners."""
    context.text.close()
    context.metrics.attach(None)
    context.shared.metrics.listeners.discard(context.activity.events.refused)
    if context.traces is not None:
        await asyncio.to_thread(context.traces.close)


def bytes_of(info: ModelInfo) -> int:
    """The bytes of weights, adapters and K/V cache, as one engine has measured them."""
    return sum(parts_of(info).values())


def parts_of(info: ModelInfo) -> dict[str, int]:
    """The same, part by part."""
    facts = info.details
    blocks = sum(facts.get("num_blocks") or ()) * float(facts.get("kv_block_bytes", 0.0))
    weights, adapters = int(facts.get("weight_bytes", 0)), int(facts.get("adapter_bytes", 0))
    return {"weights": weights, "kv_cache": int(blocks), "adapters": adapters}
