"""Lowering in a process of its own. Owns: starting it, its time budget, and ending it when a schema overruns.

Must not know: what lowering is. One question at a time; the caller's thread waits without holding anybody up.
"""

from __future__ import annotations

import json
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
            found = _exchange(process, FRAME.pack(len(body)) + body, self.budget_s)
        except TimeoutError:
            self.close()
            refuse(f"it could not be worked out within {self.budget_s:g} s. Simplify it.")
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
            _exchange(process, b"", START_S)
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


def _exchange(process: subprocess.Popen[bytes], frame: bytes, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    assert process.stdin is not None and process.stdout is not None
    left = memoryview(frame)
    while left:
        _wait(process.stdin.fileno(), select.POLLOUT, deadline)
        left = left[os.write(process.stdin.fileno(), left) :]
    size = FRAME.unpack(_receive(process.stdout.fileno(), FRAME.size, deadline))[0]
    if size > MAX_ANSWER:
        raise EOFError
    found: dict[str, Any] = json.loads(_receive(process.stdout.fileno(), size, deadline))
    return found


def _receive(fd: int, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        _wait(fd, select.POLLIN, deadline)
        chunk = os.read(fd, min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError
