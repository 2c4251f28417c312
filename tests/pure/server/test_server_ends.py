"""How a server ends, at whatever moment it is told to: nothing waits, and no process or file stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pure.server.conftest import until
from tests.pure.server.spawned_helpers import broken, never
from tokenmill.core.config import EngineConfig, make_server_config
from tokenmill.server.engines import links
from tokenmill.server.engines.links import ProcessLink
from tokenmill.server.many_models import survey
from tokenmill.server.run import Shutdown, _listening

NOTHING: survey.Asked = ((), None, 0)


async def test_an_engine_that_still_loads_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "STOP_TIMEOUT_S", math.inf)
    link = ProcessLink(never, EngineConfig())
    link.start(lambda news: None, lambda why: None)
    pid = link.process.pid
    await link.stop()
    assert link.process is None and not Path(f"/proc/{pid}").exists()


async def test_counting_ends_with_whoever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "count_needs", never)
    asking = asyncio.create_task(survey.ask_child(NOTHING))
    await until(lambda: len(multiprocessing.active_children()) == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not multiprocessing.active_children()


def test_counting_ends_with_a_server_that_is_killed() -> None:
    script = """
import asyncio
from tokenmill.server.many_models.survey import ask_child
asyncio.run(ask_child(((), None, 0)))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.DEVNULL) as server:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        found: list[str] = []
        while len(found) < 2:  # multiprocessing has a process of its own, too
            assert server.poll() is None
            found = children.read_text().split()
        server.kill()
    while any(_lives(pid) for pid in found):
        time.sleep(0.01)


def _lives(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_what_cannot_be_counted_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "count_needs", broken)
    with pytest.raises(RuntimeError, match="ValueError: broken"):
        await survey.ask_child(NOTHING)


@pytest.fixture
def handled() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("handled")
async def test_each_signal_that_ends_a_server_ends_it_in_order(number: signal.Signals) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    shutdown = Shutdown(1.0)
    shutdown.listen_to_signals()
    os.kill(os.getpid(), number)
    await shutdown.ending.wait()
    assert not shutdown.hurry.is_set()


@pytest.mark.usefixtures("handled")
async def test_nohup_is_obeyed() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    shutdown = Shutdown(1.0)
    shutdown.listen_to_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)
    await shutdown.ending.wait()
    await asyncio.sleep(0)
    assert not shutdown.hurry.is_set()  # there was one signal, not two


def test_a_socket_file_goes_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    config = make_server_config({}, uds=str(path))
    with _listening(config):
        assert path.is_socket()
    assert not path.exists()
    with contextlib.suppress(RuntimeError), _listening(config):
        path.unlink()
        path.write_text("another's")
        raise RuntimeError
    assert path.read_text() == "another's"
