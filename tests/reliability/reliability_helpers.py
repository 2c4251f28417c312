"""What test_overload.py and other tests share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.cpu.server.conftest import Running
from tests.reliability.lean import Tally

SMALL_POOL = ("--num-gpu-blocks-override", "640")
"""K/V blocks that are all in use soon: memory that is touched for the first time must not look like a leak."""


def rss(running: Running) -> int:
    """Resident bytes of the server and its engines."""
    return resident([running.process.pid, *running.children()])


def resident(pids: list[int]) -> int:
    """Resident bytes of these processes; those that have ended count nothing."""
    total = 0
    for pid in pids:
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


async def one(session: aiohttp.ClientSession, url: str, tally: Tally, tokens: int = 32, **extra: Any) -> str:
    """One streamed completion; -> its text."""
    body = {"prompt": "The mill", "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": 1, **extra}
    began = time.monotonic()
    text, done = "", False
    async with session.post(url + "/v1/completions", json=body) as response:
        tally.statuses[response.status] += 1
        if response.status != 200:
            assert response.status in (429, 503) and "retry-after" in response.headers, await response.text()
            tally.refused_s.append(time.monotonic() - began)
            return ""
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    tally.broken += 1
                    return ""
                if not text:
                    tally.first_s.append(time.monotonic() - began)
                text += event["choices"][0]["text"]
                tally.tokens += 1
            done = done or line.startswith(b"data: [DONE]")
    tally.broken += not done
    return text


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0
