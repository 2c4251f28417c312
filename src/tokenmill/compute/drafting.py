"""Guessing tokens where the rows are. Owns: the protocol of device drafters, and what they work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.compute.forward import ForwardContext

if TYPE_CHECKING:
    from torch import Tensor


class RowState(Protocol):
    """What a drafter sees of the device's rows: tokens [R, L] int32, of which the first length [R] (int64) are known.
    parents [R, most] int64, if drafts are trees: the parent of each draft, as 1 + the number of an earlier draft, or 0
    for the newest token."""

    tokens: Tensor
    length: Tensor
    parents: Tensor


@dataclass(slots=True)
class Drafting:
    """What a DeviceDrafter works with after a step's sampling.

    `row_list`, `row_ids` [S]: the rows that get `count` drafts each; none has more than `longest` known tokens, the
    newest included. places(): [S], the places in the step's batch of the tokens that the rows' newest tokens were
    sampled from. samples(): the tokens [S, W] that were sampled before a row's tried drafts and behind each of them,
    wrong ones included; how many these are [S]; and how many became known tokens [S].
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
    (The context of a recorded step may have more tokens, which are the spare row's.)"""

    ctx: ForwardContext
    hidden: Tensor


class DeviceDrafter(Protocol):
    """Guesses the next tokens on the device, without waiting for it. Runs right after sampling."""

    most: int
    """How many drafts may lie behind a row's known tokens."""

    levels: int
    """How deep its drafts are if they are trees (it then leaves their parents beside them); 0: drafts are chains."""

    follows: bool
    """It keeps something for every position (K/V, in pages of its own) and must be shown positions that it has not
    seen."""

    def bind(self, rows: Any, pool: Any) -> None:
        """Receive the rows and the cache to work on, once they exist."""
        ...

    def warm(self) -> None:
        """Compile and record ahead what can be."""
        ...

    catches_up: str
    """How it takes in tokens of a row that it has missed: from there ("on"); by seeing every token of the row again,
    because it keeps states, which rows do not share ("anew"); or not at all ("")."""

    def follow(self, spans: list[tuple[int, int, int]], seen: Seen) -> None:
        """Take in known tokens: (row, first position, how many), each row once. Also called in every step in which
        drafts are left behind."""
        ...

    def propose(self, step: Drafting) -> None:
        """Leave `step.count` drafts behind the known tokens of each of its rows."""
        ...

    def forget_weights(self) -> None:
        """Weights were changed in place."""
        ...
