"""Guessing tokens ahead. Owns: the protocols of host drafters, and of the control of how many guesses are tried.
(compute/drafting.py has those of device drafters.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenmill.core.sequence import Sequence


class HostDrafter(Protocol):
    """Guesses the next tokens on the host. A wrong guess costs time, never correctness."""

    def propose(self, seq: Sequence, most: int) -> list[int]: ...
    def observe(self, seq: Sequence, proposed: int, accepted: int) -> None: ...
    def forget(self, seq: Sequence) -> None: ...


class DraftControl(Protocol):
    """How many drafts are worth their cost. What it says changes the time that tokens take, never the tokens."""

    def depth(self, rows: int) -> int:
        """Drafts to leave behind each of this many rows."""
        ...

    def observe(self, tried: int, accepted: int) -> None:
        """A row's drafts were verified."""
        ...

    def timed(self, rows: int, depth: int, seconds: float) -> None:
        """So long took a step in which each of `rows` tried `depth` drafts and got as many new ones."""
        ...

    def worked(self, tokens: int, rows: int, seconds: float) -> None:
        """So long took a step without drafts of a device, in which rows computed so many tokens in all: those that they
        sample behind, drafts among them."""
        ...

    def price(self, rows: int, depth: int, tried: int) -> tuple[float, float]:
        """Seconds of a step of so many rows without drafts, and what drafts add to it: `depth` are left behind each
        row, `tried` are verified in all. Zeros: it is not known."""
        ...


@dataclass(frozen=True, slots=True)
class AllOfThem:
    """The null control: as many drafts as may be, always."""

    most: int = 0

    def depth(self, rows: int) -> int:
        return self.most

    def observe(self, tried: int, accepted: int) -> None:
        """Nothing is learnt."""

    def timed(self, rows: int, depth: int, seconds: float) -> None:
        """Nothing is learnt."""

    def worked(self, tokens: int, rows: int, seconds: float) -> None:
        """Nothing is learnt."""

    def price(self, rows: int, depth: int, tried: int) -> tuple[float, float]:
        return 0.0, 0.0
