"""How late the event loop is. Owns: a task that sleeps and compares the clock when it wakes. Must not know: metrics,
HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PERIOD_S = 0.05


async def watch_lag(saw: Callable[[float], None], period: float = PERIOD_S) -> None:
    """Call `saw` with the seconds by which each sleep was too long. Runs for ever."""
    clock = asyncio.get_running_loop().time
    while True:
        wanted = clock() + period
        await asyncio.sleep(period)
        saw(max(0.0, clock() - wanted))
