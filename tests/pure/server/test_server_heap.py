"""The heap is trimmed once after each burst, and never during one."""

from __future__ import annotations

import asyncio

from tokenmill.server.heap import LEAST, system_trim, trim_after_bursts


def test_trimmed_after_bursts_only() -> None:
    looks = iter([(5, 1), (LEAST, LEAST), (LEAST, 20), (20, LEAST // 4), (16, 1), (3, 0), (3000, 700), (700, 0)])
    trims: list[int] = []

    async def main() -> None:
        done = asyncio.Event()
        asked, open_now = 0, 0

        def most() -> int:
            nonlocal asked, open_now
            asked += 1
            found = next(looks, None)
            if found is None:
                done.set()
                return 0
            open_now = found[1]
            return found[0]

        task = asyncio.create_task(trim_after_bursts(most, lambda: open_now, lambda: trims.append(asked), period=0.0))
        await asyncio.wait((task, asyncio.create_task(done.wait())), return_when=asyncio.FIRST_COMPLETED)
        task.cancel()

    asyncio.run(main())
    assert trims == [4, 7, 8]


def test_the_system_can_trim_or_cannot() -> None:
    trim = system_trim()
    assert trim is None or trim() in (0, 1)
    if trim is None:
        asyncio.run(trim_after_bursts(lambda: 0, lambda: 0, trim))
