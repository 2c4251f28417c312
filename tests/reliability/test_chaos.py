"""Everything at once: engines and helpers that are killed and stopped, no disk, no descriptors, slow and dead clients.

Each accepted request ends once, with the right text or one honest error; the server is ready at the end without help.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest

from tests.cpu.server.conftest import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
Launch = Callable[..., Running]
USERS = 16
LONGEST_S = 240.0
"""A request may wait for engines that come back again and again; then it must have ended."""
WATCHDOG_S = 4.0
KINDS = ("engine: ", "helper: ", "descriptors", "disk", "client: ")
"""What must have gone wrong at least once in every run, as `Chaos.done` counts it."""


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of requests whose text is known: plain, chats through templates, structures through grammars."""
    found: list[tuple[str, dict[str, Any]]] = []
    for i in range(48):
        common = {"max_tokens": 12 + 8 * (i % 12), "seed": i, "temperature": float(i % 2), "ignore_eos": True}
        if i % 4 == 1:
            messages = [{"role": "user", "content": f"Tell me of mill {i}"}]
            found.append(("/v1/chat/completions", {**common, "messages": messages}))
        elif i % 4 == 3:
            schema = {"type": "object", "properties": {f"k{i}": {"enum": ["a", "b", i]}}, "required": [f"k{i}"]}
            found.append(
                ("/v1/completions", {**common, "prompt": [20 + i, 41], "structured_outputs": {"json": schema}})
            )
        else:
            found.append(("/v1/completions", {**common, "prompt": [20 + i, 40, 60 + i]}))
    return found


@dataclass
class Ends:
    """How requests ended."""

    right: int = 0
    honest: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    """The connection was not taken, or closed before a byte: nothing was accepted."""
    bad: list[str] = field(default_factory=list)


async def text_of(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any], tell: Any) -> str | None:
    """The whole text of a stream; None: an honest error, which `tell` was given."""
    text, ends, errors = "", 0, 0
    async with session.post(url + path, json={**body, "stream": True}) as response:
        if response.status != 200:
            said = (await response.text())[:200]
            honest = response.status == 500 or (response.status in (429, 503) and "retry-after" in response.headers)
            tell(f"{response.status}" if honest else f"BAD {response.status}: {said}")
            return None
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                errors += "error" in event
                for choice in event.get("choices", ()):
                    text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            ends += line.startswith(b"data: [DONE]")
    if errors == 1 and ends <= 1:
        tell("error event")
        return None
    if errors or ends != 1:
        tell(f"BAD stream: {errors} errors, {ends} ends")
        return None
    return text


class Chaos:
    """What goes wrong, and when."""

    def __init__(self, running: Running, until: float) -> None:
        self.running, self.until = running, until
        self.random = random.Random(11)
        self.done: Counter[str] = Counter()
        self.address = ("127.0.0.1", urlsplit(running.url).port)
        self.files = resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE)

    async def again(self, pause: tuple[float, float], act: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < self.until:
            await asyncio.sleep(self.random.uniform(*pause))
            with contextlib.suppress(OSError):  # what it was about to harm is gone already
                await act()

    async def engines_serve(self) -> None:
        """Until one does, or for a minute: on a busy machine a start takes longer than the time between two harms."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError, httpx.HTTPError):
                if (await asyncio.to_thread(self.running.get, "/health")).status_code == 200:
                    return
            await asyncio.sleep(0.2)

    async def harm_an_engine(self) -> None:
        await self.engines_serve()
        engines = self.running.children()
        if not engines:
            return
        engine, how = self.random.choice(engines), self.random.choice(["kill", "stop", "pause", "abort"])
        self.done[f"engine: {how}"] += 1
        number = {"kill": signal.SIGKILL, "abort": signal.SIGABRT}.get(how, signal.SIGSTOP)
        os.kill(engine, number)
        if how == "pause":
            await asyncio.sleep(WATCHDOG_S / 4)
            os.kill(engine, signal.SIGCONT)

    async def harm_a_helper(self) -> None:
        """The template's processes are the server's children, the grammars' one is its engine's."""
        found = []
        for pid in self.running.family():
            with contextlib.suppress(OSError):
                if b"import run_helper; run_helper()" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        if found:
            number = self.random.choice([signal.SIGKILL, signal.SIGSTOP])
            self.done[f"helper: {signal.Signals(number).name}"] += 1
            os.kill(self.random.choice(found), number)

    async def take_the_descriptors(self) -> None:
        server = self.running.process.pid
        used = len(os.listdir(f"/proc/{server}/fd"))
        held: list[socket.socket] = []
        resource.prlimit(server, resource.RLIMIT_NOFILE, (used + 20, self.files[1]))
        try:
            for _ in range(60):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(self.address)
                held.append(sock)
            self.done["descriptors"] += 1
            await asyncio.sleep(self.random.uniform(3, 8))
        finally:
            resource.prlimit(server, resource.RLIMIT_NOFILE, self.files)
            for sock in held:
                sock.close()

    async def fill_the_disk(self) -> None:
        """No file of the server or of what it starts can grow: not its log, nothing in a temporary folder."""
        self._limit_files(0)
        self.done["disk"] += 1
        await asyncio.sleep(self.random.uniform(3, 8))
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        for pid in [self.running.process.pid, *self.running.family()]:
            with contextlib.suppress(OSError, ValueError):  # helpers have a limit of their own
                hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))

    async def be_a_bad_client(self) -> None:
        """Half a request, a stream that nobody reads, or one that is cut in the middle."""
        how = self.random.choice(["half", "unread", "cut"])
        self.done[f"client: {how}"] += 1
        data = json.dumps({"prompt": [5, 6], "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        whole = head + b"content-length: %d\r\n\r\n" % len(data) + data
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(whole[:-9] if how == "half" else whole)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(100), 3)
        await asyncio.sleep(self.random.uniform(0, 6))
        if how == "cut":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


def test_chaos(launch: Launch, seconds: float) -> None:
    flags = (
        "--max-restarts",
        "100000",
        "--watchdog-timeout",
        str(WATCHDOG_S),
        "--engines",
        "2",
        "--log-level",
        "error",
    )
    running = launch(*flags)
    wanted: list[str | None] = []
    ends = Ends()
    harmed: Counter[str] = Counter()

    async def ask(number: int, found: Callable[[str], None]) -> str | None:
        path, body = bodies()[number]
        if "structured_outputs" in body:  # another schema each time, so that the helper is asked
            body["structured_outputs"]["json"]["description"] = os.urandom(8).hex()
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(LONGEST_S)) as session:
            return await text_of(session, running.url, path, body, found)

    def tell(said: str) -> None:
        if said.startswith("BAD"):
            ends.bad.append(said)
        else:
            ends.honest[said] += 1

    async def user(until: float, seed: int) -> None:
        choose = random.Random(seed)
        while time.monotonic() < until:
            number = choose.randrange(len(wanted))
            try:
                text = await ask(number, tell)
            except TimeoutError:
                at = time.monotonic() - until + seconds
                ends.bad.append(
                    f"BAD: request {number} has not ended within {LONGEST_S:g} s, {at:.0f} s after the start"
                )
            except aiohttp.ClientPayloadError:
                ends.honest["cut off"] += 1
            except (aiohttp.ClientError, OSError):
                ends.unanswered += 1
                await asyncio.sleep(0.2)
            else:
                if text is not None and text != wanted[number]:
                    ends.bad.append(f"BAD text of {number}: {text!r} instead of {wanted[number]!r}")
                ends.right += text is not None and text == wanted[number]

    async def main() -> None:
        for number in range(len(bodies())):
            wanted.append(await ask(number, tell))
        assert None not in wanted, (ends.bad, ends.honest)
        until = time.monotonic() + seconds
        chaos = Chaos(running, until)
        agents = [
            chaos.again((3, 10), chaos.harm_an_engine),
            chaos.again((1, 4), chaos.harm_a_helper),
            chaos.again((10, 25), chaos.take_the_descriptors),
            chaos.again((10, 25), chaos.fill_the_disk),
            *(chaos.again((0.5, 4), chaos.be_a_bad_client) for _ in range(4)),
        ]
        await asyncio.gather(*agents, *(user(until, i) for i in range(USERS)))
        figures = {"right": ends.right, "honest": dict(ends.honest), "unanswered": ends.unanswered, "bad": ends.bad[:5]}
        print(json.dumps({**figures, "harm": dict(chaos.done)}, indent=2))
        harmed.update(chaos.done)

    asyncio.run(main())
    began = time.monotonic()
    while (health := running.get("/health")).status_code != 200:
        assert running.process.poll() is None and time.monotonic() - began < 120, health.text
        time.sleep(0.1)
    print(
        f"ready {time.monotonic() - began:.1f} s after the end; {running.metric('tokenmill:engine_restarts')} restarts"
    )
    assert [asyncio.run(ask(number, tell)) for number in range(len(wanted))] == wanted
    while any(running.metric(f"vllm:{name}") for name in ("num_requests_running", "num_requests_waiting")):
        assert time.monotonic() - began < 240
        time.sleep(0.2)
    assert running.metric("vllm:kv_cache_usage_perc") == 0
    assert ends.bad == [] and ends.right > 20 and len(running.children()) == 2
    assert sum(ends.honest.values()) < ends.right, "errors must be the exception"
    missed = [kind for kind in KINDS if not any(done.startswith(kind) for done in harmed)]
    assert missed == [], "a harm that never came shows nothing"
