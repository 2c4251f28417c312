"""Helpers that die, stop, crash, spin or cannot be started: who is to blame is told apart, and nothing is left."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.thinned import covering
from tokenmill.core.errors import BusyError, UserError
from tokenmill.process import client
from tokenmill.process.client import Crashed, Helper, Overrun, Oversize, Pool
from tokenmill.server.errors import describe_error
from tokenmill.structured.helper import LoweringProcess
from tokenmill.structured.lowering import lower_spec
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.template_process import MOST_PROCESSES, template_pool

HELPER = Helper("tests.pure.process.crasher")
SPEC = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}
USER = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(most=3, busy=2)
    yield made
    made.close()


def hit(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[int]:
    """The next processes that are asked something are sent this signal first; -> their ids."""
    exchange, hits = client._Process.exchange, []

    def hitting(self: Any, data: bytes, budget_s: float, max_bytes: int) -> Any:
        if data and len(hits) < times and self.prepared:
            hits.append(self.pid)
            os.kill(self.pid, number)
        return exchange(self, data, budget_s, max_bytes)

    monkeypatch.setattr(client._Process, "exchange", hitting)
    return hits


def grammar() -> tuple[Callable[[], str], str]:
    return lambda: LoweringProcess().lower(SPEC, None), lower_spec(SPEC)


def template() -> tuple[Callable[[], str], str]:
    return lambda: ChatTemplate("{{ messages[0].content }}!").render(USER), "hello!"


@pytest.mark.parametrize(
    ("number", "make"), covering([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], [grammar, template])
)
def test_a_death_or_a_stop_from_outside_is_not_the_clients_fault(
    make: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, wanted = make()
    with monkeypatch.context() as patch:
        hits = hit(patch, number, 1)
        assert ask() == wanted and len(hits) == 1
    with monkeypatch.context() as patch:
        hits = hit(patch, number, 9)
        with pytest.raises(BusyError) as found:
            ask()
        assert len(hits) == 2
    assert describe_error(found.value).status == 503 and describe_error(found.value).retry_after == 1
    assert ask() == wanted
    assert all(not Path(f"/proc/{pid}").exists() for pid in hits)


@pytest.mark.parametrize(("number", "make"), covering([errno.EMFILE, errno.EAGAIN, errno.ENOMEM], [grammar, template]))
def test_no_process_to_be_had_is_no_fault_either(make: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, wanted = make()
    begin, left = subprocess.Popen, [1]

    def broken(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return begin(*args, **options)

    monkeypatch.setattr(client.subprocess, "Popen", broken)
    assert ask() == wanted
    left[0] = 2
    with pytest.raises(BusyError):
        ask()
    assert ask() == wanted


def test_work_is_judged_by_the_processor_not_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(ENDLESS, budget_s=0.2)
    with pytest.raises(UserError, match="did not finish") as found:
        template.render(USER)
    assert not isinstance(found.value, BusyError)
    monkeypatch.setattr(client, "work_of", lambda pid: 0.0)  # it waits for a processor all the time
    monkeypatch.setattr(client, "LEAST_PATIENCE_S", 0.3)
    with pytest.raises(BusyError, match="busy"):
        template.render(USER)
    template.close()


def test_a_question_that_breaks_two_helpers_by_itself_is_to_blame(pool: Pool) -> None:
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS"):
        with pytest.raises(Crashed):
            pool.ask(HELPER, {"signal": name}, 5.0)
    with pytest.raises(BusyError):
        pool.ask(HELPER, {"signal": "SIGKILL"}, 5.0)
    with pytest.raises(Overrun):
        pool.ask(HELPER, {"spin": True}, 0.1)
    with pytest.raises(Oversize):
        pool.ask(Helper(HELPER.module, max_answer=1000), {"size": 2000}, 5.0)
    assert pool.ask(Helper(HELPER.module, '"unusable"'), {}, 5.0) == {"error": "this set-up is of no use"}
    assert pool.ask(HELPER, {}, 5.0)["text"] == "x"


def test_helpers_are_kept_used_again_and_bounded(pool: Pool) -> None:
    first = pool.ask(HELPER, {}, 5.0)["pid"]
    assert pool.ask(HELPER, {}, 5.0)["pid"] == first
    others = [Helper(HELPER.module, json.dumps(i)) for i in range(7)]
    for other in others:
        pool.ask(other, {}, 5.0)
        assert len(pool.pids()) <= 3
    assert first not in pool.pids()  # it was used least recently
    pids = pool.pids()
    pool.close()
    assert pool.pids() == [] and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_any_number_of_request_templates_takes_a_few_processes() -> None:
    pool, count = template_pool(), 2 * MOST_PROCESSES
    for number in range(count):
        assert ChatTemplate(f"{number}", pool=pool).render(USER) == f"{number}"
    assert 0 < len(pool.pids()) <= MOST_PROCESSES
    pool.close()


def test_what_works_while_the_pool_closes_ends_afterwards(pool: Pool) -> None:
    pool.start(HELPER, 5.0)
    caught: list[type[BaseException]] = []

    def spin() -> None:
        try:
            pool.ask(HELPER, {"spin": True}, 0.5)
        except Exception as error:
            caught.append(type(error))

    thread = threading.Thread(target=spin)
    thread.start()
    pool.close()
    thread.join(60)
    assert caught == [Overrun] and pool.pids() == []


def test_a_forked_child_starts_helpers_of_its_own(pool: Pool) -> None:
    mine = pool.ask(HELPER, {}, 5.0)["pid"]
    child = os.fork()
    if child == 0:
        other = pool.ask(HELPER, {}, 5.0)["pid"]
        pool.close()
        os._exit(0 if other != mine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.ask(HELPER, {}, 5.0)["pid"] == mine


ORPHAN = """
import sys
from tokenmill.text.chat_template import ChatTemplate
template = ChatTemplate(sys.argv[1], budget_s=1.0)
print("ready", flush=True)
template.render([{"role": "user", "content": "a"}])
"""


def test_an_endless_template_whose_server_was_killed_ends(tmp_path: Path) -> None:
    """Nobody is left to end it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, ENDLESS], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
    until = time.monotonic() + 60
    while not (found := _children(parent.pid)) and time.monotonic() < until:
        time.sleep(0.01)
    while not any(_works(pid, 0.3) for pid in found) and time.monotonic() < until:  # it is within the template
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    while any(map(_lives, found)) and time.monotonic() < until:
        time.sleep(0.05)
    assert found and not any(map(_lives, found))


STOPPED = """
from tokenmill.text.chat_template import ChatTemplate
template = ChatTemplate("x")
template.render([{"role": "user", "content": "a"}])
print("ready", flush=True)
input()
"""


def test_a_stopped_helper_ends_with_its_server() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", STOPPED]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert parent.stdin is not None and parent.stdout is not None and parent.stdout.readline() == b"ready\n"
    found, until = _children(parent.pid), time.monotonic() + 60
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    while any(map(_lives, found)) and time.monotonic() < until:
        time.sleep(0.02)
    assert found and not any(map(_lives, found))


def _works(pid: int, seconds: float) -> bool:
    """Whether a process has used so much processor time."""
    try:
        used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return False
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK") >= seconds


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(folder.name))
    return found
