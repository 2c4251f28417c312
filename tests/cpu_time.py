"""CPU time that something takes, for promises made in it. Only the threads that do the work count, so nothing does
that other tests have left running, nor the collector; and a promise is broken when it is broken each time."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

TRIES = 3


@dataclass
class Spent:
    """`seconds`, once it is over."""

    seconds: float = 0.0


@contextlib.contextmanager
def cpu_time(*pools: ThreadPoolExecutor) -> Iterator[Spent]:
    """Of the calling thread and of the threads of `pools`."""
    spent = Spent()
    gc.disable()
    before = _clocks(pools)
    try:
        yield spent
    finally:
        spent.seconds = sum(now - before.get(thread, 0.0) for thread, now in _clocks(pools).items())
        gc.enable()


def least_cpu_time(work: Callable[[], object], promised: float) -> float:
    """Of `work`, done again while it takes more than is promised."""
    found = []
    while len(found) < TRIES and (not found or found[-1] >= promised):
        with cpu_time() as spent:
            work()
        found.append(spent.seconds)
    return min(found)


@contextlib.contextmanager
def hanging_fails(seconds: int) -> Iterator[None]:
    """What has not ended after so many seconds raises TimeoutError. In the main thread only."""

    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _clocks(pools: tuple[ThreadPoolExecutor, ...]) -> dict[int, float]:
    threads = {threading.current_thread(), *(thread for pool in pools for thread in pool._threads)}
    idents = [thread.ident for thread in threads if thread.ident is not None]
    return {ident: time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents}
