"""Requests of all APIs, changed by structure, beside well-behaved streams whose text is known.

Half an hour by default; TOKENMILL_RELIABILITY_SECONDS shortens it, TOKENMILL_FUZZ_SEED chooses others. Rounds of
changed requests take turns with rounds of valid ones: these are the control of the loop's lag.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.cpu.server.conftest import Running
from tests.reliability.fuzz.corpus import STANDING, Case, corpus, placed
from tests.reliability.fuzz.mutate import Mutator
from tests.reliability.fuzz.wire import Heard, Sent, body_of, framed, plain, send
from tests.reliability.reliability_helpers import SMALL_POOL, percentile, resident, rss

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
Launch = Callable[..., Running]
STREAMS, WORKERS = 16, 6
PATIENCE_S = 120.0
"""A request has ended by then, whatever it is."""
ROUND_S = 40.0
CONTROL_SHARE = 0.25
MOST_LAG_S, MOST_GROWTH = 0.1, 50 << 20
MOST_GRAMMARS, FILL_AT_ONCE = 2000, 16
MOST_FILES = 8
"""Pipes of helpers that are kept once several were needed; whatever leaks with requests is more."""
FAULT = re.compile(rb'0x[0-9a-fA-F]{6,}|Traceback|File "|Internal error \(')
ABSENT = tuple(f"/api/{verb}" for verb in ("pull", "push", "create", "copy", "delete", "blobs"))
"""501: what Ollama's clients may ask of other servers (loading and making models)."""


@dataclass
class Tally:
    """What was sent, and what came of it."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    texts: int = 0
    busy: int = 0
    fuzz_lag: list[float] = field(default_factory=list)
    control_lag: list[float] = field(default_factory=list)
    cpu: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    memory: list[dict[str, float]] = field(default_factory=list)
    """After every round of valid requests: MiB of each kind of process, and of what is kept."""
    half: dict[str, float] = field(default_factory=dict)
    """The figures when half of the time was over: caches have been filled by then."""

    def fault(self, what: str) -> None:
        self.faults.append(what)
        print("FAULT", what[:3000], flush=True)


class Fuzzer:
    """One run against one server."""

    def __init__(self, running: Running, seed: str) -> None:
        self.running, self.seed = running, seed
        self.port = urlsplit(running.url).port or 0
        self.tally = Tally()
        self.cases = corpus()
        self.known = {name: f"none_{number}" for number, name in enumerate(STANDING)}
        self.ended = False

    # ------------------------------------------------------------ well-behaved

    async def stream(self, session: aiohttp.ClientSession, number: int) -> str | None:
        """One greedy stream's text; None: the server is busy."""
        body = {"prompt": [20 + number, 40, 60 + number], "max_tokens": 48, "ignore_eos": True, "temperature": 0}
        text = ""
        async with session.post(self.running.url + "/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status == 503:
                return None
            assert answer.status == 200, await answer.text()
            ended = False
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                ended = ended or line.startswith(b"data: [DONE]")
        return text if ended else text + " (no end)"

    async def user(self, session: aiohttp.ClientSession, number: int, wanted: str) -> None:
        while not self.ended:
            try:
                text = await self.stream(session, number)
            except (aiohttp.ClientError, TimeoutError, AssertionError, OSError) as error:
                self.tally.fault(f"stream {number}: {error!r}")
                await asyncio.sleep(0.5)
                continue
            if text is None:
                self.tally.busy += 1
                await asyncio.sleep(0.2)
            elif text == wanted:
                self.tally.texts += 1
            else:
                self.tally.fault(f"stream {number} said {text!r} instead of {wanted!r}")

    async def canary(self, session: aiohttp.ClientSession, lags: Callable[[], list[float]]) -> None:
        """/health and /metrics, the loop's worst lag among them, twice a second."""
        while not self.ended:
            await asyncio.sleep(0.5)
            try:
                async with session.get(self.running.url + "/health") as answer:
                    if answer.status != 200:
                        self.tally.fault(f"/health: {answer.status} {await answer.text()}")
                async with session.get(self.running.url + "/metrics") as answer:
                    text = await answer.text()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.tally.fault(f"canary: {error!r}")
                continue
            found = re.search(r"^tokenmill:event_loop_worst_lag_seconds (\S+)$", text, re.MULTILINE)
            assert found is not None
            lags().append(float(found[1]))

    # ------------------------------------------------------------ hostile

    async def one(self, number: str, *, hostile: bool) -> None:
        """The request of this number, changed or not; the same numbers give the same requests."""
        mutator = Mutator(f"{self.seed}/{number}", self.cases)
        rng = mutator.rng
        case = rng.choice(self.cases)
        how, sent = self._made(mutator, case) if hostile else ("valid", self._valid(case))
        began = time.monotonic()
        heard = await send(self.port, sent, PATIENCE_S)
        self.tally.sent[case.api] += 1
        self.tally.changes.update(how.split("+"))
        self.tally.statuses.update(heard.statuses)
        found = self._wrong(case, sent, heard, hostile=hostile)
        if found:
            said, took = heard.data[-1500:], time.monotonic() - began
            shown = b"".join(sent.pieces)[:1500]
            self.tally.fault(f"{found}: number {number} ({how}, {took:.1f} s)\n  sent {shown!r}\n  heard {said!r}")
        for name, form in STANDING.items():
            if found_id := re.search(form, heard.data):
                self.known[name] = found_id[0].decode()

    def _valid(self, case: Case) -> Sent:
        path = placed(case.path, self.known)
        body = None if case.body is None else placed(json.dumps(case.body), self.known).encode()
        return plain(case.method, path, body)

    def _made(self, mutator: Mutator, case: Case) -> tuple[str, Sent]:
        rng = mutator.rng
        how, data = mutator.body(case)
        if case.body is None and rng.random() < 0.8:
            how, data = "path", b""
        for name, known in self.known.items():
            data = data.replace(name.encode(), known.encode())
        path = mutator.path(rng.choice(self.cases) if rng.random() < 0.05 else case, self.known)
        body = None if case.body is None and not data else data
        if rng.random() < 0.15:
            way, sent = framed(rng, case.method, path, body)
            return f"{how}+{way}", sent
        return how, plain(case.method, path, body)

    def _wrong(self, case: Case, sent: Sent, heard: Heard, *, hostile: bool) -> str:
        """What is wrong with an answer, if anything is."""
        if not heard.ended:
            return f"no end within {PATIENCE_S:g} s"
        head = b"".join(sent.pieces)[:4096].lower()  # it may have been sent in pieces
        absent = any(path.encode() in head for path in ABSENT)
        allowed = {501, 503} if absent else {503}
        if bad := [status for status in heard.statuses if status >= 500 and status not in allowed]:
            return f"status {bad[0]}"
        if leak := FAULT.search(heard.data):
            return f"{leak[0]!r} in an answer"
        if sent.odd or sent.leaves:
            return ""
        if len(heard.statuses) != 1:
            return "no answer"
        status = heard.statuses[0]
        if (
            not hostile
            and status >= 400
            and status not in (404, 501, 503)
            and not any(name in str(case) for name in STANDING)
        ):
            return f"status {status} for a valid request"
        if status >= 400 and sent.method != "HEAD" and not _is_error(body_of(heard.data)):
            return "an error in no API's words"
        return ""

    async def rounds(self, seconds: float) -> None:
        """Changed requests, then valid ones, again and again."""
        until = time.monotonic() + seconds
        length = min(ROUND_S, seconds / 3)
        number = 0
        while time.monotonic() < until:
            for kind, share in (("fuzz", 1 - CONTROL_SHARE), ("control", CONTROL_SHARE)):
                self.kind = kind
                at, cpu = time.monotonic(), cpu_seconds(self.running)
                await asyncio.gather(
                    *(self._work(f"{number}.{i}", at + share * length, hostile=kind == "fuzz") for i in range(WORKERS))
                )
                self.tally.cpu[kind] += round(cpu_seconds(self.running) - cpu)
                self.tally.seconds[kind] += round(time.monotonic() - at)
                number += 1
            self.tally.memory.append(await asyncio.to_thread(held, self.running))
            if not self.tally.half and time.monotonic() > until - seconds / 2:
                self.tally.half = await asyncio.to_thread(figures, self.running)
            print(self.tally.memory[-1], flush=True)

    async def _work(self, name: str, until: float, *, hostile: bool) -> None:
        count = 0
        while time.monotonic() < until:
            await self.one(f"{name}.{count}", hostile=hostile)
            count += 1

    async def fill(self, session: aiohttp.ClientSession) -> None:
        """Schemas that all differ, until one pushes out another: memory is judged with the cache of grammars full."""
        seen = -1.0
        for number in range(0, MOST_GRAMMARS, FILL_AT_ONCE):
            bodies = [
                {"prompt": "The mill", "max_tokens": 40, "structured_outputs": {"json": filling(number + i)}}
                for i in range(FILL_AT_ONCE)
            ]
            answers = await asyncio.gather(*(self._status(session, body) for body in bodies))
            assert set(answers) <= {200, 503}, answers
            now = await asyncio.to_thread(self.running.metric, "tokenmill:grammar_cache_bytes")
            if now <= seen:
                return
            seen = now

    async def _status(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> int:
        async with session.post(self.running.url + "/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status

    async def main(self, seconds: float) -> None:
        self.kind = "control"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
            wanted = [await self.stream(session, number) for number in range(STREAMS)]
            for i in range(0, 2 * len(self.cases), WORKERS):  # what is made once is made now
                await asyncio.gather(*(self.one(f"first.{i + k}", hostile=False) for k in range(WORKERS)))
            await self.fill(session)
            before = figures(self.running)
            lags = {"fuzz": self.tally.fuzz_lag, "control": self.tally.control_lag}
            beside = [self.user(session, number, text or "") for number, text in enumerate(wanted)]
            tasks = [asyncio.ensure_future(each) for each in (*beside, self.canary(session, lambda: lags[self.kind]))]
            await self.rounds(seconds)
            self.ended = True
            await asyncio.gather(*tasks)
            assert [await self.stream(session, number) for number in range(STREAMS)] == wanted
        self.before = before


def filling(number: int) -> dict[str, Any]:
    """A schema that no other number has."""
    kinds = [{"type": "string", "maxLength": 9 + number % 20}, {"type": "integer"}, {"enum": ["a", number]}]
    inner = {"type": "object", "properties": {f"p{i}": kinds[i % 3] for i in range(3 + number % 9)}}
    return {"type": "object", "properties": {f"k{number}": inner, "list": {"type": "array", "items": inner}}}


def _is_error(body: bytes) -> bool:
    """An object that has an error, as every API words it."""
    try:
        said: Any = json.loads(body)
    except ValueError:
        return False
    return isinstance(said, dict) and bool(said.get("error"))


def cpu_seconds(running: Running) -> float:
    """Of the server and all that it started."""
    total = 0
    for pid in (running.process.pid, *running.family()):
        try:
            parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(parts[11]) + int(parts[12])
    return total / os.sysconf("SC_CLK_TCK")


def held(running: Running) -> dict[str, float]:
    """MiB of the server, its engines and its helpers, and of what they keep for later requests."""
    engines = running.children()
    helpers = [pid for pid in running.family() if pid not in engines]
    found = {
        "server": resident([running.process.pid]),
        "engines": resident(engines),
        "helpers": resident(helpers),
        "grammars": running.metric("tokenmill:grammar_cache_bytes"),
        "responses": running.metric("tokenmill:kept_responses_bytes"),
    }
    return {name: round(size / 2**20, 1) for name, size in found.items()}


def figures(running: Running) -> dict[str, float]:
    """What must be as before when all is over; grammars that are kept for the next request count as a cache."""
    cached = running.metric("tokenmill:grammar_cache_bytes")
    kept = running.metric("tokenmill:kept_responses_bytes")
    files = len(os.listdir(f"/proc/{running.process.pid}/fd"))
    engines = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in running.children())
    return {"rss": rss(running), "cached": cached, "kept": kept, "files": files, "engine_files": engines}


def grown(after: dict[str, float], before: dict[str, float]) -> float:
    """Bytes, without the responses that are kept because the API promises that (to a ceiling of their own)."""
    return after["rss"] - before["rss"] - (after["kept"] - before["kept"])


def settled(running: Running, before: dict[str, float]) -> dict[str, float]:
    """The figures once nothing runs any more and memory and descriptors have come back, or 60 s have passed."""
    until = time.monotonic() + 60
    while True:
        after = figures(running)
        runs = sum(running.metric(f"vllm:{name}") for name in ("num_requests_running", "num_requests_waiting"))
        back = after["files"] <= before["files"] + MOST_FILES and grown(after, before) <= MOST_GROWTH
        if (back and runs == 0) or time.monotonic() > until:
            return {**after, "runs": runs}
        time.sleep(0.5)


def test_fuzz(launch: Launch) -> None:
    seconds = float(os.environ.get("TOKENMILL_RELIABILITY_SECONDS", "1800"))
    seed = os.environ.get("TOKENMILL_FUZZ_SEED", str(random.randrange(10**6)))
    load = os.getloadavg()[0]
    flags: tuple[str, ...] = ("--log-level", "warning", "--read-timeout", "10", "--request-timeout", "30", *SMALL_POOL)
    flags += ("--tool-call-parser", "hermes", "--scheduling-policy", "priority")
    running = launch(*flags)
    fuzzer = Fuzzer(running, seed)
    print(f"seed {seed}")
    asyncio.run(fuzzer.main(seconds))
    tally, before = fuzzer.tally, fuzzer.before
    after = settled(running, before)
    half = tally.half or before
    lags = {"fuzz": sorted(tally.fuzz_lag), "control": sorted(tally.control_lag)}
    lag = {name: max(found) for name, found in lags.items()}
    found = {
        "seed": seed,
        "requests": dict(tally.sent),
        "statuses": dict(sorted(tally.statuses.items())),
        "changes": dict(tally.changes),
        "streams": tally.texts,
        "streams_busy": tally.busy,
        "worst_lag_ms": {name: round(worst * 1e3, 1) for name, worst in lag.items()},
        "lag_ms_of_half_seconds": {
            name: {share: round(percentile(found, share / 100) * 1e3, 1) for share in (50, 90, 99)}
            for name, found in lags.items()
        },
        "cpu_share": {kind: round(tally.cpu[kind] / max(1, tally.seconds[kind]), 2) for kind in lag},
        "memory_mib": tally.memory[:: max(1, len(tally.memory) // 8)],
        "grown_mib": round(grown(after, before) / 2**20, 1),
        "grown_since_half_mib": round(grown(after, half) / 2**20, 1),
        "cached_mib": [round(each["cached"] / 2**20, 1) for each in (before, half, after)],
        "kept_mib": [round(each["kept"] / 2**20, 1) for each in (before, half, after)],
        "files": [before["files"], after["files"], before["engine_files"], after["engine_files"]],
        "restarts": running.metric("tokenmill:engine_restarts"),
        "load_before": load,
        "faults": len(tally.faults),
    }
    print(json.dumps(found, indent=2))
    assert tally.faults == [], tally.faults[:3]
    assert running.process.poll() is None and found["restarts"] == 0 and after["runs"] == 0
    assert all(after[name] <= before[name] + MOST_FILES for name in ("files", "engine_files")), found
    assert grown(after, half) <= MOST_GROWTH, found  # compiled grammars are a cache: it is full at half time
    assert "Traceback" not in running.log.read_text(errors="replace")
    if load > 1:
        print(f"the machine was busy before (load {load:.1f}): the lag of {lag} is told, not judged")
    else:
        assert lag["fuzz"] <= lag["control"] + MOST_LAG_S, lag


def test_the_same_seed_makes_the_same_requests() -> None:
    def made() -> list[tuple[str, bytes]]:
        mutator = Mutator("7", corpus())
        return [mutator.body(mutator.rng.choice(corpus())) for _ in range(300)]

    first = made()
    assert first == made() and len({data for _, data in first}) > 200
