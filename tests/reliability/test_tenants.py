"""What one key can learn of another's prompts, from times and from answers. Prints what it measured."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.cpu.server.conftest import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
Launch = Callable[..., Running]
KEYS = ("the-key-of-the-victim-01", "the-key-of-the-prober-02")
LENGTH, PROBES = 1900, 500


def area(hits: list[float], misses: list[float]) -> float:
    """How often a miss takes longer than a hit, 0.5 when times tell nothing (the area under the ROC curve)."""
    ranked = sorted([(t, 0) for t in hits] + [(t, 1) for t in misses])
    ranks = sum(place for place, (_, miss) in enumerate(ranked, 1) if miss)
    return (ranks - len(misses) * (len(misses) + 1) / 2) / (len(hits) * len(misses))


class Prober:
    """Asks with one key over one connection, and times the first token."""

    def __init__(self, running: Running, key: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", urlsplit(running.url).port, timeout=60)
        self.headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """-> seconds, cached tokens as the answer tells them."""
        body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
        began = time.perf_counter()
        self.connection.request("POST", "/v1/completions", body, self.headers)
        answer = json.loads(self.connection.getresponse().read())
        return time.perf_counter() - began, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def classify(running: Running, victim: str, prober: str, rng: random.Random) -> tuple[float, int]:
    """The area for what the victim has just asked against fresh prompts; cached tokens that the prober was told."""
    asked, probe = Prober(running, victim), Prober(running, prober)
    times: tuple[list[float], list[float]] = ([], [])
    cached = 0
    for fresh in rng.sample([False, True] * PROBES, 2 * PROBES):
        prompt, other = ([rng.randrange(3, 250) for _ in range(LENGTH)] for _ in range(2))
        asked.ask(prompt)
        seconds, told = probe.ask(other if fresh else prompt)
        times[fresh].append(seconds)
        cached += told
    return area(*times), cached


def test_times_tell_nothing_of_another_key(launch: Launch) -> None:
    flags = ("--api-key", KEYS[0], "--api-key", KEYS[1], "--log-level", "warning")
    running = launch(*flags)
    rng = random.Random(24)
    across, told = classify(running, KEYS[0], KEYS[1], rng)
    within, told_own = classify(running, KEYS[0], KEYS[0], rng)
    shared, _ = classify(launch(*flags, "--share-prefix-cache"), KEYS[0], KEYS[1], rng)
    found = {"probes": 2 * PROBES, "auc_across_keys": across, "auc_within_a_key": within, "auc_if_shared": shared}
    print(json.dumps({**found, "cached_tokens_told_across": told}, indent=2))
    assert across <= 0.55 and told == 0
    assert within >= 0.9 and shared >= 0.9 and told_own > PROBES * LENGTH * 0.9  # so that the test has power


def test_ten_thousand_mixed_requests(launch: Launch) -> None:
    """Every answer echoes its own canary and nobody else's, and says what that prompt says alone."""
    running = launch("--api-key", KEYS[0], "--api-key", KEYS[1], "--log-level", "warning")
    canary = re.compile(r"CANARY\d{5}x")
    counts: Counter[str] = Counter()

    async def ask(session: aiohttp.ClientSession, i: int) -> str:
        own = f"CANARY{i:05d}x"
        headers = {"authorization": f"Bearer {KEYS[i % 2]}"}
        shared = "The mill grinds grain for everyone. " * (i % 5)
        body = {"prompt": f"{shared}{own}", "max_tokens": 6, "echo": True, "seed": 7, "stream": i % 3 == 0}
        async with session.post(running.url + "/v1/completions", json=body, headers=headers) as answer:
            data = await answer.text()
            events = re.findall(r"^data: (\{.*\})$", data, re.M) if body["stream"] else [data]
            text = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
            counts[str(answer.status)] += 1
        names = set(canary.findall(text))
        counts["own"] += names == {own}
        counts["leaked"] += bool(names - {own})
        return text

    async def main() -> int:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            texts: dict[int, str] = {}
            for start in range(0, 10_000, 64):
                numbers = range(start, min(start + 64, 10_000))
                texts.update(zip(numbers, await asyncio.gather(*(ask(session, i) for i in numbers)), strict=True))
            again = random.Random(2).sample(sorted(texts), 200)
            return sum([await ask(session, i) != texts[i] for i in again])

    mismatches = asyncio.run(main())
    print(json.dumps({**counts, "said_otherwise_alone": mismatches}))
    assert counts["leaked"] == 0 and counts["own"] == counts["200"] == 10_200 and mismatches == 0
