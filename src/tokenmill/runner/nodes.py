"""Short steps in which rows try trees, on a GPU. Owns: their layout, and what their recordings compute.

Each token is computed as a sequence of its own, as on a CPU (`RaggedTokens`): a node of a tree with its ancestors, any
other token with what comes before it. A recording begins at each token's row and place. It derives the ancestors of
nodes from `Rows.parents`, so a drafter may still be at work when a step is enqueued. Steps are filled up to rungs with
the spare row; one rung is a single row's tree. Must not know: sampling, the scheduler, how steps are recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from tokenmill.compute.forward import Kernels, Paths
from tokenmill.compute.model import CausalLM
from tokenmill.core.step import StepPlan
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import SHARED_ENTRIES, Batch, Flags, apart, single_tokens
from tokenmill.runner.ragged import MOST_OF_A_ROW, TOKENS
from tokenmill.runner.recorder import Layout, Made, Step, logits_suffice
from tokenmill.runner.rows import FAR, Rows
from tokenmill.runner.trees import climb_each
from tokenmill.sampling.arrays import send, send_columns

Key = tuple[int, Flags, bool, bool]
"""The rung of tokens, which KV groups have shifted tables, whether all tokens are one row's, whether rows have
adapters."""


class TreeTokens(Layout[Key]):
    """Layout for CUDA graphs of steps in which some rows try trees."""

    def __init__(self, model: CausalLM, kernels: Kernels, rows: Rows, pool: KVPool) -> None:
        super().__init__(model, kernels, rows, pool)
        self.alone = 1 + rows.parents.shape[1]
        """How many tokens one row with the largest possible tree has."""
        self.rungs = sorted({self.alone, *TOKENS})
        self.packed: dict[int, Tensor] = {}
        self.every = torch.arange(self.rungs[-1], device=rows.device)

    def takes(self, plan: StepPlan) -> bool:
        """Is it a short step with trees, and are only logits needed?"""
        return (
            bool(plan.nodes)
            and plan.num_tokens <= self.rungs[-1]
            and max([0, *(n for i, n in enumerate(plan.counts) if i not in plan.nodes)]) <= MOST_OF_A_ROW
            and logits_suffice(self.rows, plan)
        )

    def key(self, plan: StepPlan) -> Key:
        """The rung and the kinds of tables."""
        rows, rung = self.rows, self.rungs[bisect_left(self.rungs, plan.num_tokens)]
        one = len(plan.rows) == 1 and plan.num_tokens == rung
        one = one and all(len(blocks[plan.rows[0]]) >= SHARED_ENTRIES for blocks in rows.blocks)
        return rung, rows.moved_or_may(plan.rows), one, rows.adapted(plan.rows)

    def fill(self, key: Key, plan: StepPlan | None) -> None:
        """Write each token's row, its place behind what the row has computed, and how deep its tree may be (-1: the
        token is in no tree)."""
        tokens, filled = key[0], []
        for i, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=True)) if plan is not None else ():
            most = plan.guesses[i] if plan is not None and i in plan.nodes else -1
            filled += [(row, place, most) for place in range(count)]
        filled += [(self.rows.spare, 0, -1)] * (tokens - len(filled))
        wanted = send_columns(filled, self.rows.device)
        if tokens not in self.packed:
            self.packed[tokens] = torch.empty_like(wanted)
        self.packed[tokens].copy_(wanted)

    def computing(self, key: Key) -> Callable[[], Made]:
        """Computes from tokens' places to hidden states."""
        rows, packed = self.rows, self.packed[key[0]]
        starts = apart(self.every[: key[0]])
        shares = (key[2],) * len(rows.tables)

        def compute() -> Made:
            row_ids, place, most = packed
            node, root = most >= 0, rows.computed[row_ids]
            found = climb_each(rows.parents[row_ids], torch.where(node, place, 0), most.clamp(min=0), rows.levels)
            tokens, ctx = single_tokens(
                self.kernels, rows, self.pool, row_ids, starts, place, kinds=(key[1], shares), adapted=key[3]
            )
            paths = Paths(torch.where(node, root, FAR), found.places.to(torch.int32))
            stands = root + torch.where(node, found.depth, place)
            groups = [replace(group, paths=paths) for group in ctx.groups]
            ctx = replace(ctx, positions=stands, kv_len=(stands + 1).to(torch.int32), groups=groups)
            return Made(tokens, row_ids, self.model.forward(tokens, ctx), ctx)

        return compute

    def step(self, key: Key, plan: StepPlan, made: Made) -> Step:
        """The part of the results that belongs to the plan's rows."""
        total = plan.num_tokens
        given = send(torch.tensor([plan.rows, plan.counts], dtype=torch.int64), self.rows.device)
        batch = Batch(
            plan, made.tokens[:total], given[0], given[1], made.token_rows[:total], list(accumulate(plan.counts)),
            made.ctx, self.every[:total],
        )  # fmt: skip
        return Step(batch, made.hidden[:total])

    def ahead(self) -> Iterator[Key]:
        """Every rung, with tables as recorded steps first see them."""
        moved = self.rows.may_shift
        for tokens in reversed(self.rungs):
            for adapted in self.kinds:
                yield tokens, moved, False, adapted
                if tokens == self.alone:
                    yield tokens, moved, True, adapted

    def follow(self, key: Key, made: Made) -> None:
        """Compile the kernels that attend to trees in steps with prompts, which are not recorded. They depend on the
        number of nodes."""
        if key[0] in (self.rungs[0], self.rungs[-1]) and not key[2]:
            self.model.forward(made.tokens, replace(made.ctx, max_query=2))

    def adapted(self, key: Key) -> bool:
        """Do steps of this key have adapters?"""
        return key[3]
