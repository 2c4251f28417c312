"""The scheduler's records. Owns: Sequence (one row's worth of text) and SequenceGroup (one request's sequences),
and how these branch (Search).

The arithmetic of a step, in one picture (d drafts, grants in flight; pending and ahead count each draft in flight as
if it were right, so they are upper bounds until the commit, and the row alone knows where it stands):

    tokens     0 ............... num_prompt ......... len(tokens)      + pending (to be sampled in flight)
    computed   |=================>|                                     committed: K/V is certain
    ahead                         |------>|                             granted in flight (upper bound)
    want = len(tokens) + pending + d - (computed + ahead)               what the next plan may grant
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tokenmill.core.step import RowLogprobs, RowSampling

if TYPE_CHECKING:
    from tokenmill.core.constraint import Constraint
    from tokenmill.core.request import Request

WAITING, RUNNING, FINISHED = 0, 1, 2
Trail = tuple["Trail | None", RowLogprobs]
"""Logprobs of positions as a linked list, the newest first: beams that diverge share their common beginning."""
NEVER = 1 << 60
"""A position that no sequence reaches."""


@dataclass(slots=True, eq=False)
class Table:
    """One sequence's block table in one KV group. `first[i]` is the first position held by `blocks[i]`.

    The devices know the first `sent` entries; they must still drop the first `dropped` entries of their copy.
    `end` is the first position that has no block yet.
    """

    blocks: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    sent: int = 0
    dropped: int = 0
    end: int = 0


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One request with its sequences (n samples or beams). It ends exactly once.

    For beams, by sequence: this step's `candidates`, and in `branches` the logprobs of each candidate. `dead_end`: why
    a beam could not go on. `scored`: how many prompt positions need no scores, or none any more. `cached`: how many of
    the prompt's tokens lay in the prefix cache. `reached`: how many of them have been computed or found there.
    `sequences`: without beams that were dropped.
    """

    request: Request
    search: Search
    sampling: RowSampling
    max_len: int
    num_outputs: int = 1
    constraint: Constraint | None = None
    embed: str | None = None
    reads_cache: bool = True
    sequences: list[Sequence] = field(default_factory=list)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    branches: dict[int, list[RowLogprobs]] = field(default_factory=dict)
    dead_end: str | None = None
    ended: set[int] = field(default_factory=set)
    spawned: bool = False
    scored: int = 0
    cached: int = 0
    reached: int = 0
    preemptions: int = 0

    def matchable(self, length: int) -> int:
        """How many of a sequence's tokens may come from the cache: at least one is computed, and so are those to be
        scored."""
        return length - 1 if self.sampling.num_prompt_logprobs < 0 else min(length - 1, self.scored)


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation that is being decoded: its tokens, how far it is computed, where its K/V lies.

    `fresh`: the next grant must send everything to the devices (RowStart). `leaving`: it is preempted when its plans in
    flight are committed. `needs_host`: its next forward pass needs the last commit (host drafts, beams). `guess_from`:
    a HostDrafter has nothing to guess behind fewer tokens. `mu`: mirostat's state behind `tokens`.
    `trail`: a beam's logprobs, the newest position first.

    With a DeviceDrafter: `most_guesses`: how many of its drafts may be granted at once. `behind`: how many lie behind
    the row's last planned sample. `told`: its drafts come back to the host, as `drafts`. `followed`: how many positions
    it has certainly seen. `in_step`: it has seen all tokens since, those that are in flight, too, but the newest.
    `hoped`: how many drafts the plans in flight try.

    If rows have states (kvcache/snapshots.py): `save_at`: the next position whose state is kept, in `save_slot` if it
    belongs to an answer. `restore`: the slot that the devices must restore. `diverges`: where other sequences with this
    beginning continued differently. `parting`: the node there, if others may wait until its state is kept. `rolled`:
    the node with the answer's last kept state. `awaits`: the node whose state it waits for before it starts.
    `starts_at`: by pool, how many blocks must have been given back before it looks for blocks again.
    """

    id: int
    index: int
    group: SequenceGroup
    tokens: list[int]
    num_prompt: int
    seed: int = 0
    rank: tuple = ()
    status: int = WAITING
    row: int = -1
    computed: int = 0
    ahead: int = 0
    pending: int = 0
    inflight: int = 0
    last_plan: int = -1
    fresh: bool = True
    jumped: bool = False
    leaving: bool = False
    needs_host: bool = False
    guess_from: int = 0
    most_guesses: int = 0
    behind: int = 0
    told: bool = False
    drafts: list[int] = field(default_factory=list)
    followed: int = 0
    in_step: bool = False
    hoped: int = 0
    tables: list[Table] = field(default_factory=list)
    capacity: int = 0
    published: int = 0
    node: object = None
    appended: list[int] = field(default_factory=list)
    constraint: Constraint | None = None
    score: float = 0.0
    trail: Trail | None = None
    preemptions: int = 0
    mu: float | None = None
    save_at: int = NEVER
    save_slot: int = -1
    restore: int = -1
    diverges: int = 0
    rolled: object = None
    parting: object = None
    awaits: object = None
    starts_at: list[int] = field(default_factory=list)

    @property
    def keys(self) -> list[int]:
        """The tokens' keys in the prefix cache: their ids, unless the request gives other keys for its prompt."""
        known = self.group.request.prompt_keys
        return self.tokens if known is None else known + self.tokens[len(known) :]

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    def reach(self, position: int, end: int) -> int:
        """Note that [position, end) is computed or found. How many of these prompt tokens the request reaches for the
        first time."""
        group, end = self.group, min(end, self.num_prompt)
        new = max(0, end - max(position, group.reached))
        group.reached = max(group.reached, end)
        return new


class Search(Protocol):
    """How the sequences of one request branch: sampling n, best_of, or beams."""

    @property
    def width(self) -> int:
        """How many candidates each row needs per step; 0: the sampler chooses and nothing branches."""
        ...

    def spawn(self, group: SequenceGroup) -> int:
        """How many sequences share the prompt once it is planned."""
        ...

    def advance(
        self, group: SequenceGroup, candidates: Mapping[int, list[tuple[int, float]]]
    ) -> list[tuple[Sequence, list[tuple[int, float]]]]:
        """Candidates by sequence id -> the children (token, score) of each live sequence. Without children it is
        dropped; the first child continues it in place, further children fork it. The search itself records sequences
        that end."""
        ...
