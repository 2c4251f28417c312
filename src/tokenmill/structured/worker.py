"""The process that lowers schemas. Owns: its loop and its fences. A schema may take all the time and memory that it is
given; here that disturbs nobody. Must not know: who asks, tokens.

Frames on stdin and stdout: 4 bytes of length (big-endian), then JSON; one answer per question until stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from tokenmill.core.errors import UserError
from tokenmill.structured.lowering import lower_spec

FRAME = struct.Struct(">I")
MEMORY_BYTES = 1 << 30
NICE = 10
WORK_S, REST_S = 0.02, 0.02
"""A question that takes long rests in between: usual schemas never do, and one bomb after another leaves the cores to
those who stream."""


def main(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Answer until the parent closes our stdin."""
    _fence()
    _say(stdout, {"ready": True})
    while True:
        head = stdin.read(FRAME.size)
        if len(head) < FRAME.size:
            return
        frame = stdin.read(FRAME.unpack(head)[0])
        with _rests():
            found = answer(json.loads(frame))
        _say(stdout, found)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The grammar's text, or what is wrong with the structure."""
    try:
        return {"text": lower_spec(question["spec"], question["reasoning"])}
    except UserError as error:
        return {"error": str(error), "param": error.param}
    except (MemoryError, RecursionError):  # what is left is our own mistake, and must not end the process
        return {"error": "structured_outputs: it needs too much memory. Simplify it.", "param": "structured_outputs"}
    except Exception as error:
        return {"error": f"structured_outputs: it could not be read ({type(error).__name__}).", "param": None}


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
    body = json.dumps(value).encode()
    stdout.write(FRAME.pack(len(body)) + body)
    stdout.flush()


def _fence() -> None:
    """No new files, no writing, bounded memory; others go first."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICE)
    try:
        import resource
    except ImportError:
        return
    for name, value in (("AS", MEMORY_BYTES), ("FSIZE", 0), ("CORE", 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def run() -> None:
    """As a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    main(sys.stdin.buffer, sys.stdout.buffer)
