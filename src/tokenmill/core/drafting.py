"""Guessing tokens ahead. Owns: the protocols of drafters, on the host and on the device, and of what decides how many
of their guesses are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.core.forward import ForwardContext
    from tokenmill.core.sequence import Sequence


class HostDrafter(Protocol):
    """Guesses the next tokens on the host. A wrong guess costs time, never correctness."""

    def propose(self, seq: Sequence, most: int) -> list[int]: ...
    def observe(self, seq: Sequence, proposed: int, accepted: int) -> None: ...
    def forget(self, seq: Sequence) -> None: ...


class RowState(Protocol):
    """What a device knows of its rows: tokens [R, L] int32, the first length [R] of them known (int64); parents [R,
    most] int64, where drafts are trees: what each of them goes on from, 1 + an earlier one's number, or 0: the newest
    token."""

    tokens: Tensor
    length: Tensor
    parents: Tensor


@dataclass(slots=True)
class Drafting:
    """What a DeviceDrafter works with after a step's sampling.

    `row_list`, `row_ids` [S]: the rows that get `count` drafts each; none has over `longest` known tokens, the newest
    included. places(): [S], where in the step's batch the tokens lie that the rows' newest ones were sampled from.
    samples(): what was sampled behind each of a row's tried drafts, wrong ones included, and before them [S, W]; of how
    many of these there are [S]; and how many became known tokens [S].
    """

    rows: RowState
    row_list: list[int]
    row_ids: Tensor
    count: int
    longest: int
    places: Callable[[], Tensor]
    samples: Callable[[], tuple[Tensor, Tensor, Tensor]]


@dataclass(slots=True)
class Seen:
    """A step that has been computed and sampled: its context, and the final hidden states [T, hidden] of its tokens.
    (The context of a recorded step may have more tokens: the spare row's.)"""

    ctx: ForwardContext
    hidden: Tensor


class DeviceDrafter(Protocol):
    """Guesses the next tokens where the rows are, without waiting for the device. Runs right after sampling."""

    most: int
    """So many drafts may lie behind a row's known tokens."""

    levels: int
    """Its drafts are trees, at most so deep, whose parents it leaves beside them; 0: they are chains."""

    follows: bool
    """It keeps something for every position (K/V, in pages of its own) and must be told of those it has not seen."""

    def bind(self, rows: Any, pool: Any) -> None:
        """The rows and the cache that it will work on, once they are there."""
        ...

    def warm(self) -> None:
        """Compile and record ahead what can be."""
        ...

    catches_up: str
    """How it takes in what it has missed of a row: from there ("on"), by seeing every token of the row again, as it
    keeps states, which rows do not share ("anew"), or not at all ("")."""

    def follow(self, spans: list[tuple[int, int, int]], seen: Seen) -> None:
        """Take in known tokens: (row, first position, how many), each row once; called in every step in which drafts
        are left behind, too."""
        ...

    def propose(self, step: Drafting) -> None:
        """Leave `step.count` drafts behind the known tokens of each of its rows."""
        ...

    def forget_weights(self) -> None:
        """Weights have new numbers where they stand."""
        ...


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
