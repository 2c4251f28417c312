"""A burst's memory goes back to the system when the burst is over. Owns: when, and how.

glibc keeps freed memory below the top of its heap for ever unless asked; without glibc nothing is done.
Must not know: requests.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

PERIOD_S = 1.0
LEAST = 64
"""Fewer open requests at once are no burst."""


def system_trim() -> Callable[[], object] | None:
    """glibc's way to give back what is free."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(0)


async def trim_after_bursts(
    most_since: Callable[[], int], now: Callable[[], int], trim: Callable[[], object] | None, period: float = PERIOD_S
) -> None:
    """Runs for ever. most_since: the most requests open at once since this was last asked; now: those open now."""
    highest = 0
    while trim is not None:
        await asyncio.sleep(period)
        highest = max(highest, most_since())
        if highest >= LEAST and now() <= highest // 4:
            highest = 0
            await asyncio.to_thread(trim)
