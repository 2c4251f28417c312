"""A constraint whose own errors end its own sequence and nothing else. Owns: turning exceptions into empty masks.

An empty mask leaves no token, so the sampler ends that sequence with an error while the others of the step go on.
Must not know: grammars.
"""

from __future__ import annotations

from tokenmill.core.constraint import Constraint

FAILED = "The structure's grammar failed inside of this engine; the other requests are not affected."


class Sheltered:
    """`size`: bytes of a mask, until the inner constraint has given one."""

    __slots__ = ("broken", "inner", "size")

    def __init__(self, inner: Constraint, size: int) -> None:
        self.inner = inner
        self.size = size
        self.broken = False

    def mask(self) -> bytes | None:
        """Allowed next tokens; none after an error."""
        if not self.broken:
            try:
                found = self.inner.mask()
            except Exception:
                self.broken = True
            else:
                self.size = len(found) if found else self.size
                return found
        return bytes(self.size)

    def accept(self, tokens: list[int]) -> None:
        """Tokens that were said."""
        if not self.broken:
            try:
                self.inner.accept(tokens)
            except Exception:
                self.broken = True

    def forced(self) -> list[int]:
        """Tokens that must come next; none after an error."""
        if not self.broken:
            try:
                return self.inner.forced()
            except Exception:
                self.broken = True
        return []

    def validate(self, tokens: list[int]) -> int:
        """How many of these tokens are allowed in a row from here; none after an error."""
        if not self.broken:
            try:
                return self.inner.validate(tokens)
            except Exception:
                self.broken = True
        return 0

    def finished(self) -> bool:
        """Has the text ended?"""
        if not self.broken:
            try:
                return self.inner.finished()
            except Exception:
                self.broken = True
        return False

    def failure(self) -> str | None:
        """What went wrong inside."""
        if self.broken:
            return FAILED
        try:
            return self.inner.failure()
        except Exception:
            return FAILED

    def fork(self) -> Sheltered:
        """The same place in a walk of its own."""
        twin = Sheltered(self.inner, self.size)
        twin.broken = self.broken
        if not self.broken:
            try:
                twin.inner = self.inner.fork()
            except Exception:
                twin.broken = True
        return twin
