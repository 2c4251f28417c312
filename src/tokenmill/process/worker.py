"""The inside of a sandboxed helper. Owns: frames, fences, and answering one question after the other until stdin ends.

A frame is 4 bytes of length (big-endian), then JSON. The first frame is the set-up; it is answered by "ready" when the
fences stand, and then by "prepared". A question may use all the time and memory that it is given: in this process that
disturbs nobody, and if the parent is gone, the system ends it. Must not know: what is asked, who asks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from tokenmill.process.parent import die_with

FRAME = struct.Struct(">I")
WORK_S, REST_S = 0.02, 0.02
"""A long question sleeps REST_S after each WORK_S, so that even a series of hostile ones leaves the cores to others.
Usual questions are too short for that."""
GRACE_S = 2
"""Processor seconds beyond a question's budget after which the system ends this process, if the parent does not."""
Answer = Callable[[Any], dict[str, Any]]


class Unusable(Exception):
    """The set-up cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class HelperTask:
    """What a helper does. `prepare` makes the answering function from a set-up. `warm` does everything that opens files
    once, because `files` forbids it afterwards."""

    prepare: Callable[[Any], Answer]
    warm: Callable[[], None] = lambda: None
    files: int | None = None
    rests: bool = False
    nice: int = 0


def frame(value: object) -> bytes:
    """A value as a frame; non-ASCII characters travel escaped, so lone surrogates survive."""
    body = json.dumps(value).encode()
    return FRAME.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Any | None:
    """The next frame's value; None at the end."""
    head = stream.read(FRAME.size)
    return json.loads(stream.read(FRAME.unpack(head)[0])) if len(head) == FRAME.size else None


def serve(task: HelperTask, stdin: BinaryIO | None = None, stdout: BinaryIO | None = None) -> None:
    """Answer until the parent closes our stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    stdin, stdout = stdin or sys.stdin.buffer, stdout or sys.stdout.buffer
    setup = read_frame(stdin)
    if setup is None:
        return
    if setup["parent"] is not None:
        die_with(setup["parent"])
    task.warm()
    fence(setup["memory"], task)
    _say(stdout, {"ready": True})
    try:
        _limit_work(setup["budget_s"])
        answer = task.prepare(setup["setup"])
    except Unusable as error:
        _say(stdout, {"error": str(error)})
        return
    _say(stdout, {"prepared": True})
    while (question := read_frame(stdin)) is not None:
        _limit_work(question["budget_s"])
        with _rests() if task.rests else contextlib.nullcontext():
            found = answer(question["ask"])
        _say(stdout, found)


def fence(memory: int, task: HelperTask) -> None:
    """From here on: no writing to files, bounded memory, no new files if asked, and low priority."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(task.nice)
    limits = {"AS": memory, "FSIZE": 0, "CORE": 0}
    if task.files is not None:
        limits["NOFILE"] = task.files
    try:
        import resource
    except ImportError:  # not a POSIX system: the time budget alone must do
        return
    for name, value in limits.items():
        # Some systems know a limit but refuse to set it; the others still hold.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def _limit_work(budget_s: float) -> None:
    try:
        import resource
    except ImportError:
        return
    with contextlib.suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + budget_s) + GRACE_S, most))


@contextlib.contextmanager
def _rests() -> Iterator[None]:
    """Sleep for REST_S after each WORK_S of work."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGPROF, lambda number, frame: time.sleep(REST_S))
    signal.setitimer(signal.ITIMER_PROF, WORK_S, WORK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _say(stdout: BinaryIO, value: dict[str, Any]) -> None:
    stdout.write(frame(value))
    stdout.flush()
