"""Talking to template processes. Owns: starting them, the time budget, killing one that overruns, and never leaving
one behind. Must not know: templates, messages."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from tokenmill.core.errors import UserError
from tokenmill.text import template_worker

_START_SECONDS = 30.0
_MEMORY_BYTES = 1 << 30
_MAX_PROCESSES = 4


class TemplateProcesses:
    """Up to four processes for one set of templates; each request takes an idle one or starts one."""

    def __init__(self, sources: dict[str, str], *, budget_s: float, max_chars: int) -> None:
        self._setup = {
            "path": [path for path in sys.path if path],
            "sources": sources,
            "memory": _MEMORY_BYTES,
            "max_chars": max_chars,
        }
        self._budget_s = budget_s
        # Escaped text takes at most twelve bytes a character.
        self._max_bytes = 12 * max_chars + (1 << 16)
        self._free = threading.BoundedSemaphore(_MAX_PROCESSES)
        self._idle: list[_Process] = []
        self._end = weakref.finalize(self, _end_all, self._idle, os.getpid())

    def start(self) -> None:
        """Start one process ahead of the first request; raises UserError when a template does not compile."""
        with self._free:
            self._idle.append(self._take())

    def ask(self, request: dict[str, Any]) -> str:
        """The rendered text; raises UserError when the template fails, overruns its time, or dies."""
        try:
            frame = template_worker.frame(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"messages, tools and template arguments must be plain JSON values ({error})") from error
        with self._free:
            process = self._take()
            try:
                answer = process.exchange(frame, self._budget_s, self._max_bytes)
            except BaseException:
                process.end()
                raise
            self._idle.append(process)
        return _text(answer, "text")

    def close(self) -> None:
        """End the idle processes; a later request starts a fresh one."""
        _end_all(self._idle, os.getpid())

    def _take(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive():
                return process
            process.end()
        process = _Process()
        try:
            _text(process.exchange(template_worker.frame(self._setup), _START_SECONDS, 1 << 16), "ready")
            _text(process.exchange(b"", self._budget_s, 1 << 16), "compiled")
        except BaseException:
            process.end()
            raise
        return process


def _text(answer: dict[str, Any], key: str) -> str:
    if "error" in answer:
        raise UserError(str(answer["error"]))
    return str(answer[key])


def _end_all(idle: list[_Process], owner: int) -> None:
    # After a fork the copy must not end the processes of the original.
    while idle and os.getpid() == owner:
        idle.pop().end()


class _Process:
    def __init__(self) -> None:
        # -I and an empty environment: the template's process sees neither our variables nor our folder.
        command = [sys.executable, "-I", str(Path(template_worker.__file__))]
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._in, self._out = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def alive(self) -> bool:
        return self._popen.poll() is None

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()

    def exchange(self, frame: bytes, seconds: float, max_bytes: int) -> dict[str, Any]:
        """Send a frame and wait for the answer; UserError when it takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        try:
            self._send(memoryview(frame), deadline)
            head = self._receive(template_worker.FRAME.size, deadline)
            size = template_worker.FRAME.unpack(head)[0]
            if size > max_bytes:
                raise UserError("the chat template's output is over the limit")
            answer: dict[str, Any] = json.loads(self._receive(size, deadline))
            return answer
        except TimeoutError:
            raise UserError(
                f"the chat template did not finish within {seconds:g} s, so it was stopped; use a simpler template"
            ) from None
        except (BrokenPipeError, EOFError):
            raise UserError("the chat template's process died (memory or recursion); use a simpler template") from None

    def _send(self, data: memoryview, deadline: float) -> None:
        while data:
            _wait(self._in, select.POLLOUT, deadline)
            data = data[os.write(self._in, data) :]

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            _wait(self._out, select.POLLIN, deadline)
            if not (chunk := os.read(self._out, min(size - len(data), 1 << 20))):
                raise EOFError
            data += chunk
        return bytes(data)


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError
