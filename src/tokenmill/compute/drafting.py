"""Guessing tokens where the rows are. Owns: the protocol of device drafters, and what they work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.compute.forward import ForwardContext

if TYPE_CHECKING:
    from torch import Tensor


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
