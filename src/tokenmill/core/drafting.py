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
    """Decides how many drafts are worth their cost. This changes how long tokens take, never the tokens."""

    def depth(self, rows: int) -> int:
        """How many drafts to leave behind each row, if there are this many rows."""
        ...

    def resumes(self, rows: int) -> bool:
        """If `depth` is 0 for this many rows, will it soon be more?"""
        ...

    def observe(self, tried: int, accepted: int) -> None:
        """Note that a row's drafts were verified."""
        ...

    def timed(self, rows: int, depth: int, seconds: float) -> None:
        """Note the duration of a step in which each of `rows` tried `depth` drafts and got as many new ones."""
        ...

    def worked(self, tokens: int, rows: int, seconds: float) -> None:
        """Note the duration of a step without device drafts, in which rows computed `tokens` in all. Every one is
        sampled behind; drafts of the host count, too."""
        ...

    def price(self, rows: int, depth: int, tried: int) -> tuple[float, float]:
        """How many seconds a step of these rows takes without drafts, and how many drafts add: `depth` are left behind
        each row, and `tried` are verified in all. Zeros: it is not known."""
        ...


@dataclass(frozen=True, slots=True)
class AllOfThem:
    """The null control: always as many drafts as the limits allow."""

    most: int = 0

    def depth(self, rows: int) -> int:
        return self.most

    def resumes(self, rows: int) -> bool:
        return True

    def observe(self, tried: int, accepted: int) -> None:
        """Nothing is learnt."""

    def timed(self, rows: int, depth: int, seconds: float) -> None:
        """Nothing is learnt."""

    def worked(self, tokens: int, rows: int, seconds: float) -> None:
        """Nothing is learnt."""

    def price(self, rows: int, depth: int, tried: int) -> tuple[float, float]:
        return 0.0, 0.0
