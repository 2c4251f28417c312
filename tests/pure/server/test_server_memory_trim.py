"""The heap is trimmed once after each burst and never during one, and once in a while under large bodies."""

from __future__ import annotations

import asyncio
import contextlib

from tokenmill.server.memory_trim import LEAST, LEAST_BYTES, PAUSE, SELDOM, Load, system_trim, trim_after_bursts


def trims(looks: list[tuple[int, int, int]]) -> list[int]:
    """After which looks it is trimmed; a look: the most open since the last, those open now, bytes of bodies since."""
    found: list[int] = []

    class Script(Load):
        number = 0

        def __getattribute__(self, name: str) -> int:
            if name == "most":  # asked once a look, first of all
                Script.number += 1
                if Script.number > len(looks):
                    raise EOFError
                most, self.open, self.taken = looks[Script.number - 1]
                return most
            return int(object.__getattribute__(self, name))

    with contextlib.suppress(EOFError):
        asyncio.run(trim_after_bursts(Script(), lambda: found.append(Script.number), period=0.0))
    return found


def test_trimmed_after_bursts_only() -> None:
    looks = [(5, 1), (LEAST, LEAST), (LEAST, 20), (20, LEAST // 4), (16, 1), (3, 0), (3000, 700), (700, 0)]
    assert trims([(most, now, 0) for most, now in looks]) == [4, 7, 8]


def test_trimmed_while_large_bodies_come_and_after_the_last() -> None:
    half = LEAST_BYTES // 2
    busy = [(20, 20, half)] * (3 * PAUSE)
    assert trims(busy) == [PAUSE, 2 * PAUSE, 3 * PAUSE]
    assert trims([(1, 0, half), (1, 0, half), *[(0, 0, 0)] * (2 * PAUSE)]) == [PAUSE]
    assert trims([(20, 20, 100)] * (3 * PAUSE)) == []


def test_trimmed_seldom_under_small_requests_and_never_when_idle() -> None:
    assert trims([(3, 2, 100)] * (2 * SELDOM + 5)) == [SELDOM, 2 * SELDOM]
    assert trims([(1, 0, 100)] + [(0, 0, 0)] * (3 * SELDOM)) == [SELDOM]


def test_a_load_counts_what_it_is_told() -> None:
    load = Load()
    load.enter()
    load.enter()
    load.leave(7)
    assert (load.open, load.most, load.taken) == (1, 2, 7)


def test_the_system_can_trim_or_cannot() -> None:
    trim = system_trim()
    assert trim is None or trim() in (0, 1)
    if trim is None:
        asyncio.run(trim_after_bursts(Load(), trim))
