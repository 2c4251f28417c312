"""Compiles the kernels of a GPU's calibration before they are measured. Owns: the processes that do so side by side.

Each runs one part of the calibration once, and leaves the compiled kernels on disk. If one fails, its part's kernels
are compiled during the measurement, which takes longer. Must not know: what a part is.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from tokenmill.device.memory import free_bytes
from tokenmill.process.start import PYTHON

_PART_BYTES = 4 << 30
"""Memory on the device that one process may take."""
_LONGEST_S = 40.0


class Compiling:
    """A process for each part. They all start at once, and are ended on leaving the context."""

    def __init__(self, device: str, parts: Sequence[str]) -> None:
        self.started = time.perf_counter()
        room = min((os.cpu_count() or 1) - 1, free_bytes(device) // _PART_BYTES) if parts else 0
        wanted = list(parts)[-room:] if room > 1 else []  # the last part takes longest
        self.running = {part: _process(device, part) for part in wanted}

    def __enter__(self) -> Compiling:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def wait(self, told: Callable[[str], None]) -> None:
        """Wait until all of them have ended."""
        waited = list(self.running)
        for part in waited:
            process = self.running.pop(part)
            try:
                status = process.wait(max(0.0, self.started + _LONGEST_S - time.perf_counter()))
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            if status:
                told(f"{part}: kernels were not compiled beforehand (status {status})")
        if waited:
            told(f"kernels of {', '.join(waited)}: {time.perf_counter() - self.started:.1f} s")


def _process(device: str, part: str) -> subprocess.Popen[Any]:
    command = [*PYTHON, "-m", "tokenmill.measure.calibrate", device, part]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
