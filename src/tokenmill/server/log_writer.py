"""Log lines on their way to standard error. Owns: a thread that writes, so that no code that logs waits for a reader.

If the reader of the pipe stops, a bounded number of lines waits, and further lines are only counted. Must not know:
what lines say.
"""

from __future__ import annotations

import logging
import os
import queue
import threading

MOST_LINES = 1024
MOST_CHARS = 8192
"""Most characters of one line."""
FLUSH_S = 1.0


class LogWriter(logging.Handler):
    """Writes lines to a file descriptor. `dropped` counts lines that found no room or no reader."""

    def __init__(self, descriptor: int = 2, most: int = MOST_LINES) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.dropped = 0
        self._lines: queue.Queue[bytes] = queue.Queue(most)
        self._thread = threading.Thread(target=self._write, name="tokenmill-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line. It never waits."""
        try:
            line = self.format(record)[:MOST_CHARS] + "\n"
            self._lines.put_nowait(line.encode("utf-8", "replace"))
        except queue.Full:
            self.dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait a moment for the lines on their way."""
        waited = threading.Event()
        for _ in range(int(FLUSH_S / 0.01)):
            if not self._lines.unfinished_tasks:
                return
            waited.wait(0.01)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            try:
                while line:
                    line = line[os.write(self.descriptor, line) :]
            except OSError:  # nobody reads any more, or somebody has made the pipe non-blocking
                self.dropped += 1
            finally:
                self._lines.task_done()


def dropped_lines(names: tuple[str, ...]) -> int:
    """The lines that the writers of these loggers have dropped."""
    handlers = {handler for name in names for handler in logging.getLogger(name).handlers}
    return sum(handler.dropped for handler in handlers if isinstance(handler, LogWriter))
