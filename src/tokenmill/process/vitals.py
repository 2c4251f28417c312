"""What the system says of a process: work, bytes read, whether it is stopped. Must not know: what the process does."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

STOPPED = ("T", "t")
"""States from `state_of` of a process that is stopped, or traced by a debugger."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """Processor seconds, bytes read, and whether the process is stopped."""

    worked_s: float
    read_bytes: int
    stopped: bool


def vitals_of(pid: int) -> Vitals:
    """The figures of a process, including the workers that its main thread started. A system that shows less (no
    descriptor is left, no /proc) still shows the work."""
    worked_s, read, stopped = work_of(pid), 0, False
    try:
        fields = _fields(pid)
        stopped = fields[0] == "T"  # "t": a debugger examines the process
        read = int(fields[9]) + _bytes_read(pid)  # major faults are reads of mapped files
        workers = [int(worker) for worker in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, IndexError, ValueError):
        workers = []
    for worker in workers:
        with contextlib.suppress(OSError, IndexError, ValueError):
            read += _bytes_read(worker)
            worked_s += work_of(worker)
    return Vitals(worked_s, read, stopped)


def work_of(pid: int) -> float:
    """Processor seconds that a process has used; infinity if it is gone; the clock if the system cannot tell."""
    if sys.platform == "linux":
        try:
            return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) gives for a process
        except OSError:
            return math.inf  # reading its pipe reports that first
    return time.monotonic()


def is_stopped(pid: int) -> bool:
    """Is this process stopped? False if the system cannot tell."""
    return state_of(pid) in STOPPED


def state_of(pid: int) -> str:
    """The system's letter for what a process does (R: computes, S: waits, D: for a disk, T: stopped); "": unknown."""
    try:
        return _fields(pid)[0]
    except (OSError, IndexError):
        return ""


def _fields(pid: int) -> list[str]:
    """What /proc says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _bytes_read(pid: int) -> int:
    return int(Path(f"/proc/{pid}/io").read_text().split("rchar:")[1].split()[0])
