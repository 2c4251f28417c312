"""The process that made something. Owns: telling that this is another one, a fork of it.

A fork has none of the threads, and its pipes to helpers and workers are the parent's. Must not know: what was made.
"""

from __future__ import annotations

import os

from tokenmill.core.errors import UserError


class HomeProcess:
    """Remembers the process that it was made in."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Is this that process?"""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Refuse a fork of it, which would wait for threads that it has not."""
        if not self.here:
            raise UserError(
                "This process is a fork of the one that loaded the model, and cannot use it: load it in each process "
                "(multiprocessing: the start method 'spawn')."
            )
