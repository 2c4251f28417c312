"""Short steps with prompts or drafts as recordings. Owns: which can be replayed, their rungs, their fixed inputs.

Launching a few hundred kernels one by one takes the host 20 to 50 ms, which is longer than the device computes on a
short prompt. A recording begins at rows and their counts and ends at hidden states; tokens, positions, slots and tables
are derived inside it. Steps are filled up with the spare row: what is missing to a rung of tokens is its last member.
Must not know: sampling, the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tokenmill.core.forward import ForwardContext
from tokenmill.core.protocols import CausalLM, Kernels
from tokenmill.core.step import StepPlan
from tokenmill.device.graphs import Recorder, Recording
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import Batch, lay_out, reach
from tokenmill.runner.recorded import Replayed, logits_suffice
from tokenmill.runner.rows import Rows
from tokenmill.sampling.table import send

TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rungs of tokens. A step of more keeps the device busy for longer than the host needs to launch it."""
MEMBERS = (8, 64, 1025)
"""Rungs of rows, the spare one included; kernels find by themselves which of them have what to do."""
WORK = 1 << 20
"""Tokens times positions that prompts read, from which attention by long chunks' kernels is worth their launches."""


@dataclass(slots=True)
class _Made:
    tokens: Tensor
    token_rows: Tensor
    hidden: Tensor
    ctx: ForwardContext


class ShortRecorder:
    """Replays short steps of one model; records those that it has not seen."""

    def __init__(self, model: CausalLM, kernels: Kernels, rows: Rows, pool: KVPool, recorder: Recorder) -> None:
        self.model = model
        self.kernels = kernels
        self.rows = rows
        self.pool = pool
        self.recorder = recorder
        self.made: dict[tuple[int, int], Recording[_Made]] = {}
        self.tokens = [n for n in TOKENS if n < rows.tokens.shape[1]]  # the spare row may get them all
        most = rows.spare + 1
        self.members = [n for n in MEMBERS if n < most] + [most]
        self.packed = {n: torch.empty((2, n), dtype=torch.int64, device=rows.device) for n in self.members}
        self.possible = True

    def warm(self) -> None:
        """Record steps of few rows, so that no request waits for it."""
        for tokens in reversed(self.tokens):  # the largest first: its memory serves the others
            self._find((tokens, self.members[0]))

    def fits(self, plan: StepPlan) -> bool:
        """Few tokens, some row computes several, and nothing but hidden states of this moment is wanted."""
        rows, total = self.rows, plan.num_tokens
        return (
            self.possible
            and len(plan.rows) < total <= (self.tokens[-1] if self.tokens else 0)
            and len(plan.rows) < self.members[-1]
            and logits_suffice(rows, plan)
            and rows.contiguous(plan.rows)
            and all(total * reach(plan, rows, g, self.pool.layout.block_size) <= WORK for g in range(len(rows.tables)))
        )

    def run(self, plan: StepPlan) -> Replayed | None:
        """Enqueue the plan's forward pass; None: it cannot be recorded."""
        count, total = len(plan.rows), plan.num_tokens
        members = self.members[bisect_left(self.members, count + 1)]
        key = self.tokens[bisect_left(self.tokens, total)], members
        recording = self._find(key)
        if recording is None:
            return None
        self._fill(key, plan.rows, plan.counts)
        packed = self.packed[members]
        made = recording.replay()
        batch = Batch(
            plan, made.tokens[:total], packed[0, :count], packed[1, :count], made.token_rows[:total],
            list(accumulate(plan.counts)), made.ctx,
        )  # fmt: skip
        return Replayed(batch, made.hidden[:total], None)

    def _fill(self, key: tuple[int, int], rows: list[int], counts: list[int]) -> None:
        """Send these rows and how many tokens each computes; the spare row makes up what is missing of both."""
        tokens, members = key
        spare = members - len(rows)
        wanted = [rows + [self.rows.spare] * spare, counts + [0] * (spare - 1) + [tokens - sum(counts)]]
        self.packed[members].copy_(send(torch.tensor(wanted, dtype=torch.int64), self.rows.device))

    def _find(self, key: tuple[int, int]) -> Recording[_Made] | None:
        """The recording of this key, made if need be; None: an operation of this model waits for the device."""
        if key not in self.made and self.possible:
            self._fill(key, [], [])
            before = self.kernels.waits
            self._compute(key)
            self.possible = self.kernels.waits == before
            if self.possible:
                self.made[key] = self.recorder.record(lambda: self._compute(key))
        return self.made.get(key)

    def _compute(self, key: tuple[int, int]) -> _Made:
        rows, (tokens, members) = self.rows, key
        kinds = [(table.shape[1], False) for table in rows.tables]
        ids, token_rows, ctx = lay_out(rows, self.pool, self.kernels, self.packed[members], (tokens, tokens), kinds)
        return _Made(ids, token_rows, self.model.forward(ids, ctx), ctx)
