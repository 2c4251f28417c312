"""Decode steps as recordings. Owns: which steps can be replayed, the ladder of row counts, their fixed inputs.

A recording begins at row numbers and ends at logits: positions, tokens and slots are derived inside it from the rows'
state, so a replay needs no other input. Steps are filled up to the next rung with the spare row.
Must not know: sampling, the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.core.forward import ForwardContext, GroupPlan
from tokenmill.core.protocols import CausalLM, Kernels
from tokenmill.core.step import StepPlan
from tokenmill.device.graphs import Recorder, Recording
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import Batch, group_plan, share_prefix
from tokenmill.runner.rows import Rows
from tokenmill.sampling.quick import compile_choices
from tokenmill.sampling.table import send

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 16), 288, 320, 384, 512, 640, 768, 896, 1024)
"""Row counts that steps are filled up to. The large ones are few: 512 rows were multiplied sooner than 416 or 448."""
SHARED_LADDER = (8, 16, 32, *range(64, 1025, 64))
"""Rungs of steps whose rows share a prefix: fewer, because they are recorded beside the others."""
Key = tuple[int, tuple[bool, ...], tuple[bool, ...]]
"""Row count, which KV groups have shifted tables, which share a prefix."""


@dataclass(slots=True)
class _Made:
    tokens: Tensor
    hidden: Tensor
    logits: Tensor
    ctx: ForwardContext


@dataclass(slots=True)
class Replayed:
    """A step that has been enqueued: its batch, final hidden states [T, hidden] and, if it made them, logits."""

    batch: Batch
    hidden: Tensor
    logits: Tensor | None


def logits_suffice(rows: Rows, plan: StepPlan) -> bool:
    """Nothing but this moment's hidden states or logits is wanted: no embeddings, no logprobs of prompts."""
    params = rows.sampling.params
    return not rows.pools and all(params[row].num_prompt_logprobs < 0 for row in plan.rows)


class DecodeRecorder:
    """Replays decode steps of one model; records those that it has not seen."""

    def __init__(self, model: CausalLM, kernels: Kernels, rows: Rows, pool: KVPool) -> None:
        self.model = model
        self.kernels = kernels
        self.rows = rows
        self.pool = pool
        self.recorder = Recorder()
        self.made: dict[Key, Recording[_Made]] = {}
        self.ladder = [n for n in LADDER if n < rows.spare] + [rows.spare]
        self.shared_ladder = [n for n in self.ladder if n in SHARED_LADDER or n == rows.spare]
        self.row_ids = {n: torch.full((n,), rows.spare, device=rows.device) for n in self.ladder}
        self.possible = True
        self.filled: dict[int, list[int]] = {}
        self.ones = torch.ones(rows.spare, dtype=torch.int64, device=rows.device)

    def warm(self) -> None:
        """Record every rung, as long as steps are plain, so that no request waits for it."""
        no = (False,) * len(self.rows.tables)
        shares = (True,) * len(self.rows.tables)
        for rung in reversed(self.ladder):  # the largest first: its memory serves the others
            recording = self._find((rung, no, no))
            if recording is not None:
                choices = recording.made.logits, self.row_ids[rung], self.rows.sampling
                compile_choices(*choices, self.kernels)  # not recorded
            if rung in self.shared_ladder:
                self._find((rung, no, shares))
        self._move_spare()

    def _move_spare(self) -> None:
        """Compile what moves rows on, with the row that is nobody's; it stays where it was."""
        rows, one = self.rows, self.row_ids[self.ladder[0]][:1]
        self.kernels.advance_(one, torch.zeros_like(one), rows.tokens, rows.length, rows.computed)
        rows.length[rows.spare] = 0
        rows.computed[rows.spare] = 0

    def _find(self, key: Key) -> Recording[_Made] | None:
        """The recording of this key, made if need be; None: an operation of this model waits for the device."""
        if key not in self.made and self.possible:
            before = self.kernels.waits
            self._compute(self.row_ids[key[0]], key[1], key[2])
            self.possible = self.kernels.waits == before
            if self.possible:
                self.made[key] = self.recorder.record(lambda: self._compute(self.row_ids[key[0]], key[1], key[2]))
        return self.made.get(key)

    def fits(self, plan: StepPlan) -> bool:
        """One token for each row, sampled from each, and nothing but logits is wanted."""
        rows = self.rows
        return (
            self.possible
            and len(plan.rows) == plan.num_tokens
            and len(plan.rows) <= rows.spare
            and not plan.drafts
            and all(plan.samples)
            and logits_suffice(rows, plan)
        )

    def run(self, plan: StepPlan) -> Replayed | None:
        """Enqueue the plan's forward pass and logits; None: it cannot be recorded."""
        count = len(plan.rows)
        groups = range(len(self.rows.tables))
        shifted = tuple(not self.rows.shifted[g].isdisjoint(plan.rows) for g in groups)
        shared = tuple(share_prefix(self.rows, g, plan.rows) for g in groups)
        rungs = self.shared_ladder if any(shared) else self.ladder
        rung = rungs[bisect_left(rungs, count)]
        row_ids = self.row_ids[rung]
        if self.filled.get(rung) != plan.rows:
            self.filled[rung] = list(plan.rows)
            wanted = torch.tensor(plan.rows + [self.rows.spare] * (rung - count), dtype=torch.int64)
            row_ids.copy_(send(wanted, self.rows.device))
        recording = self._find((rung, shifted, shared))
        if recording is None:
            return None
        made = recording.replay()
        batch = Batch(
            plan, made.tokens[:count], row_ids[:count], self.ones[:count], row_ids[:count],
            list(range(1, count + 1)), made.ctx,
        )  # fmt: skip
        return Replayed(batch, made.hidden[:count], made.logits[:count])

    def _compute(self, row_ids: Tensor, shifted: tuple[bool, ...], shared: tuple[bool, ...]) -> _Made:
        rows, size = self.rows, self.pool.layout.block_size
        count = row_ids.shape[0]
        tokens, positions, kv_len, gathered = self.kernels.gather_rows(
            row_ids, rows.tokens, rows.computed, rows.tables, size
        )
        groups = []
        for g, (table, entries, slots) in enumerate(gathered):
            if shifted[g]:
                groups.append(group_plan(rows, g, (row_ids, row_ids, positions), table.shape[1], shifted=True))
            else:
                groups.append(GroupPlan(table, None, entries, slots, shared[g]))
        ctx = ForwardContext(
            kernels=self.kernels,
            positions=positions,
            query_start=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
            kv_len=kv_len,
            max_query=1,
            kv=self.pool.views,
            groups=groups,
            block_size=size,
        )
        hidden = self.model.forward(tokens, ctx)
        return _Made(tokens, hidden, self.model.logits(hidden, ctx), ctx)
