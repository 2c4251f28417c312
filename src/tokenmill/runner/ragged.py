"""Short steps on a CPU in which rows compute several tokens, as recordings. Owns: which steps, and the recordings.

Text that a grammar forces, drafts and the ends of prompts make a step of a small batch ragged. Attention reads keys and
values as they are stored, so each of a row's tokens may stand for a sequence of its own that ends with it: a recording
knows but one number, how many tokens there are. It begins at rows and at how far each token lies behind its row's next
one, and ends at hidden states; where each row is sampled once, a recording of so many lines' logits follows.
Must not know: sampling, the scheduler, how the backend records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tokenmill.core.forward import ForwardContext
from tokenmill.core.protocols import CausalLM, Kernels
from tokenmill.core.step import StepPlan
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import Batch, Spans, apart, single_tokens
from tokenmill.runner.direct import gathered_bytes
from tokenmill.runner.recorded import Replayed, logits_suffice
from tokenmill.runner.rows import Rows

MOST_TOKENS = 64
"""Above, products take longer than the way to them."""
MOST_OF_A_ROW = 16
"""Above, keys that are laid out once for all of a row's tokens are worth more than a recording."""
ROOM = 64 << 20
"""Bytes that the temporary tensors of a recording may take. All recordings share them: they run one after the other."""


@dataclass(slots=True)
class _Made:
    tokens: Tensor
    hidden: Tensor
    ctx: ForwardContext


class RaggedSteps:
    """Replays ragged steps of one model; records token counts that come again."""

    def __init__(self, model: CausalLM, kernels: Kernels, rows: Rows, pool: KVPool) -> None:
        self.model = model
        self.kernels = kernels
        self.rows = rows
        self.pool = pool
        self.packed: dict[int, Tensor] = {}
        self.made: dict[int, tuple[_Made, Callable[[], None]]] = {}
        row_bytes = 40 * model.spec.hidden_size * len(model.spec.kv_specs) + 4 * sum(t.shape[1] for t in rows.tables)
        self.most = min(MOST_TOKENS, ROOM // row_bytes)
        self.room_bytes = self.most * row_bytes
        self.room: Tensor | None = None
        self.heads: dict[int, tuple[Tensor, Tensor, Callable[[], None]] | None] = {}
        self.line_bytes = 6 * model.spec.vocab_size
        self.left = ROOM
        self.possible = True

    def warm(self) -> None:
        """Nothing: the first steps record themselves."""

    def fits(self, plan: StepPlan) -> bool:
        """Few tokens, some row computes several, contiguous tables, and nothing but hidden states is wanted."""
        rows, total = self.rows, plan.num_tokens
        return (
            self.possible
            and len(plan.rows) < total <= self.most
            and max(plan.counts) <= MOST_OF_A_ROW
            and logits_suffice(rows, plan)
            and rows.contiguous(plan.rows)
        )

    def run(self, plan: StepPlan) -> Replayed | None:
        """Compute the plan's hidden states; None: the first step of so many tokens, or it cannot be recorded."""
        total = plan.num_tokens
        packed = self.packed.get(total)
        if packed is None:  # the first time, weights are packed and descriptors bound
            self.packed[total] = torch.zeros((2, total), dtype=torch.int64)
            return None
        members = [row for row, n in zip(plan.rows, plan.counts, strict=True) for _ in range(n)]
        packed.copy_(torch.tensor([members, [k for n in plan.counts for k in range(n)]]))
        found = self.made.get(total)
        if found is not None:
            made, replay = found
            replay()
        else:
            made = self._make(packed)
        ends = list(accumulate(plan.counts))
        given = torch.tensor([plan.rows, plan.counts])
        batch = Batch(plan, made.tokens, given[0], given[1], packed[0], ends, made.ctx)
        one_line_each = all(plan.samples) and not plan.drafts
        return Replayed(batch, made.hidden, self._logits(made, ends) if one_line_each else None)

    def _logits(self, made: _Made, ends: list[int]) -> Tensor | None:
        """Of each row's last token [S, V]; None: so many lines are not recorded (yet)."""
        count = len(ends)
        if count not in self.heads:
            self.heads[count] = None
            return None
        lines, found = torch.tensor([end - 1 for end in ends]), self.heads[count]
        if found is not None:
            given, logits, replay = found
            torch.index_select(made.hidden, 0, lines, out=given)
            replay()
            return logits
        if self.left < count * self.line_bytes:
            return None
        given = made.hidden[lines]
        logits, again = self.kernels.record(lambda: self.model.logits(given, made.ctx))
        if again is None:
            self.left = 0
        else:
            self.heads[count] = given, logits, again
            self.left -= count * self.line_bytes
        return logits

    def _make(self, packed: Tensor) -> _Made:
        """Compute once, and keep a recording if one can be made."""
        if self.room is None:
            self.room = torch.empty(self.room_bytes, dtype=torch.uint8)
            self.room[: gathered_bytes(self.rows, packed.shape[1])].zero_()
        count = packed.shape[1]
        start, spans = apart(self.rows.computed[packed[0]] + packed[1] + 1)
        made, replay = self.kernels.record(lambda: self._compute(packed, start, spans), self.room)
        if replay is not None:
            self.made[count] = made, replay
        else:
            self.possible, self.room = False, None
        return made

    def _compute(self, packed: Tensor, start: Tensor, spans: Spans) -> _Made:
        tokens, ctx = single_tokens(self.kernels, self.rows, self.pool, packed[0], start, spans, packed[1])
        return _Made(tokens, self.model.forward(tokens, ctx), ctx)
