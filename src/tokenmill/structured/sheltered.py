"""A constraint whose own errors end only its own sequence. Owns: turning exceptions into empty masks.

An empty mask allows no token, so the sampler ends that sequence with an error while the others of the step continue.
Must not know: grammars.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from tokenmill.core.constraint import Constraint
from tokenmill.core.errors import OUR_FAULT

log = logging.getLogger("tokenmill.structured")
T = TypeVar("T")
FAILED = f"{OUR_FAULT}the structure could not be followed. The other requests are not affected; try this one again."


class Sheltered:
    """`size`: bytes of a mask, until the inner constraint has given one."""

    __slots__ = ("broken", "inner", "size")

    def __init__(self, inner: Constraint, size: int) -> None:
        self.inner = inner
        self.size = size
        self.broken = False

    def mask(self) -> bytes | None:
        """Allowed next tokens; none after an error."""
        nothing: bytes | None = None
        found = self._tried(lambda: self.inner.mask(), nothing)
        if found:
            self.size = len(found)
        return bytes(self.size) if self.broken else found

    def accept(self, tokens: list[int]) -> None:
        """Tokens that were said."""
        self._tried(lambda: self.inner.accept(tokens), None)

    def forced(self) -> list[int]:
        """Tokens that must come next; none after an error."""
        return self._tried(lambda: self.inner.forced(), [])

    def validate(self, tokens: list[int]) -> int:
        """How many of these tokens are allowed in a row from here; none after an error."""
        return self._tried(lambda: self.inner.validate(tokens), 0)

    def finished(self) -> bool:
        """Has the text ended?"""
        return self._tried(lambda: self.inner.finished(), False)

    def failure(self) -> str | None:
        """What went wrong inside."""
        found = self._tried(lambda: self.inner.failure(), None)
        return FAILED if self.broken else found

    def fork(self) -> Sheltered:
        """An independent copy at the same place."""
        inner = self._tried(lambda: self.inner.fork(), self.inner)
        twin = Sheltered(inner, self.size)
        twin.broken = self.broken
        return twin

    def _tried(self, work: Callable[[], T], otherwise: T) -> T:
        """The inner constraint's result; `otherwise` once it has failed."""
        if self.broken:
            return otherwise
        try:
            return work()
        except BaseException as error:  # a signal goes on; a native library's panic is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            log.exception("a constraint failed")
        self.broken = True
        return otherwise
