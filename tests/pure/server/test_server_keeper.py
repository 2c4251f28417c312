"""Engines that cannot be started, that stop or hang at any time, and a watch that fails: all of it is got over."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.pure.server.conftest import Starter, kill, until
from tokenmill.core.config import make_config, make_server_config
from tokenmill.core.errors import EngineLostError
from tokenmill.engine.running import deaths
from tokenmill.engine.running.picking import EnginePicker
from tokenmill.engine.running.wire import Beat, Failed, News
from tokenmill.process.vitals import Vitals, vitals_of
from tokenmill.server.engines import child
from tokenmill.server.engines.channel import BlockingEnd, LoopEnd, frame
from tokenmill.server.engines.fleet import Fleet
from tokenmill.server.engines.links import ProcessLink
from tokenmill.server.engines.reserve import Reserve
from tokenmill.server.engines.state import EngineRecord, FleetOptions
from tokenmill.testing.fake_generator import FakeLink, FakeOptions

pytestmark = pytest.mark.usefixtures("short_pauses")
BODY = {"prompt": "abc", "max_tokens": 40, "seed": 3}
PATH = "/v1/completions"


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(deaths, "LONGEST_PAUSE_S", 0.3)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC])
async def test_an_engine_that_cannot_be_started_is_tried_again(
    start: Starter, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    served = await start(FakeOptions(step_s=0.002))
    calm = (await served.post(PATH, BODY)).json()["choices"]
    begin, left = FakeLink.start, 3

    def broken(self: FakeLink, *args: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(number, os.strerror(number))
        begin(self, *args)

    monkeypatch.setattr(FakeLink, "start", broken)
    fleet = served.fake.fleet
    task = asyncio.create_task(served.post(PATH, BODY))
    await until(lambda: served.fake.link().output_tokens >= 5)
    served.fake.link().die()
    await until(lambda: fleet.engines[0].trouble is not None)
    said = await served.client.get("/health")
    assert said.status_code == 503
    assert os.strerror(number) in (fleet.health() or "")
    assert (await task).json()["choices"] == calm  # it waited, and went on
    assert fleet.counters()["engine_failed_starts"] == 3 and fleet.health() is None
    metrics = (await served.client.get("/metrics")).text
    assert re.search(r"tokenmill:engine_failed_starts\{[^}]*\} 3\.0", metrics)
    assert len(fleet.keeper.deaths.times) == 1  # a lack of something is no crash: it never ends the server


async def test_who_waits_for_ever_is_told(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await start(FakeOptions(step_s=0.002), FleetOptions(hopeless_s=0.3))
    begin = FakeLink.start

    def broken(self: FakeLink, *args: Any) -> None:
        raise OSError(errno.EAGAIN, "no process")

    monkeypatch.setattr(FakeLink, "start", broken)
    task = asyncio.create_task(served.post(PATH, {**BODY, "max_tokens": 2000}))
    await until(lambda: served.fake.link().output_tokens >= 5)
    served.fake.link().die()
    assert (await task).status_code == 503
    late = await served.post(PATH, BODY)
    assert late.status_code == 503 and "retry-after" in late.headers
    monkeypatch.setattr(FakeLink, "start", begin)
    await until(lambda: served.fake.fleet.health() is None)
    assert (await served.post(PATH, BODY)).status_code == 200


def fail_loads(monkeypatch: pytest.MonkeyPatch, times: int, news: Failed, death: str) -> list[Failed]:
    """Let the next lives of engines say this and die, so many times; returns what has been said."""
    begin, said = FakeLink.start, list[Failed]()

    def start(self: FakeLink, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None:
        if len(said) == times:
            begin(self, on_news, on_death)
            return
        said.append(news)
        asyncio.get_running_loop().call_soon(on_news, news)
        asyncio.get_running_loop().call_soon(on_death, death)

    monkeypatch.setattr(FakeLink, "start", start)
    return said


async def test_an_engine_that_finds_no_memory_or_disk_is_tried_again(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await start(FakeOptions(step_s=0.002), FleetOptions(max_restarts_per_minute=2))
    fail_loads(monkeypatch, 4, Failed("No space left on device", user=True), "exit status 0")
    task = asyncio.create_task(served.post(PATH, BODY))
    await until(lambda: served.fake.link().output_tokens >= 5)
    served.fake.link().die()
    await until(lambda: "No space left" in (served.fake.fleet.health() or ""))
    assert (await task).status_code == 200 and served.fake.fleet.broken is None


async def test_crashes_while_loading_still_end_the_server(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await start(FakeOptions(), FleetOptions(max_restarts_per_minute=2))

    def crash(self: FakeLink, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None:
        asyncio.get_running_loop().call_soon(on_death, "signal 11")

    monkeypatch.setattr(FakeLink, "start", crash)
    served.fake.link().die()
    await until(lambda: served.fake.fleet.broken)


async def test_the_watch_goes_on_after_any_failure(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    options = FakeOptions(step_s=0.003)
    served = await start(options, FleetOptions(watchdog_s=1.0))
    looks = 0

    def broken(self: FakeLink) -> None:
        nonlocal looks
        looks += 1
        if looks <= 2:
            raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(FakeLink, "vitals", broken)
    await until(lambda: looks > 2)
    options.hung = True
    link = served.fake.link()
    await until(lambda: served.fake.link() is not link)
    options.hung = False
    await until(lambda: served.fake.fleet.health() is None)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(EngineRecord, "totals"), (EnginePicker, "forget"), (deaths.Deaths, "count"), (Fleet, "_replay")],
)
async def test_whatever_breaks_at_a_death_another_life_begins(
    start: Starter, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    served = await start(FakeOptions(step_s=0.002))
    task = asyncio.create_task(served.post(PATH, {**BODY, "max_tokens": 200}))
    await until(lambda: served.fake.link().output_tokens >= 5)
    function, left = getattr(owner, name), 1

    def broken(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("injected")
        return function(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        await kill(served, 5)
    await until(lambda: served.fake.fleet.health() is None)
    assert left <= 0 and (await served.post(PATH, BODY)).status_code == 200
    assert (await task).status_code in (200, 500) and not served.fake.fleet.open_requests


async def test_an_engine_that_cannot_be_killed_is_told_of_once(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread, or a process that the system does not let go: /health says so, the log is not filled."""
    options, kills, said = FakeOptions(step_s=0.003), 0, 0

    async def kill_in_vain(link: FakeLink) -> None:
        nonlocal kills
        kills += 1

    def dump(link: FakeLink) -> None:
        nonlocal said
        said += 1

    monkeypatch.setattr(FakeLink, "kill", kill_in_vain)
    monkeypatch.setattr(FakeLink, "dump_stacks", dump)
    served = await start(options, FleetOptions(watchdog_s=0.2))
    options.hung = True
    await until(lambda: kills)
    await asyncio.sleep(0.5)  # nothing may happen meanwhile
    assert kills == said == 1 and served.fake.fleet.health() is not None
    served.fake.link().die()
    options.hung = False
    await until(lambda: served.fake.fleet.health() is None)


class Body:
    """A process as the system describes it."""

    def __init__(self) -> None:
        self.busy = self.stopped = False
        self.began = time.monotonic()

    def vitals(self, link: FakeLink) -> Vitals:
        return Vitals(time.monotonic() - self.began if self.busy else 0.0, 0, self.stopped)


async def lives_for(served: Any, seconds: float) -> float | None:
    """After how many seconds this engine was replaced; None: it was not."""
    link, began = served.fake.link(), time.monotonic()
    while time.monotonic() - began < seconds:
        if served.fake.link() is not link:
            return time.monotonic() - began
        await asyncio.sleep(0.01)
    return None


async def test_a_long_step_a_hung_call_and_an_idle_one_are_told_apart(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, body = FakeOptions(step_s=0.003), Body()
    monkeypatch.setattr(FakeLink, "vitals", lambda link: body.vitals(link))
    served = await start(options, FleetOptions(watchdog_s=0.5, max_restarts_per_minute=99))
    fleet = served.fake.fleet
    options.hung, body.busy = True, True
    engine, life = fleet.engines[0], fleet.engines[0].life
    for done in range(40):  # two seconds of a step that gets on
        fleet._heard(engine, life, Beat(done))
        said = time.monotonic()
        await asyncio.sleep(0.05)
        late = time.monotonic() - said > 0.4  # this machine has no time: it is us who say nothing
        assert engine.life == life and (late or fleet.health() is None)
    hung_at = time.monotonic()
    while engine.life == life:  # it computes, but nothing new is done
        fleet._heard(engine, life, Beat(39))
        if time.monotonic() - hung_at > 1.0:
            assert fleet.health() is not None
        await asyncio.sleep(0.02)
    assert time.monotonic() - hung_at > 1.0  # more patience than with one that does nothing
    options.hung = False
    await until(lambda: fleet.health() is None)
    options.hung, body.busy = True, False
    assert await lives_for(served, 60) is not None


def test_health_is_not_green_for_twenty_seconds_beside_a_stuck_engine() -> None:
    """What is green is judged by the same time, without anything that adds to it."""
    assert FleetOptions().watchdog_s == make_server_config({}).patience.watchdog_timeout < 20


async def test_an_engine_that_stops_while_it_starts_is_noticed(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    options, body = FakeOptions(step_s=0.003), Body()
    served = await start(options, FleetOptions(watchdog_s=0.4, max_restarts_per_minute=99))
    monkeypatch.setattr(FakeLink, "vitals", lambda link: body.vitals(link))
    begin = FakeLink.start
    monkeypatch.setattr(
        FakeLink, "start", lambda self, on_news, on_death: begin(self, lambda news: None, on_death)
    )  # it never says that it is ready
    body.busy = True
    await kill(served, 0)
    assert await lives_for(served, 2.5) is None  # it loads, for long
    body.busy, body.stopped = False, True
    monkeypatch.setattr(FakeLink, "start", begin)
    assert await lives_for(served, 60) is not None
    body.stopped = False
    await until(lambda: served.fake.fleet.health() is None)


def test_who_is_stopped_again_and_again_but_works_in_between_is_slow() -> None:
    engine = EngineRecord(0)
    for n in range(3):
        engine.look(Vitals(float(n), 0, stopped=True), 0.02)
        since, engine.stopped_since = engine.stopped_since, 1.0
        assert since is not None and since > 1.0
    engine.look(Vitals(2.001, 0, stopped=True), 0.02)  # stopped for good
    assert engine.stopped_since == 1.0
    engine.look(Vitals(2.002, 0, stopped=False), 0.02)
    assert engine.stopped_since is None


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(child.pid, flush=True)
try:
    sys.stdin.read()
finally:
    child.kill()
"""


async def test_a_workers_work_is_its_engines() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None and parent.stdout is not None
    worker = int(parent.stdout.readline())
    try:
        first = vitals_of(parent.pid)
        await until(lambda: vitals_of(parent.pid).worked_s > first.worked_s + 0.3)
        os.kill(worker, signal.SIGSTOP)
        await until(lambda: vitals_of(worker).stopped)
        idle = vitals_of(parent.pid)
        await asyncio.sleep(0.3)  # nothing may happen meanwhile
        assert vitals_of(parent.pid).worked_s < idle.worked_s + 0.1 and not vitals_of(parent.pid).stopped
        os.kill(parent.pid, signal.SIGSTOP)
        await until(lambda: vitals_of(parent.pid).stopped)
    finally:
        os.kill(parent.pid, signal.SIGCONT)
        parent.communicate(b"")


async def test_another_life_that_cannot_load_counts_as_no_death(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that cannot be started, a file that is locked: the model was loaded before."""
    served = await start(FakeOptions(step_s=0.002), FleetOptions(max_restarts_per_minute=1))
    failed = fail_loads(monkeypatch, 3, Failed("RuntimeError: can't start new thread"), "exit status 70")
    served.fake.link().die()
    await until(lambda: len(failed) == 3 and served.fake.fleet.health() is None)
    assert (await served.post(PATH, BODY)).status_code == 200


async def test_a_rank_that_was_ended_while_it_loads_is_a_loss_and_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another life may get further, as after the loss of an engine in one process; the reason is told without more."""

    def build(config: object) -> None:
        raise EngineLostError("rank 1 ended while it loaded the model (signal 9)")

    said: list[News] = []
    child.run_engine(build, make_config(model="m"), lambda wait: None, said.append)

    def lost(self: FakeLink, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None:
        asyncio.get_running_loop().call_soon(on_news, said[0])

    monkeypatch.setattr(FakeLink, "start", lost)
    fleet = Fleet(lambda number, life: FakeLink(FakeOptions()), ("m",), FleetOptions())
    try:
        with pytest.raises(EngineLostError, match="signal 9"):
            await fleet.start()
    finally:
        await fleet.close()


def test_a_long_step_says_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "LONG_STEP_S", 0.001)
    sent: list[News] = []
    loop = SimpleNamespace(rounds=1, done=lambda: counts[0])
    counts, ended = [5], threading.Event()
    thread = threading.Thread(target=child._beat, args=(loop, sent.append, ended))
    thread.start()
    try:
        for done in (5, 6, 9):
            counts[0] = done
            until_s = time.monotonic() + 60
            while sent[-1:] != [Beat(done)] and time.monotonic() < until_s:
                time.sleep(0.001)
        assert sent == [Beat(5), Beat(6), Beat(9)]  # a step that hangs says nothing
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def few_files() -> Iterator[None]:
    """This process may open a few files more than it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 60, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def nothing(*args: Any) -> None:
    """An engine that loads nothing."""


async def test_a_process_starts_when_all_descriptors_are_taken(few_files: None) -> None:
    reserve = Reserve()
    link, taken = ProcessLink(nothing, nothing), []  # type: ignore[arg-type]
    try:
        while True:
            taken.append(socket.socket())
    except OSError as error:
        assert error.errno == errno.EMFILE
    died = asyncio.get_running_loop().create_future()
    try:
        with pytest.raises(OSError):
            link.start(lambda news: None, died.set_result)
        with reserve.lent():
            link.start(lambda news: None, lambda reason: died.done() or died.set_result(reason))
        assert "status" in await asyncio.wait_for(died, 60)
    finally:
        for sock in taken:
            sock.close()
        reserve.close()


async def test_a_message_that_cannot_be_handled_does_not_come_again() -> None:
    """Those beside it are handled, once."""
    ours, theirs = socket.socketpair()
    seen: list[str] = []

    def hear(name: str, body: bytes) -> None:
        seen.append(name)
        if name == "bad":
            raise RuntimeError("injected")

    end = LoopEnd(ours, hear, lambda: None)
    theirs.send(b"".join(frame(name, b"") for name in ("a", "bad", "b")))
    await until(lambda: len(seen) >= 3)
    theirs.send(frame("c", b""))
    await until(lambda: "c" in seen)
    assert seen == ["a", "bad", "b", "c"]
    end.close()
    theirs.close()


async def test_the_channel_carries_what_a_slow_reader_leaves() -> None:
    """Frames of all sizes, more than a socket holds, both ends alive."""
    ours, theirs = socket.socketpair()
    seen: list[tuple[str, int]] = []
    ended = asyncio.Event()
    end = LoopEnd(ours, lambda name, body: seen.append((name, len(body))), ended.set)
    far = BlockingEnd(theirs)
    sizes = [0, 1, 70_000, 3_000_000, 5, 1_000_000]
    for size in sizes:
        far.send(frame(f"n{size}", b"x" * size))
        end.send(frame(f"\ud800{size}", b"y" * size))
    await until(lambda: len(seen) == len(sizes))
    assert seen == [(f"n{size}", size) for size in sizes]
    back: list[tuple[str, bytes]] = []
    while len(back) < len(sizes):
        back += await asyncio.to_thread(far.receive, 1.0) or []
    assert [(name, len(body)) for name, body in back] == [(f"\ud800{size}", size) for size in sizes]
    theirs.close()
    await asyncio.wait_for(ended.wait(), 60)
    end.send(b"nobody is there")
    end.close()
