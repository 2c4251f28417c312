"""What crosses from the scheduler to the devices and back. Owns: StepPlan, StepResult and their parts.

Integers only, msgspec-serialisable; the same message serves one process, tensor-parallel ranks and other machines.
A plan carries changes: every worker applies it, in order, to its own copy of the rows.

    a row's life:   start ──► grants ... ──► ended      (preempted = ended; resumed = started again)
    within a plan:  ended → loads → starts → table edits → jumps → restores → copies → appended, drafts → grants
                    → sampling → saves → follows → new drafts

A fork (beams, n samples) is a start whose table shares blocks; a block that two rows would write is copied first.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.core.samplers import SamplerFields


class RowSampling(SamplerFields, kw_only=True, omit_defaults=True):
    """Sampling parameters of one row, as the devices need them; the defaults switch everything off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_breakers: list[tuple[list[int], list[int]]] = msgspec.field(default_factory=list)
    order: list[str] | None = None
    """The names of the steps from temperature on, if they are not in the usual order; only these steps are taken."""
    seed: int = 0
    min_tokens: int = 0
    end_ids: list[int] = msgspec.field(default_factory=list)
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    allowed_ids: list[int] | None = None
    bad_words: list[list[int]] = msgspec.field(default_factory=list)
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    num_candidates: int = 0
    has_processors: bool = False

    @property
    def forbids(self) -> bool:
        """May some token be forbidden, even one that a grammar forces?"""
        banned = self.allowed_ids is not None or self.no_repeat_ngram_size > 0 or bool(self.bad_words)
        return banned or self.has_processors


class TableEdit(msgspec.Struct, gc=False):
    """Change one row's block table in one KV group: drop `drop` leading entries, then write `blocks` from `at` on.

    `first[i]` is the first token position that `blocks[i]` holds; an entry's index does not give its position.
    `at` counts entries after the drop. The table ends after the last written entry.
    """

    row: int
    group: int
    drop: int
    at: int
    blocks: list[int]
    first: list[int]


class RowStart(msgspec.Struct, kw_only=True):
    """A row begins, or is sent again whole: everything that a worker must know about it, except its tables."""

    row: int
    tokens: list[int]
    num_prompt: int
    computed: int
    sampling: RowSampling
    adapter: int = 0
    """The slot of its adapter; 0: it has none."""
    pool: str | None = None
    mu: float | None = None
    """Mirostat's state behind these tokens; None: none has been sampled yet."""


class BlockCopy(msgspec.Struct, gc=False):
    """Copy block `src` to block `dst` in one KV group, before this step writes K/V."""

    group: int
    src: int
    dst: int


class StateSave(msgspec.Struct, gc=False):
    """Keep the row's state at `position` in a snapshot slot, if this step takes the row there or past it."""

    row: int
    slot: int
    position: int


class StepPlan(msgspec.Struct, kw_only=True):
    """One step: state changes, then for each i: compute `counts[i]` tokens of row `rows[i]`.

    A grant covers positions [computed, computed + count) of its row, where the row itself knows `computed`.
    The last `guesses[i]` of them are unverified drafts: `drafts[i]` if the host made them, otherwise what a
    DeviceDrafter left behind the row's known tokens. If the drafts are a tree, the last `nodes[i]` tokens are its
    drafts, of which at most `guesses[i]` may stand.
    `appended[row]`: tokens that the host adds first.
    `restores`: (row, slot) of rows that start or jump, whose states come from a snapshot slot.
    `samples[i]`: does the grant reach the end of the known tokens, so that tokens are sampled?
    `follows`: (row, first position, count) of tokens that a DeviceDrafter with K/V of its own has not seen and that are
    known by the end of this step.
    `proposes`: indices of the grants behind whose samples the DeviceDrafter leaves `depth` new drafts each. Drafts of
    rows with LateInputs come back with the result, because the host decides which of them may be tried.
    `jumps`: (row, computed) of rows that got positions from the prefix cache in mid-prompt.
    `late`: rows with LateInputs.
    `loads`: (slot, adapter) of adapters that starting rows need.
    After a failed plan every later plan of the same epoch fails, too; a new epoch ends every row.
    """

    id: int
    epoch: int = 0
    ended: list[int] = []
    loads: list[tuple[int, int]] = []
    starts: list[RowStart] = []
    edits: list[TableEdit] = []
    copies: list[BlockCopy] = []
    jumps: list[tuple[int, int]] = []
    restores: list[tuple[int, int]] = []
    saves: list[StateSave] = []
    appended: dict[int, list[int]] = {}
    guesses: dict[int, int] = {}
    nodes: dict[int, int] = {}
    drafts: dict[int, list[int]] = {}
    rows: list[int] = []
    counts: list[int] = []
    samples: list[bool] = []
    late: list[int] = []
    follows: list[tuple[int, int, int]] = []
    proposes: list[int] = []
    depth: int = 0

    def tried(self, i: int) -> int:
        """How many of grant i's tokens are drafts."""
        return self.nodes.get(i) or self.guesses.get(i, 0)

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(self.counts)


class LateInputs(msgspec.Struct, kw_only=True):
    """Inputs that only sampling needs, so they may be sent after their plan: by row, packed token masks (bit =
    allowed), one mask per sampled line (a row with d drafts has 1 + d of them, joined).

    `processors` are Python callables by row; they never cross a process border.
    """

    masks: dict[int, bytes] = {}
    processors: dict[int, Any] = {}


class RowLogprobs(msgspec.Struct, gc=False):
    """Logprobs for one position: ids[0] is the chosen token, the rest the most likely ones, in order."""

    ids: list[int]
    logprobs: list[float]
    rank: int


class StepResult(msgspec.Struct, kw_only=True):
    """What a step produced, by index into the plan's grants.

    `tokens[i]`: the new tokens of grant i: none if it did not sample, otherwise 1 + the number of accepted drafts.
    `branches[i]`: the logprobs of each of its candidates, if it asks for them.
    """

    plan_id: int
    tokens: list[list[int]] = []
    logprobs: dict[int, list[RowLogprobs]] = {}
    prompt_logprobs: dict[int, list[RowLogprobs]] = {}
    candidates: dict[int, list[tuple[int, float]]] = {}
    branches: dict[int, list[RowLogprobs]] = {}
    pooled: dict[int, list[float]] = {}
    mus: dict[int, float] = {}
    drafts: dict[int, list[int]] = {}
    errors: dict[int, str] = {}
    failure: str | None = None
