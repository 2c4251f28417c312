"""Open files that are kept for starting engines. Owns: holding them, and lending them to a start.

Connections may take every descriptor that the process has; an engine that dies then must be started all the same.
Must not know: engines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

COUNT = 24
"""A start opens two sockets and some pipes, and sees to multiprocessing's own helper."""


class Reserve:
    """Descriptors of nothing. Used in one thread, where nobody else opens files while they are lent."""

    def __init__(self, count: int = COUNT) -> None:
        self._count = count
        self._held: list[int] = []
        self.refill()

    def refill(self) -> None:
        """Take back what is missing, as far as the system gives it."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Free them for what is opened inside."""
        self.close()
        try:
            yield
        finally:
            self.refill()

    def close(self) -> None:
        """Let go of them."""
        while self._held:
            os.close(self._held.pop())
