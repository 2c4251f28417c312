"""Reserved file descriptors for starting engines. Owns: holding them, and lending them to a start.

Connections may use up every descriptor of the process; an engine that dies then must still be started again.
Must not know: engines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

COUNT = 24
"""Descriptors in reserve. Starting an engine opens two sockets and some pipes, and may start a helper process of
multiprocessing."""


class Reserve:
    """Open descriptors without a use. Only one thread may use this, and it must open no other files while they are
    lent."""

    def __init__(self, count: int = COUNT) -> None:
        self._count = count
        self._held: list[int] = []
        self.refill()

    def refill(self) -> None:
        """Open the missing descriptors again, as many as the system allows."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Close them inside this context, so that files can be opened."""
        self.close()
        try:
            yield
        finally:
            self.refill()

    def close(self) -> None:
        """Close them for good."""
        while self._held:
            os.close(self._held.pop())
