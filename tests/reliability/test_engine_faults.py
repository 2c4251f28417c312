"""Too little memory, and a request in every round that breaks its steps."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cpu.server.conftest import Running
from tests.reliability.lean import Tally
from tests.reliability.reliability_helpers import one
from tokenmill.testing.tiny import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
Launch = Callable[..., Running]


async def together(running: Running, bodies: list[dict[str, Any]]) -> tuple[list[str], list[float]]:
    """Texts of requests that run at once, and how long each took."""
    tally = Tally()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)
    ) as session:

        async def timed(body: dict[str, Any]) -> tuple[str, float]:
            began = time.monotonic()
            return await one(session, running.url, tally, **body), time.monotonic() - began

        found = await asyncio.gather(*map(timed, bodies))
    assert tally.broken == 0 and set(tally.statuses) == {200}
    return [text for text, _ in found], [seconds for _, seconds in found]


def test_a_quarter_of_the_memory(launch: Launch) -> None:
    bodies = [{"prompt": [20 + i, 40, 60 + i] * 40, "tokens": 200, "temperature": 0.0} for i in range(64)]
    wanted, _ = asyncio.run(together(launch("--max-num-seqs", "64"), bodies))
    blocks = 64 * (320 // 16) // 4
    tight = launch("--max-num-seqs", "64", "--num-gpu-blocks-override", str(blocks), "--max-model-len", "512")
    texts, seconds = asyncio.run(together(tight, bodies))
    found = {
        "identical": sum(a == b for a, b in zip(texts, wanted, strict=True)),
        "preemptions": tight.metric("vllm:num_preemptions_total"),
        "slowest_over_mean": max(seconds) / statistics.mean(seconds),
    }
    print(json.dumps(found, indent=2))
    assert found["identical"] == 64 and found["preemptions"] > 0 and found["slowest_over_mean"] <= 3


def test_a_thousand_rounds(launch: Launch) -> None:
    bodies = [{"prompt": [20 + i, 40, 60 + i], "tokens": 8, "temperature": float(i % 2), "seed": i} for i in range(31)]
    running = launch("--log-level", "error", faults="raise:250,251,250")
    wanted, _ = asyncio.run(together(running, bodies))

    async def main() -> dict[str, Any]:
        rounds, failed, mismatches = 0, 0, 0
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for _ in range(1000):
                rounds += 1
                tally = Tally()
                work = [asyncio.create_task(one(session, running.url, tally, **body)) for body in bodies]
                bad = {"prompt": [7, 250, 251, 250, 8], "max_tokens": 8}
                async with session.post(running.url + "/v1/completions", json=bad) as answer:
                    failed += answer.status == 500 and "cmpl-" in await answer.text()
                texts = await asyncio.gather(*work)
                mismatches += sum(a != b for a, b in zip(texts, wanted, strict=True)) + tally.broken
        return {"rounds": rounds, "failed_with_500": failed, "mismatches": mismatches}

    found = asyncio.run(main())
    print(json.dumps(found, indent=2))
    assert found == {"rounds": 1000, "failed_with_500": 1000, "mismatches": 0}
    assert running.metric("tokenmill:engine_restarts") == 0


def test_a_long_step_is_no_hang_and_a_stop_within_it_is(launch: Launch, tmp_path: Path) -> None:
    """One step that takes many times the watchdog's patience, in operations that each take less."""
    model = make_tiny(tmp_path / "wide", layers=24, hidden=512, heads=8, kv_heads=8)
    long = ("--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--no-enable-prefix-caching")
    overrides = ("--hf-overrides", '{"max_position_embeddings": 4096}', "--kv-cache-memory-bytes", "536870912")
    running = launch("--watchdog-timeout", "1.5", *long, *overrides, model=model)
    body = {"prompt": [7 + i % 300 for i in range(4000)], "max_tokens": 2, "ignore_eos": True, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def ask() -> tuple[str, float, int]:
            """The text, how long it took, and how often /health said meanwhile that something was wrong."""
            began, alarms = time.monotonic(), 0
            future = pool.submit(running.post, "/v1/completions", body)
            while not future.done():
                alarms += running.get("/health").status_code != 200
                time.sleep(0.05)
            return future.result().json()["choices"][0]["text"], time.monotonic() - began, alarms

        text, took, alarms = ask()
        print(json.dumps({"step_s": took, "alarms": alarms}))
        assert took > 3 and alarms == 0 and running.metric("tokenmill:engine_restarts") == 0
        (engine,) = running.children()
        future = pool.submit(running.post, "/v1/completions", body)
        time.sleep(1)
        os.kill(engine, signal.SIGSTOP)
        stopped = time.monotonic()
        while running.get("/health").status_code == 200:
            time.sleep(0.02)
        noticed = time.monotonic() - stopped
        assert future.result().json()["choices"][0]["text"] == text
    print(json.dumps({"noticed_s": noticed}))
    assert noticed <= 1.5 + 1.5 and running.metric("tokenmill:engine_restarts") == 1
