"""Decode steps on a CPU, gathered and computed natively. Owns: which steps, and the recordings of them.

After a forward pass that streamed a gigabyte, Python and torch have left the caches: each small operation costs ten
times what it costs alone. So a step of one token per row is one call from row numbers to logits, where the model
consists of native operations. Must not know: sampling, the scheduler, how the backend records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.core.forward import ForwardContext
from tokenmill.core.protocols import CausalLM, Kernels
from tokenmill.core.step import StepPlan
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import Batch, Spans, apart, single_tokens
from tokenmill.runner.recorded import Replayed, logits_suffice
from tokenmill.runner.rows import Rows

MOST_ROWS = 32
"""Above, products take longer than the way to them."""
BUDGET = 64 << 20
"""Bytes that the temporary tensors of all recordings may take."""


@dataclass(slots=True)
class Direct(Replayed):
    """A step whose most likely tokens are chosen already, as `Kernels.greedy` does."""

    best: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass(slots=True)
class _Made:
    tokens: Tensor
    hidden: Tensor
    logits: Tensor | None
    best: tuple[Tensor, Tensor, Tensor] | None
    ctx: ForwardContext


def gathered_bytes(rows: Rows, count: int) -> int:
    """More than what is gathered first for so many tokens takes, tables included. These bytes must be zeros as long as
    nobody knows whether a model can be recorded: what a backend has torch do may read entries that do not count."""
    return 4 * count * sum(table.shape[1] for table in rows.tables) + 64 * (count + 4) * (1 + len(rows.tables))


class DirectSteps:
    """Runs decode steps of one model; records row counts that come again."""

    def __init__(self, model: CausalLM, kernels: Kernels, rows: Rows, pool: KVPool) -> None:
        self.model = model
        self.kernels = kernels
        self.rows = rows
        self.pool = pool
        self.made: dict[int, tuple[_Made, Callable[[], None]]] = {}
        self.row_ids: dict[int, Tensor] = {}
        self.filled: dict[int, list[int]] = {}
        self.fixed: dict[int, tuple[Tensor, list[int]]] = {}
        self.row_bytes = 6 * model.spec.vocab_size + 30 * model.spec.hidden_size * len(model.spec.kv_specs)
        self.left = BUDGET
        self.possible: bool | None = None
        self.to_logits = True

    def warm(self) -> None:
        """Nothing: the first steps record themselves."""

    def fits(self, plan: StepPlan) -> bool:
        """One token for each row, sampled from each, contiguous tables, and nothing but logits is wanted."""
        rows = self.rows
        return (
            self.possible is not False
            and len(plan.rows) == sum(plan.counts)
            and not plan.drafts
            and all(plan.samples)
            and logits_suffice(rows, plan)
            and rows.contiguous(plan.rows)
        )

    def run(self, plan: StepPlan) -> Direct | None:
        """Compute the plan's logits; None: this model cannot be recorded."""
        count = len(plan.rows)
        row_ids = self.row_ids.get(count)
        if row_ids is None:  # the first time, weights are packed and descriptors bound
            self.row_ids[count], self.filled[count] = torch.tensor(plan.rows), list(plan.rows)
            self.fixed[count] = torch.ones(count, dtype=torch.int64), list(range(1, count + 1))
            return None
        if self.filled[count] != plan.rows:
            self.filled[count] = list(plan.rows)
            row_ids.copy_(torch.tensor(plan.rows))
        found = self.made.get(count)
        if found is not None:
            made, replay = found
            replay()
        else:
            made = self._make(row_ids)
        ones, ends = self.fixed[count]
        batch = Batch(plan, made.tokens, row_ids, ones, row_ids, ends, made.ctx)
        logits = self.model.logits(made.hidden, made.ctx) if made.logits is None else made.logits
        return Direct(batch, made.hidden, logits, made.best)

    def _make(self, row_ids: Tensor) -> _Made:
        """Compute once, and keep a recording if one can be made and there is room for it."""
        count = row_ids.shape[0]
        start, spans = apart(self.rows.computed[row_ids] + 1)
        room = self.row_bytes * count
        kept = count <= MOST_ROWS and room <= self.left
        if self.possible and not kept:
            return self._compute(row_ids, start, spans)
        zeros = None
        if self.possible is None:
            zeros = torch.zeros(gathered_bytes(self.rows, count), dtype=torch.uint8)
        made, replay = self.kernels.record(lambda: self._compute(row_ids, start, spans), zeros)
        if replay is None and self.to_logits:
            self.to_logits = False  # what lies between the head and the logits may be all that is in the way
        else:
            self.possible = replay is not None
        if kept and replay is not None:
            self.made[count] = made, replay
            self.left -= room
        return made

    def _compute(self, row_ids: Tensor, start: Tensor, spans: Spans) -> _Made:
        tokens, ctx = single_tokens(self.kernels, self.rows, self.pool, row_ids, start, spans)
        hidden = self.model.forward(tokens, ctx)
        if not self.to_logits:
            return _Made(tokens, hidden, None, None, ctx)
        logits = self.model.logits(hidden, ctx)
        return _Made(tokens, hidden, logits, self.kernels.greedy(logits), ctx)
