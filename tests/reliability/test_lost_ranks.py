"""Ranks of an engine, killed and stopped under streams: every stream ends with the text of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cpu.server.conftest import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
Launch = Callable[..., Running]
STREAMS = 32
LOSSES = int(os.environ.get("TOKENMILL_LOST_RANKS", "20"))
FOUND_S = 3.0
"""Until a lost rank has ended its engine, beside the length of a step."""


def body(i: int) -> dict[str, Any]:
    return {"prompt": [20 + i, 40, 60 + i], "max_tokens": 160, "seed": i, "temperature": 0.8, "ignore_eos": True}


APART = "--data-parallel-size"


def ranks(served: Running, way: str) -> list[int]:
    """The processes that compute: ranks of one engine, or engines."""
    found, mark = [], b"spawn_main" if way == APART else b"begin('tokenmill.engine.steps.worker')"
    for pid in served.family():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


async def stream(session: aiohttp.ClientSession, url: str, i: int, marks: list[float]) -> str:
    text = ""
    async with session.post(url + "/v1/completions", json={**body(i), "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += "".join(choice.get("text", "") for choice in event["choices"])
                marks.append(time.monotonic())
    return text


async def lose(
    served: Running, way: str, how: signal.Signals, rng: random.Random, marks: list[float]
) -> tuple[float, float]:
    """-> seconds until all ranks of that life (of several engines: the lost one) were gone; until the next token."""
    while len(before := ranks(served, way)) < 2:
        await asyncio.sleep(0.05)
    count = len(marks)
    while len(marks) < count + 40:  # they are in the middle of their answers
        await asyncio.sleep(0.01)
    lost = rng.choice(before)
    os.kill(lost, how)
    at = time.monotonic()
    while set(ranks(served, way)) & ({lost} if way == APART else set(before)):
        await asyncio.sleep(0.01)
        assert time.monotonic() - at < 60, "the engine lives on"
    gone = time.monotonic() - at
    count = len(marks)
    while len(marks) == count:
        await asyncio.sleep(0.01)
        assert time.monotonic() - at < 240, "nothing goes on"
    return gone, time.monotonic() - at


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("way", ["--tensor-parallel-size", "--pipeline-parallel-size", APART])
def test_streams_outlive_their_ranks(launch: Launch, way: str, how: signal.Signals) -> None:
    served = launch(way, "2", "--max-restarts", "1000", "--max-model-len", "512")
    assert len(ranks(served, way)) == 2, "ranks are known by their command lines"
    asyncio.run(_streams_outlive_their_ranks(served, way, how))


async def _streams_outlive_their_ranks(served: Running, way: str, how: signal.Signals) -> None:
    rng = random.Random(1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3000)) as session:
        wanted = await asyncio.gather(*(stream(session, served.url, i, []) for i in range(STREAMS)))
        marks: list[float] = []
        open_streams: dict[asyncio.Task[str], int] = {}
        ended, over = 0, asyncio.Event()

        async def keep_streams() -> None:
            nonlocal ended
            while not over.is_set() or open_streams:
                for i in range(STREAMS if not over.is_set() else 0):
                    if i not in open_streams.values():
                        open_streams[asyncio.create_task(stream(session, served.url, i, marks))] = i
                done, _ = await asyncio.wait(open_streams, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    assert task.result() == wanted[open_streams.pop(task)]
                    ended += 1

        keeping = asyncio.create_task(keep_streams())
        times = []
        for _ in range(LOSSES):
            losing = asyncio.create_task(lose(served, way, how, rng, marks))
            await asyncio.wait((losing, keeping), return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
            times.append(await losing)
            hit = set(open_streams)
            while hit - {task for task in hit if task.done()}:  # whoever lives through two deaths is suspected of them
                await asyncio.sleep(0.05)
                if keeping.done():
                    keeping.result()
        over.set()
        await keeping
    found, resumed = sorted(gone for gone, _ in times), sorted(again for _, again in times)
    middle = LOSSES // 2
    print(f"{way} 2, {how.name}: {LOSSES} losses, {ended} streams right")
    print(f"engine ended after {found[middle]:.2f} s (most {found[-1]:.2f})")
    print(f"next token after {resumed[middle]:.1f} s (most {resumed[-1]:.1f})")
    assert found[-1] < FOUND_S + 1.0, found
    assert served.metric("tokenmill:engine_restarts") >= LOSSES
