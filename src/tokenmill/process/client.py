"""The client of sandboxed helpers. Owns: starting them, their budgets of work, noticing that one died or was stopped,
trying again on a new one, how many there are, and never leaving one behind.

A question is judged by the processor time that its helper uses. On a busy machine a helper may get little of it, or be
killed from outside. Then the question is not to blame and may be asked again. Must not know: what is asked.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from tokenmill.core.errors import BusyError
from tokenmill.process.parent import starts_last
from tokenmill.process.vitals import is_stopped, work_of
from tokenmill.process.worker import FRAME, frame

START_S = 10.0
"""Seconds of work until a helper must be ready."""
PATIENCE = 5.0
"""After this many times its budget on the clock, a question is given up, however little work it has used."""
LEAST_PATIENCE_S = 5.0
LOOK_S = 0.1
STOPPED_S = 0.5
"""How long a helper may be stopped from outside (SIGSTOP)."""
MEMORY_BYTES = 1 << 30
_RUN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {module} import run_helper; run_helper()"
_OWN_FAULT = {getattr(signal, f"SIG{name}", None) for name in ("SEGV", "BUS", "ABRT", "FPE", "ILL", "SYS", "XCPU")}


class Overrun(Exception):
    """The question used up its budget."""


class Oversize(Exception):
    """The answer is longer than it may be."""


class Crashed(Exception):
    """Two helpers, one after the other, crashed over the question."""


class _Gone(Exception):
    """The helper died (`crashed`: by its own fault) or is stopped."""

    def __init__(self, crashed: bool = False) -> None:
        super().__init__()
        self.crashed = crashed


@dataclass(frozen=True, slots=True)
class Helper:
    """`module` has a function `run` that calls worker.serve; `setup` is JSON text for its `prepare`."""

    module: str
    setup: str = "null"
    max_answer: int = 64 << 20
    memory: int = MEMORY_BYTES


class Pool:
    """At most `most` processes of all helpers, `busy` of them at work. The one that is idle longest makes room."""

    def __init__(self, most: int, busy: int) -> None:
        self._most = most
        self._free = threading.BoundedSemaphore(busy)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._working = 0
        self._closings = 0
        self._end = weakref.finalize(self, _end_all, self._idle, os.getpid())

    def start(self, helper: Helper, budget_s: float) -> dict[str, Any]:
        """Start one process before the first question; -> its answer to the set-up."""
        return self._use(helper, None, budget_s)

    def ask(self, helper: Helper, question: Any, budget_s: float) -> dict[str, Any]:
        """The answer, or the helper's answer to the set-up ("error"). Raises Overrun, Oversize and Crashed, which blame
        the question; BusyError, which does not; and JSON's errors if the question is not plain data."""
        return self._use(helper, frame({"budget_s": budget_s, "ask": question}), budget_s)

    def close(self) -> None:
        """End the idle processes; a later question starts a fresh one."""
        with self._lock:
            self._closings += 1
            _end_all(self._idle, os.getpid())

    def pids(self) -> list[int]:
        """The ids of the idle processes."""
        with self._lock:
            return [process.pid for process in self._idle]

    def _use(self, helper: Helper, question: bytes | None, budget_s: float) -> dict[str, Any]:
        with self._free:
            with self._lock:
                self._working += 1
            try:
                return self._try_twice(helper, question, budget_s)
            finally:
                with self._lock:
                    self._working -= 1

    def _try_twice(self, helper: Helper, question: bytes | None, budget_s: float) -> dict[str, Any]:
        crashes = 0
        for _ in range(2):
            try:
                return self._try(helper, question, budget_s)
            except _Gone as gone:
                crashes += gone.crashed
            except OSError:  # no descriptor, no memory, no process: now
                pass
        if crashes == 2:
            raise Crashed
        raise BusyError("A process that works on requests ended or could not be started; try again.")

    def _try(self, helper: Helper, question: bytes | None, budget_s: float) -> dict[str, Any]:
        closings = self._closings
        process = self._take(helper)
        try:
            if not process.prepared:
                process.prepared = True
                word = process.exchange(b"", budget_s, helper.max_answer)
                if "error" in word:
                    process.end()
                    return word
            answer = {"prepared": True} if question is None else process.exchange(question, budget_s, helper.max_answer)
        except BaseException:
            process.end()
            raise
        with self._lock:
            if closings == self._closings:
                self._idle.append(process)
            else:
                process.end()
        return answer

    def _take(self, helper: Helper) -> _Process:
        """An idle process of this helper, or a new one."""
        with self._lock:
            for place in range(len(self._idle) - 1, -1, -1):
                if self._idle[place].helper == helper:
                    process = self._idle.pop(place)
                    if process.alive():
                        return process
                    process.end()
            while self._idle and len(self._idle) + self._working > self._most:
                self._idle.pop(0).end()
        process = _Process(helper)
        try:
            process.introduce()
        except BaseException:
            process.end()
            raise
        return process


def _end_all(idle: list[_Process], owner: int) -> None:
    # After a fork the copy must not end the processes of the original.
    while idle and os.getpid() == owner:
        idle.pop().end()


class _Process:
    """One helper's process, used by one thread at a time."""

    def __init__(self, helper: Helper) -> None:
        self.helper = helper
        self.owner = os.getpid()
        self.prepared = False
        # -I and an empty environment: the process sees neither our variables nor our folder.
        path = json.dumps([path for path in sys.path if path])
        command = [sys.executable, "-I", "-c", _RUN.format(module=helper.module), path]
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}
        )
        self.pid = self._popen.pid
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._in, self._out = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def introduce(self) -> None:
        """Send the set-up. Its answer is read with the first question's budget."""
        setup = {
            "memory": self.helper.memory,
            "budget_s": START_S,
            "parent": os.getpid() if starts_last() else None,
            "setup": json.loads(self.helper.setup),
        }
        try:
            self.exchange(frame(setup), START_S, 1 << 16)
        except Overrun:
            raise _Gone from None

    def alive(self) -> bool:
        """Is it still running, and a child of this process?"""
        return self.owner == os.getpid() and self._popen.poll() is None

    def end(self) -> None:
        """Kill it, unless it belongs to another process."""
        if self.owner == os.getpid():
            self._popen.kill()
            self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def exchange(self, data: bytes, budget_s: float, max_bytes: int) -> dict[str, Any]:
        """Send a frame and wait for the answer."""
        budget = _Budget(self.pid, budget_s)
        try:
            left = memoryview(data)
            while left:
                budget.wait(self._in, select.POLLOUT)
                left = left[os.write(self._in, left) :]
            size = FRAME.unpack(self._receive(FRAME.size, budget))[0]
            if size > max_bytes:
                raise Oversize
            answer: dict[str, Any] = json.loads(self._receive(size, budget))
            return answer
        except (BrokenPipeError, EOFError):
            raise _Gone(self._crashed()) from None

    def _receive(self, size: int, budget: _Budget) -> bytes:
        data = bytearray()
        while len(data) < size:
            budget.wait(self._out, select.POLLIN)
            if not (chunk := os.read(self._out, min(size - len(data), 1 << 20))):
                raise EOFError
            data += chunk
        return bytes(data)

    def _crashed(self) -> bool:
        try:
            code = self._popen.wait(1.0)
        except subprocess.TimeoutExpired:
            return False
        return code > 0 or (code < 0 and signal.Signals(-code) in _OWN_FAULT)


class _Budget:
    """The time that one question may take: seconds of work, and a longer time on the clock."""

    def __init__(self, pid: int, seconds: float) -> None:
        self.pid, self.seconds = pid, seconds
        self.patience_s = max(LEAST_PATIENCE_S, PATIENCE * seconds)
        self.began, self.worked = time.monotonic(), work_of(pid)
        self.stopped_since: float | None = None

    def wait(self, fd: int, event: int) -> None:
        """Wait until `fd` is ready."""
        poll = select.poll()
        poll.register(fd, event)
        while True:
            worked, now = work_of(self.pid) - self.worked, time.monotonic()
            if worked >= self.seconds and worked < math.inf:
                raise Overrun
            if poll.poll(LOOK_S * 1000):
                return
            self._look(now)

    def _look(self, now: float) -> None:
        if not is_stopped(self.pid):
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now
        if self.stopped_since is not None and now - self.stopped_since >= STOPPED_S:
            raise _Gone
        if now - self.began >= self.patience_s:
            raise BusyError("The machine is too busy to work on the request now; try again.")
