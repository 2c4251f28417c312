"""Lowering in a process of its own. Owns: starting it, its time budget, and ending it when a schema overruns.

Must not know: what lowering is. One question at a time; the caller's thread waits without holding anybody up.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
import weakref
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.structured.limits import PARAM, refuse
from tokenmill.structured.worker import FRAME

START_S = 30.0
BUDGET_S = 1.0
"""Of work. On a busy machine a process of low priority waits most of the time: that is no fault of the schema."""
PATIENCE = 5.0
"""So many times its budget may pass on the clock before a question is given up whatever it has used."""
LOOK_S = 0.1
MAX_ANSWER = 64 << 20
_RUN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from tokenmill.structured.worker import run; run()"


class LoweringProcess:
    """Lowers structures elsewhere; used by one thread."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self.budget_s = budget_s
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def lower(self, spec: Any, reasoning: dict[str, Any] | None) -> str:
        """The grammar's text; ParameterError says what is wrong, or that the budget was not enough."""
        body = json.dumps({"spec": spec, "reasoning": reasoning}).encode()
        process = self._ready()
        try:
            found = _exchange(process, FRAME.pack(len(body)) + body, _Budget(process.pid, self.budget_s))
        except TimeoutError:
            self.close()
            refuse(f"it could not be worked out with {self.budget_s:g} s of work. Simplify it.")
        except (EOFError, OSError):
            self.close()
            refuse("it needs too much memory. Simplify it.")
        except BaseException:
            self.close()
            raise
        if "error" in found:
            raise ParameterError(found["error"], param=found.get("param") or PARAM)
        text: str = found["text"]
        return text

    def close(self) -> None:
        """End the process, if there is one."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _ready(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        path = json.dumps([p for p in sys.path if p])
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._process, self._end = process, weakref.finalize(self, _stop, process, os.getpid())
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        try:
            _exchange(process, b"", _Budget(process.pid, START_S))
        except (TimeoutError, EOFError, OSError):
            self.close()
            refuse("the process that works schemas out could not be started; try again.")
        return process


def _stop(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child's copy: the process is not its own
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class _Budget:
    """Time that one question may take: seconds of work, and more on the clock."""

    def __init__(self, pid: int, seconds: float) -> None:
        self.pid, self.seconds = pid, seconds
        self.began, self.worked = time.monotonic(), _work_of(pid)

    def wait(self, fd: int, event: int) -> None:
        """Until `fd` is ready; TimeoutError when the budget is used up."""
        poll = select.poll()
        poll.register(fd, event)
        while True:
            worked, passed = _work_of(self.pid) - self.worked, time.monotonic() - self.began
            if worked >= self.seconds or passed >= PATIENCE * self.seconds:
                raise TimeoutError
            if poll.poll(LOOK_S * 1000):
                return


def _work_of(pid: int) -> float:
    """Processor seconds that a process has used; the clock where the system does not say."""
    if sys.platform == "linux":
        try:
            return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) gives for a process
        except OSError:
            return math.inf  # it is gone: reading its pipe says so first
    return time.monotonic()


def _exchange(process: subprocess.Popen[bytes], frame: bytes, budget: _Budget) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    left = memoryview(frame)
    while left:
        budget.wait(process.stdin.fileno(), select.POLLOUT)
        left = left[os.write(process.stdin.fileno(), left) :]
    size = FRAME.unpack(_receive(process.stdout.fileno(), FRAME.size, budget))[0]
    if size > MAX_ANSWER:
        raise EOFError
    found: dict[str, Any] = json.loads(_receive(process.stdout.fileno(), size, budget))
    return found


def _receive(fd: int, size: int, budget: _Budget) -> bytes:
    data = bytearray()
    while len(data) < size:
        budget.wait(fd, select.POLLIN)
        chunk = os.read(fd, min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
