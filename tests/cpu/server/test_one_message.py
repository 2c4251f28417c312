"""Whatever breaks in encoding, reading or handling one request's messages ends that request: 31 others say what they
say anyway, and the engine lives on. Both ends run here, in two threads, so that each function can be made to fail."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.config import make_config
from tokenmill.core.errors import UserError
from tokenmill.core.request import SamplingParams
from tokenmill.engine.interfaces.prompts import make_request
from tokenmill.engine.running import loop as engine_loop
from tokenmill.engine.running import wire
from tokenmill.engine.running.build import build_engine
from tokenmill.engine.running.wire import Command, News, Stop
from tokenmill.engine.steps.deliveries import Deliveries
from tokenmill.engine.steps.engine import Engine
from tokenmill.server.backend import DeltaStream
from tokenmill.server.engines import child, fleet, links
from tokenmill.server.engines.channel import BlockingEnd, LoopEnd, frame
from tokenmill.server.engines.child import name_of, read_command, run_engine
from tokenmill.server.engines.fleet import Fleet
from tokenmill.server.engines.state import FleetOptions

VICTIM = "the-victim"
COUNT = 32


class SocketLink:
    """An engine in a thread, with the frames and codes of one in a process."""

    lives = 0

    def __init__(self, config: Any) -> None:
        self.config = config
        SocketLink.lives += 1

    def start(self, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        end = BlockingEnd(theirs)

        def receive(timeout: float) -> list[Command] | None:
            found = [read_command(name, body) for name, body in end.receive(timeout) or []]
            return None if any(isinstance(c, Stop) for c in found) else found

        def main() -> None:
            try:
                run_engine(build_engine, self.config, receive, lambda n: end.send(frame("", child.encode_news(n))))
            finally:
                loop.call_soon_threadsafe(on_death, "the thread ended")

        self.wire = LoopEnd(ours, lambda name, body: on_news(links.read_news(body)), lambda: None)
        self.thread = threading.Thread(target=main, daemon=True)
        self.thread.start()

    def send(self, command: Command) -> None:
        self.wire.send(frame(name_of(command), links.encode(command)))

    def vitals(self) -> None:
        return None

    def dump_stacks(self) -> None:
        """Nothing to show."""

    async def kill(self) -> None:
        self.send(Stop())

    async def stop(self) -> None:
        self.send(Stop())
        await asyncio.to_thread(self.thread.join, 10)
        self.wire.close()


async def one(served: Fleet, number: int, tag: str) -> str:
    """The text of a request, or what it ended with."""
    name = VICTIM if number == 7 else f"r{tag}-{number}"
    structure = {"regex": "[a-c]{3,9}x"} if number % 8 == 7 else None
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, structured_outputs=structure, stop=["zq"])
    request = make_request(name, None, [20 + number, 40, 60 + number], params, arrival=0.0)
    stream, text = DeltaStream(), ""
    try:
        async with asyncio.timeout(60):
            await served.open(request, stream)
            while True:
                for delta in await stream.batch():
                    text += delta.text
                    if delta.finish_reason is not None:
                        return f"ended: {delta.error}" if delta.finish_reason == "error" else text
    except Exception as error:
        return f"raised: {type(error).__name__}"


async def all_of(served: Fleet, tag: str) -> list[str]:
    return await asyncio.gather(*(one(served, number, tag) for number in range(COUNT)))


def concerns(args: Any) -> bool:
    """Is the victim named in what is handled: the first argument after `self`?"""
    return any(VICTIM.encode() in a if isinstance(a, bytes) else VICTIM in repr(a) for a in args[:2])


def failing(function: Any, times: int) -> Any:
    left = times

    def broken(*args: Any, **named: Any) -> Any:
        nonlocal left
        if left and concerns(args):
            left -= 1
            raise RuntimeError("injected")
        return function(*args, **named)

    return broken


PLACES = [
    (links, "encode"),
    (wire, "encode"),
    (wire, "decode_news"),
    (child, "decode_command"),
    (Engine, "add"),
    *((engine_loop.EngineLoop, name) for name in ("_waits", "_refuse", "abort", "_end", "_stats")),
    *((Fleet, name) for name in ("_answer", "_refused", "_failed", "_started", "_prefilled", "_note", "_show")),
    *((Fleet, name) for name in ("_stop", "_dispatch", "_tell_end", "_ended", "_fail")),
    *((Deliveries, name) for name in ("_track", "_text")),
]


@pytest.fixture(scope="module")
def config(tiny: Path) -> Any:
    return make_config(model=str(tiny), kv_cache_memory_bytes=1 << 25, kernels="auto")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def served(runner: asyncio.Runner, config: Any) -> Iterator[Fleet]:
    made = Fleet(lambda number, life: SocketLink(config), ("tiny",), FleetOptions(watchdog_s=60))
    runner.run(made.start())
    yield made
    runner.run(made.close())


@pytest.fixture(scope="module")
def calm(runner: asyncio.Runner, served: Fleet) -> list[str]:
    return runner.run(all_of(served, "calm"))


def ids(value: Any) -> str | None:
    return getattr(value, "__name__", None) if not isinstance(value, str) else value


@pytest.mark.parametrize(
    ("owner", "name", "times"),
    [*((*place, n) for place in PLACES for n in (1, 1000)), (DeltaStream, "put", 1)],
    ids=ids,
)
def test_one_of_32_breaks_and_31_do_not_notice(
    runner: asyncio.Runner,
    served: Fleet,
    calm: list[str],
    owner: Any,
    name: str,
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(set(calm)) > 8 and not any(text.startswith(("ended", "raised")) for text in calm)
    lives = SocketLink.lives
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), times))
        texts = runner.run(all_of(served, f"{name}{times}"))
    assert texts[:7] + texts[8:] == calm[:7] + calm[8:]
    assert texts[7] == calm[7] or texts[7].startswith(("ended", "raised"))
    assert SocketLink.lives == lives and served.restarts == 0 and not served.open_requests
    assert runner.run(all_of(served, f"{name}{times}-after")) == calm
    stats = served.stats()[0]
    assert stats.failures == 0


def test_what_cannot_be_carried_is_refused_while_its_caller_waits(runner: asyncio.Runner, served: Fleet) -> None:
    async def main() -> None:
        for value in (1 << 64, -(1 << 64), 10**400):
            spec = {"json": {"type": "integer", "maximum": value}}
            params = SamplingParams(max_tokens=2, structured_outputs=spec)
            with pytest.raises(UserError, match="64 bits"):
                await served.open(make_request(f"big{value % 7}", None, [1, 2], params, arrival=0.0), DeltaStream())
        assert not served.open_requests

    runner.run(main())
    assert fleet.check_carried is wire.check_carried
