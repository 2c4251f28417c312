"""Reading prompts has a budget; who is to blame when it is over is told apart."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.pure.server.conftest import Starter
from tokenmill.core.errors import UserError
from tokenmill.engine.admission import BusyError
from tokenmill.server.errors import describe_error
from tokenmill.server.text import THREADS, TextWorkers


async def test_work_that_takes_too_long_is_refused() -> None:
    workers = TextWorkers(None, 100, budget_s=0.05)
    ended = threading.Event()

    def burn() -> None:
        while not ended.is_set():
            pass

    try:
        with pytest.raises(UserError, match="shorten it") as found:
            await workers.run_in_thread(burn)
    finally:
        ended.set()
        workers.close()
    assert not isinstance(found.value, BusyError) and describe_error(found.value).status == 400


async def test_work_that_had_to_wait_is_not_to_blame() -> None:
    workers = TextWorkers(None, 100, budget_s=0.3)
    ended = threading.Event()
    before = [asyncio.create_task(workers.run_in_thread(ended.wait)) for _ in range(THREADS)]
    await asyncio.sleep(0)  # they take the threads
    try:
        with pytest.raises(BusyError) as found:
            await workers.run_in_thread(time.monotonic)
        assert all(isinstance(error, BusyError) for error in await asyncio.gather(*before, return_exceptions=True))
    finally:
        ended.set()
        workers.close()
    refusal = describe_error(found.value)
    assert refusal.status == 503 and refusal.retry_after == 1


async def test_others_work_is_not_counted() -> None:
    """The rest of the process is busy; the thread that reads the prompt only waits."""
    workers = TextWorkers(None, 100, budget_s=0.4)
    ended = threading.Event()

    def burn() -> None:
        while not ended.is_set():
            pass

    other = threading.Thread(target=burn)
    other.start()
    try:
        with pytest.raises(BusyError):
            await workers.run_in_thread(ended.wait)
    finally:
        ended.set()
        other.join()
        workers.close()


async def test_an_overdue_prompt_is_told_to_come_again(start: Starter) -> None:
    served = await start(text_timeout=0.3)
    ended = threading.Event()
    for _ in range(THREADS):
        served.context.text.threads.submit(ended.wait)
    try:
        answer = await served.post("/v1/completions", {"prompt": "abc", "max_tokens": 1})
    finally:
        ended.set()
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert served.context.gate.open == 0
