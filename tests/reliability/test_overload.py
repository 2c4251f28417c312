"""Bursts, overload, clients that leave, and a soak with faults, against a real server; each prints what it measured."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.cpu.server.conftest import Running
from tests.reliability.lean import Tally, one_lean, stream_request
from tests.reliability.reliability_helpers import SMALL_POOL, one, percentile, rss

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
Launch = Callable[..., Running]


@pytest.mark.parametrize("step_ms", [10, 0])
def test_burst_and_overload(launch: Launch, seconds: float, step_ms: int) -> None:
    """Steps of a model's length leave the cores to the server, as a GPU does: every mark is judged there. With none,
    engine, server and client fight for the same two cores: what counts there is that nothing breaks or leaks."""
    faults = f"slow={step_ms / 1000}" if step_ms else ""
    flags = ("--max-num-queued-reqs", "128", "--max-num-seqs", "32", "--log-level", "warning", *SMALL_POOL)
    running = launch(*flags, faults=faults)
    seconds = seconds if step_ms else seconds / 4
    port = urlsplit(running.url).port or 0
    request = stream_request({"prompt": "The mill", "max_tokens": 32, "ignore_eos": True, "seed": 1})

    async def main() -> dict[str, Any]:
        calm, full, burst, over, after = (Tally() for _ in range(5))
        for _ in range(20):
            await one_lean(port, request, calm)

        async def user() -> None:
            for _ in range(12):
                await one_lean(port, request, full)

        began = time.monotonic()
        await asyncio.gather(*(user() for _ in range(128)))
        rate = 12 * 128 / (time.monotonic() - began)
        memory = rss(running)
        await asyncio.gather(*(one_lean(port, request, burst) for _ in range(2000)))
        tasks: set[asyncio.Task[None]] = set()
        began, sent, behind = time.monotonic(), 0, 0.0
        while (now := time.monotonic() - began) < seconds:
            behind = max(behind, now - sent / (2 * rate))
            while sent < 2 * rate * now:
                task = asyncio.create_task(one_lean(port, request, over))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                sent += 1
            await asyncio.sleep(1 / (2 * rate))
        await asyncio.gather(*tasks)
        length = time.monotonic() - began
        await asyncio.sleep(5)
        for _ in range(20):
            await one_lean(port, request, after)
        return {
            "capacity_per_s": rate,
            "burst": dict(burst.statuses),
            "overload": dict(over.statuses),
            "broken": sum(o.broken + o.without_retry_after for o in (calm, full, burst, over, after)),
            "client_behind_ms_most": behind * 1e3,
            "burst_rejection_ms_p99": percentile(burst.refused_s, 0.99) * 1e3,
            "rejection_ms_p99": percentile(over.refused_s, 0.99) * 1e3,
            "goodput_share": over.statuses[200] / length / rate,
            "rss_growth_mib": (rss(running) - memory) / 2**20,
            "ttft_ms_before": statistics.median(calm.first_s) * 1e3,
            "ttft_ms_after": statistics.median(after.first_s) * 1e3,
        }

    found = asyncio.run(main())
    print(json.dumps(found, indent=2))
    assert set(found["burst"]) <= {200, 503} and set(found["overload"]) <= {200, 503} and found["broken"] == 0
    assert running.process.poll() is None and running.get("/health").status_code == 200
    assert found["rss_growth_mib"] <= 20
    if step_ms:
        assert found["rejection_ms_p99"] <= 100 and found["goodput_share"] >= 0.95


def test_a_thousand_disconnects(launch: Launch) -> None:
    running = launch("--log-level", "warning", *SMALL_POOL)
    random.seed(5)

    async def leave(session: aiohttp.ClientSession, i: int) -> None:
        body = {
            "prompt": "The mill " * random.choice([1, 60]),
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": i % 2 == 0,
            "n": random.choice([1, 1, 1, 4]),
            "temperature": 1.0,
        }
        if i % 20 == 1:
            body |= {"use_beam_search": True, "n": 2, "stream": False, "max_tokens": 60, "temperature": 0.0}
        try:
            async with asyncio.timeout(random.random() * 0.3):
                async with session.post(running.url + "/v1/completions", json=body) as response:
                    await response.read()
        except TimeoutError:
            pass

    async def main() -> tuple[int, int, float]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for start in range(0, 1000, 50):  # fills the bounded rings
                await asyncio.gather(*(leave(session, i) for i in range(start, start + 50)))
            before = rss(running)
            for start in range(0, 1000, 50):
                await asyncio.gather(*(leave(session, i) for i in range(start, start + 50)))
            began = time.monotonic()
            while running.get("/load").json()["server_load"] or running.metric("vllm:num_requests_running"):
                assert time.monotonic() - began < 2
            return before, rss(running), time.monotonic() - began

    before, after, idle = asyncio.run(main())
    print(f"idle after {idle:.3f} s; RSS {before / 2**20:.1f} -> {after / 2**20:.1f} MiB")
    assert running.metric("vllm:num_requests_waiting") == 0 and running.metric("vllm:kv_cache_usage_perc") == 0
    assert after - before <= 0.01 * before + (2 << 20)


def test_soak_with_faults(launch: Launch, seconds: float) -> None:
    seconds *= 2
    running = launch("--max-restarts", "1000", "--log-level", "warning")
    prompts = {f"The mill number {i}": "" for i in range(8)}
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}]

    async def main() -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(600)
        tally, mismatches, kills, sent = Tally(), 0, 0, 0
        samples: list[tuple[float, int]] = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            wanted = {
                (p, k): await one(session, running.url, tally, 60, prompt=p, **kind)
                for p in prompts
                for k, kind in enumerate(kinds)
            }
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                keys = [random.choice(list(wanted)) for _ in range(random.choice([1, 4, 16, 48]))]
                work = [
                    asyncio.create_task(one(session, running.url, tally, 60, prompt=p, **kinds[k])) for p, k in keys
                ]
                noise = [asyncio.create_task(_noise(session, running.url)) for _ in range(8)]
                if random.random() < 0.03:
                    await asyncio.sleep(0.1)
                    for pid in running.children():
                        os.kill(pid, signal.SIGKILL)
                    kills += 1
                texts = await asyncio.gather(*work)
                sent += len(keys)
                mismatches += sum(t != wanted[key] for t, key in zip(texts, keys, strict=True))
                await asyncio.gather(*noise)
                server_only = int(Path(f"/proc/{running.process.pid}/statm").read_text().split()[1])
                samples.append((time.monotonic() - began, server_only * os.sysconf("SC_PAGE_SIZE")))
        late = [(at / 3600, size / 2**20) for at, size in samples if at > seconds / 3]
        slope = statistics.linear_regression(*zip(*late, strict=True)).slope if len(late) > 1 else 0.0
        return {
            "requests": sent,
            "mismatches": mismatches,
            "kills": kills,
            "broken": tally.broken,
            "statuses": dict(tally.statuses),
            "server_rss_mib": [round(late[0][1], 1), round(late[-1][1], 1)] if late else [],
            "server_rss_mib_per_hour": slope,
            "fds": len(list(Path(f"/proc/{running.process.pid}/fd").iterdir())),
        }

    found = asyncio.run(main())
    print(json.dumps(found, indent=2))
    assert found["mismatches"] == 0 and found["broken"] == 0 and set(found["statuses"]) == {200}
    assert running.metric("tokenmill:engine_restarts") >= found["kills"] - 1


async def _noise(session: aiohttp.ClientSession, url: str) -> None:
    """A bad request or a client that leaves."""
    if random.random() < 0.5:
        async with session.post(url + "/v1/completions", json={"prompt": [-1], "n": random.choice([0, 1e9])}) as answer:
            assert answer.status == 400
        return
    try:
        async with asyncio.timeout(0.05):
            body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
            async with session.post(url + "/v1/completions", json=body) as answer:
                await answer.read()
    except TimeoutError:
        pass
