"""Traces of what torch does, on request. Owns: one trace at a time and its file. Must not know: engines."""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path
from typing import Any

from tokenmill.core.errors import UserError


class Profiler:
    """Starts and stops torch's profiler."""

    def __init__(self) -> None:
        self._running: Any = None
        self._prefix = "tokenmill"

    def start(self, prefix: str | None = None) -> None:
        """Record from now on. prefix: how the trace's path begins."""
        import torch.profiler as tracing

        if self._running is not None:
            raise UserError("a profile is being recorded already: stop_profile() ends it.")
        self._prefix = prefix or "tokenmill"
        self._running = tracing.profile(activities=tracing.supported_activities())
        self._running.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Drop an unfinished recording: one that outlives torch crashes the process."""
        atexit.unregister(self.close)
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    def stop(self) -> Path:
        """Write the trace; returns its file."""
        if self._running is None:
            raise UserError("no profile is being recorded: start_profile() begins one.")
        running, self._running = self._running, None
        atexit.unregister(self.close)
        running.stop()
        path = Path(f"{self._prefix}-{os.getpid()}-{time.strftime('%H%M%S')}.json").absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: the trace cannot be written ({error})") from error
        return path
