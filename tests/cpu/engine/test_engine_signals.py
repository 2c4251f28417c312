"""Signals whose handlers raise, and forks: an engine goes on as if nothing had been, or says that it cannot."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import pytest
from tests.cpu.engine.engines import check_nothing_left, exact, greedy, open_llm, run

from tokenmill import AsyncLLM, SamplingParams
from tokenmill.core.errors import EngineDeadError

PROMPTS = [[t % 250 + 3 for t in range(s, s + n)] for s, n in ((1, 5), (50, 20))]
PARAMS = [greedy(4), SamplingParams(seed=1, max_tokens=3, n=2)]
MOMENTS = 16
TIMES = 2


class Stop(Exception):
    """What a handler raises."""


@pytest.fixture(scope="module")
def wanted(tiny):
    with open_llm(tiny) as llm:
        return [exact(o) for o in run(llm, PROMPTS, PARAMS)]


@pytest.fixture(autouse=True)
def handlers():
    """Tests in the background have SIGINT ignored; SIGUSR1 is a program's own."""

    def stop(*_):
        raise Stop

    before = {signal.SIGINT: signal.default_int_handler, signal.SIGUSR1: stop}
    before = {number: signal.signal(number, handler) for number, handler in before.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Interrupter:
    """Sends signals at one of the calls that an undisturbed run makes; `calls` is how many there are."""

    def __init__(self, at=-1, number=signal.SIGINT, times=1):
        self.calls, self.at, self.number, self.times = 0, at, number, times

    def __enter__(self):
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _count(self, frame, event, _):
        if event != "call":
            return
        self.calls += 1
        if self.at <= self.calls < self.at + self.times:
            if self.calls == self.at + self.times - 1:
                sys.setprofile(None)
            signal.raise_signal(self.number)


@pytest.mark.parametrize(("number", "options"), [(signal.SIGINT, {}), (signal.SIGUSR1, {"depth": 2})], ids=str)
def test_whenever_a_handler_raises_the_engine_goes_on(opened, wanted, number, options):
    llm = opened(**options)
    for _ in range(2):  # the second time with cached prefixes
        with Interrupter() as whole:
            assert [exact(o) for o in run(llm, PROMPTS, PARAMS)] == wanted
    raised = 0
    for moment in range(MOMENTS):
        try:
            with Interrupter(at=1 + whole.calls * moment // MOMENTS, number=number):
                run(llm, PROMPTS, PARAMS)
        except (KeyboardInterrupt, Stop):
            raised += 1
        check_nothing_left(llm.engine)  # it also empties the prefix cache
        assert [exact(o) for o in run(llm, PROMPTS, PARAMS)] == wanted
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert raised > MOMENTS // 2


def test_a_second_signal_breaks_in_and_the_engine_says_so(opened):
    llm = opened()
    with Interrupter() as whole:
        run(llm, PROMPTS, PARAMS)
    with pytest.raises(KeyboardInterrupt), Interrupter(at=whole.calls // 2, times=TIMES):
        run(llm, PROMPTS, PARAMS)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="make another LLM"):
            run(llm, PROMPTS, PARAMS)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(each.finished.is_set() for each in timers), "no signal comes long after"


def test_signals_in_other_threads_runs_reach_the_main_thread(opened, wanted):
    llm, found = opened(), []
    thread = threading.Thread(target=lambda: found.append([exact(o) for o in run(llm, PROMPTS, PARAMS)]))
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        signal.raise_signal(signal.SIGINT)
    thread.join()
    assert found == [wanted]


def in_a_fork(work):
    """What a fork of this process says."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            signal.alarm(60)
            os.write(write, (work() or "done").encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_fork_is_told_and_leaves_the_parents_model_alone(tiny, opened, wanted):
    llm = opened()
    calls = {
        "generate": lambda: run(llm, PROMPTS, PARAMS),
        "embed": lambda: llm.embed([{"prompt_token_ids": [1, 2]}], use_tqdm=False),
        "step": lambda: llm.llm_engine.step(),
        "metrics": lambda: llm.get_metrics(),
        "sleep": lambda: llm.sleep(),
        "forget": lambda: llm.reset_prefix_cache(),
    }
    for call in calls.values():
        assert "UserError: This process is a fork" in in_a_fork(call)
    assert in_a_fork(llm.close) == "done"
    assert [exact(o) for o in run(llm, PROMPTS, PARAMS)] == wanted
    async with AsyncLLM(str(tiny), dtype="float32", kernels="reference", max_model_len=512) as streams:

        async def ask():
            async for output in streams.generate({"prompt_token_ids": [3, 4]}, greedy(5)):
                last = output
            return last.outputs[0].token_ids

        before = await ask()

        def in_the_fork():
            asyncio.events._set_running_loop(None)
            asyncio.run(ask())

        assert "UserError: This process is a fork" in in_a_fork(in_the_fork)
        assert in_a_fork(streams.close) == "done"
        assert await ask() == before
