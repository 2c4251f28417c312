"""Steps of one token a row. Owns: which steps these are, their inputs, and what a recording of them computes.

A recording begins at row numbers and ends at logits. It derives tokens, positions and slots from the rows' state, so a
replay needs no other input. On a GPU steps are filled up to the next rung with the spare row. On a CPU every count of
rows is a key of its own, and greedy tokens are chosen within the recording.
Must not know: sampling, the scheduler, how steps are recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tokenmill.compute.forward import Kernels
from tokenmill.compute.model import CausalLM
from tokenmill.core.step import StepPlan
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import Batch, apart, share_prefix, single_tokens
from tokenmill.runner.recorder import Layout, Made, Step, logits_suffice
from tokenmill.runner.rows import Rows
from tokenmill.runner.words import logits_of, words_of
from tokenmill.sampling.arrays import send
from tokenmill.sampling.choose import find_largest
from tokenmill.sampling.quick import compile_choices

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 16), 288, 320, 384, 512, 640, 768, 896, 1024)
"""Row counts that steps are filled up to. There are few large ones: products of 512 rows were faster than of 416 or
448."""
SHARED_LADDER = (8, 16, 32, *range(64, 1025, 64))
"""Rungs of steps whose rows share a prefix. There are fewer, because they are recorded in addition to the others."""
ADAPTED_LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 96, *range(128, 1025, 64))
"""Rungs of steps with adapters. There are fewer, because start-up records them in addition to those without."""
MOST_ROWS = 32
"""Most rows of a native tape. With more rows the products take longer than the overhead that a tape saves."""
ROOM = 64 << 20
"""Bytes that the temporary tensors of a native tape may take."""
Key = tuple[int, tuple[bool, ...], tuple[bool, ...], bool]
"""Row count, which KV groups have shifted tables, which share a prefix, whether rows have adapters."""


class SingleTokens(Layout[Key]):
    """Layout of steps in which each row computes and samples one token. exact: there are no rungs (for native
    tapes)."""

    def __init__(self, model: CausalLM, kernels: Kernels, rows: Rows, pool: KVPool, *, exact: bool) -> None:
        super().__init__(model, kernels, rows, pool)
        self.exact = exact
        self.ladder = [n for n in LADDER if n < rows.spare] + [rows.spare]
        self.shared_ladder = [n for n in self.ladder if n in SHARED_LADDER or n == rows.spare]
        self.adapted_ladder = [n for n in self.ladder if n in ADAPTED_LADDER or n == rows.spare]
        self.row_bytes = 6 * model.spec.vocab_size + 30 * model.spec.hidden_size * len(model.spec.kv_specs)
        self.to_logits = self.ends = model.spec.ends[1]
        self.row_ids: dict[int, Tensor] = {}
        self.filled: dict[int, list[int]] = {}
        self.ones = torch.ones(rows.spare, dtype=torch.int64, device=rows.device)
        self.lasts: dict[int, tuple[list[int], Tensor]] = {}
        """By the number of rows: where each row's tokens end, and how many it computes."""

    def takes(self, plan: StepPlan) -> bool:
        """Does each row compute and sample one token, and are only logits needed?"""
        rows = self.rows
        return (
            len(plan.rows) == plan.num_tokens
            and len(plan.rows) <= rows.spare
            and all(plan.samples)
            and logits_suffice(rows, plan)
            and (not self.exact or rows.contiguous(plan.rows))
        )

    def key(self, plan: StepPlan) -> Key:
        """The rung and the kinds of tables; a tape takes only steps with plain tables and uses no shared prefix."""
        if self.exact:
            return len(plan.rows), (), (), self.rows.adapted(plan.rows)
        shared = tuple(share_prefix(self.rows, g, plan.rows) for g in range(len(self.rows.tables)))
        adapted = self.rows.adapted(plan.rows)
        rungs = self._rungs(any(shared), adapted)
        rung = rungs[bisect_left(rungs, len(plan.rows))]
        return rung, self.rows.moved_or_may(plan.rows), shared, adapted

    def _rungs(self, shared: bool, adapted: bool) -> list[int]:
        """The rungs of steps of this kind; if all steps run as adapted ones, these have the full ladder."""
        if shared:
            return self.shared_ladder
        return self.adapted_ladder if adapted and len(self.kinds) > 1 else self.ladder

    def fill(self, key: Key, plan: StepPlan | None) -> None:
        """Write the rows' numbers, then the spare row's up to the rung."""
        rung, wanted = key[0], plan.rows if plan is not None else []
        row_ids = self.row_ids.get(rung)
        if row_ids is None:
            row_ids = self.row_ids[rung] = torch.full((rung,), self.rows.spare, device=self.rows.device)
        if self.filled.get(rung) != wanted:
            self.filled.pop(rung, None)  # what fails half-way is written again
            padded = wanted + [self.rows.spare] * (rung - len(wanted))
            row_ids.copy_(send(torch.tensor(padded, dtype=torch.int64), self.rows.device))
            self.filled[rung] = list(wanted)

    def computing(self, key: Key) -> Callable[[], Made]:
        """Computes from row numbers to logits, or to hidden states if what follows these cannot be recorded."""
        row_ids = self.row_ids[key[0]]
        starts = apart(self.rows.computed[row_ids] + 1)

        def compute() -> Made:
            tokens, ctx = single_tokens(
                self.kernels, self.rows, self.pool, row_ids, starts, kinds=(key[1], key[2]), adapted=key[3]
            )
            made = Made(tokens, row_ids, self.model.forward(tokens, ctx), ctx)
            if self.to_logits:
                made.logits = logits_of(self.model, self.kernels, made.hidden, ctx)
                if self.exact:
                    made.best = find_largest(made.logits, self.kernels, words_of(self.model, self.kernels))
            return made

        return compute

    def step(self, key: Key, plan: StepPlan, made: Made) -> Step:
        """The part of the results that belongs to the plan's rows."""
        count, row_ids, tokens, hidden, logits = len(plan.rows), made.token_rows, made.tokens, made.hidden, made.logits
        if logits is None and self.ends:
            logits = logits_of(self.model, self.kernels, hidden, made.ctx)
        if count < key[0]:
            row_ids, tokens, hidden = row_ids[:count], tokens[:count], hidden[:count]
            logits = None if logits is None else logits[:count]
        last = self.lasts.get(count)
        if last is None:
            last = self.lasts[count] = list(range(1, count + 1)), self.ones[:count]
        batch = Batch(plan, tokens, row_ids, last[1], row_ids, last[0], made.ctx)
        return Step(batch, hidden, logits, made.best)

    def keeps(self, key: Key) -> bool:
        """Are there few rows, and do their tensors fit into the room?"""
        return key[0] <= MOST_ROWS and key[0] * self.row_bytes <= ROOM

    def ahead(self) -> Iterator[Key]:
        """Every rung with every kind of adapters and shared prefixes; tables as recorded steps first see them."""
        no, shares = (False,) * len(self.rows.tables), (True,) * len(self.rows.tables)
        moved = self.rows.may_shift
        for rung in reversed(self.ladder):
            for adapted in self.kinds:
                for kind in (no, shares):
                    if rung in self._rungs(kind is shares, adapted):
                        yield rung, moved, kind, adapted

    def adapted(self, key: Key) -> bool:
        """Do steps of this key have adapters?"""
        return key[3]

    def follow(self, key: Key, made: Made) -> None:
        """Compile the ways to choose tokens and to advance rows. It uses the spare row, which is reset afterwards."""
        if any(key[2]) or made.logits is None:
            return
        rows, row_ids = self.rows, self.row_ids[key[0]]
        compile_choices(made.logits, row_ids, rows.sampling, self.kernels)
        if key[0] == self.ladder[0]:
            one = row_ids[:1]
            self.kernels.advance_(one, torch.zeros_like(one), rows.tokens, rows.length, rows.computed)
            rows.length[rows.spare] = 0
            rows.computed[rows.spare] = 0

    def simplify(self) -> bool:
        """Leave out logits: what lies between the head and the logits may be all that prevents a recording."""
        could, self.to_logits = self.to_logits, False
        return could
