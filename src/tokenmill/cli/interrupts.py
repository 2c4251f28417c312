"""Ctrl-C. Owns: where a conversation hears it, and that a time limit is heard as one where figures would be lost.

In a conversation it stops what can be stopped, once; everywhere else it is dropped, so that no conversation is lost
between two steps.

Must not know: conversations, engines.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


def hear_time_limits() -> None:
    """From now on SIGTERM, which `timeout` and batch systems send, ends what is measured as Ctrl-C does: what there is
    so far is shown and saved. A second one, too."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _as_ctrl_c)


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    if callable(signal.getsignal(signal.SIGINT)):
        signal.raise_signal(signal.SIGINT)
    else:  # it is ignored in the background, where a time limit counts all the same
        raise KeyboardInterrupt


class Interrupts:
    """Inside `with`, SIGINT is handled here, if Python's own handler had it before. Elsewhere, and with `ours=False`,
    nothing changes."""

    def __init__(self, *, ours: bool = True) -> None:
        self._ours = ours and threading.current_thread() is threading.main_thread()
        self._heard = False
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Self:
        self._ours = self._ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """In this context the first Ctrl-C raises KeyboardInterrupt."""
        self._heard = True
        try:
            yield
        finally:
            self._heard = False

    def run(self, runner: asyncio.Runner, work: Coroutine[Any, Any, None]) -> None:
        """Run this. The first Ctrl-C cancels it, and raises KeyboardInterrupt when it has ended."""
        if not self._ours:
            runner.run(work)
            return
        stopped = False

        async def watched() -> None:
            nonlocal stopped
            task = self._task = asyncio.ensure_future(work)
            try:
                await asyncio.wait([task])
            finally:
                self._task = None
            stopped = task.cancelled()
            if not stopped:
                task.result()

        runner.run(watched())
        if stopped:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            task.get_loop().call_soon_threadsafe(task.cancel)
        elif self._heard:
            self._heard = False
            raise KeyboardInterrupt
