"""Short steps in which rows compute several tokens. Owns: two layouts of them, and what their recordings compute.

Text that a grammar forces, drafts and short prompts make a step ragged. On a GPU (`RaggedMembers`) a recording begins
at rows and at how many tokens each computes. The spare row is its last member and computes the tokens that are missing
to a rung. On a CPU (`RaggedTokens`) a recording depends on one number: how many tokens there are. It has as many
sequences; the first ones are the rows, the others are empty. Keys and values are read once for all tokens of a row.
Nodes of trees are sequences of their own, each of which ends with it.
Must not know: sampling, the scheduler, how steps are recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, Kernels, Paths
from tokenmill.compute.model import CausalLM
from tokenmill.core.step import StepPlan
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import Batch, Spans, apart, lay_out, places_left, reach, single_tokens
from tokenmill.runner.recorder import Layout, Made, Step, logits_suffice
from tokenmill.runner.rows import FAR, Rows
from tokenmill.runner.trees import climb_trees
from tokenmill.runner.words import logits_of, words_of
from tokenmill.sampling.arrays import send
from tokenmill.sampling.choose import find_largest

TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rungs of tokens. A larger step keeps a GPU busy for longer than the host needs to launch it."""
MEMBERS = (8, 64)
"""Rungs of rows below all of them, the spare row included; kernels find out by themselves which rows have work. The
first is for few tokens, where rows without work would be felt."""
WORK = 1 << 20
"""Tokens times positions read. Above it, the attention kernels for long chunks are worth their launches."""
MOST_TOKENS = 64
"""Most tokens of a native tape. With more tokens the products take longer than the overhead that a tape saves."""
MOST_OF_A_ROW = 16
"""Above it, laying out keys once for all of a row's tokens saves more than a recording does."""
ROOM = 64 << 20
"""Bytes that the temporary tensors of a native tape may take, and bytes that all recorded heads may take together."""


class RaggedMembers(Layout[tuple[int, int, bool]]):
    """Layout for CUDA graphs. A key has the rung of tokens, the rung of rows, and whether rows have adapters."""

    def __init__(self, model: CausalLM, kernels: Kernels, rows: Rows, pool: KVPool) -> None:
        super().__init__(model, kernels, rows, pool)
        self.tokens = [n for n in TOKENS if n <= rows.max_len]  # the spare row may compute them all
        most = rows.spare + 1
        self.members = [n for n in MEMBERS if 2 * n <= most] + [most]
        self.packed = {n: torch.empty((2, n), dtype=torch.int64, device=rows.device) for n in self.members}
        self.left: dict[int, Tensor] = {}
        """By rung of tokens: where the state behind each token is left."""

    def takes(self, plan: StepPlan) -> bool:
        """Is it a short step in which some row computes several tokens, and are only logits needed?"""
        rows, total, size = self.rows, plan.num_tokens, self.pool.layout.block_size
        return (
            len(plan.rows) < total <= (self.tokens[-1] if self.tokens else 0)
            and not plan.nodes
            and len(plan.rows) < self.members[-1]
            and logits_suffice(rows, plan)
            and rows.contiguous(plan.rows)
            and all(total * reach(plan, rows, g, size) <= WORK for g in range(len(rows.tables)))
        )

    def key(self, plan: StepPlan) -> tuple[int, int, bool]:
        """The rung of tokens, the rung of rows, and whether rows have adapters."""
        tokens = self.tokens[bisect_left(self.tokens, plan.num_tokens)]
        rungs = self._rungs(tokens)
        return tokens, rungs[bisect_left(rungs, len(plan.rows) + 1)], self.rows.adapted(plan.rows)

    def _rungs(self, tokens: int) -> list[int]:
        """The rungs of rows of so many tokens."""
        return self.members if tokens == TOKENS[0] else self.members[1:] or self.members

    def fill(self, key: tuple[int, int, bool], plan: StepPlan | None) -> None:
        """Write the rows and how many tokens each computes; the spare row fills up both to their rungs."""
        tokens, members, _ = key
        rows, counts = (plan.rows, plan.counts) if plan is not None else ([], [])
        spare = members - len(rows)
        wanted = [rows + [self.rows.spare] * spare, counts + [0] * (spare - 1) + [tokens - sum(counts)]]
        self.packed[members].copy_(send(torch.tensor(wanted, dtype=torch.int64), self.rows.device))
        states, missing = self.pool.states, tokens - sum(counts)
        if states is not None and states.trail:
            if tokens not in self.left:
                self.left[tokens] = torch.empty(tokens, dtype=torch.int64, device=self.rows.device)
            known = [] if plan is None else places_left(plan, states.first)
            places = known + ([-1] * (missing - 1) + [self.rows.spare] if missing else [])
            self.left[tokens].copy_(send(torch.tensor(places, dtype=torch.int64), self.rows.device))

    def computing(self, key: tuple[int, int, bool]) -> Callable[[], Made]:
        """Computes from rows and counts to hidden states."""
        rows, (tokens, members, adapted) = self.rows, key
        kinds = [(table.shape[1], False) for table in rows.tables]

        def compute() -> Made:
            packed, size, left = self.packed[members], (tokens, tokens), self.left.get(tokens)
            ids, token_rows, ctx = lay_out(
                rows, self.pool, self.kernels, packed, size, kinds, adapted=adapted, left=left
            )
            return Made(ids, token_rows, self.model.forward(ids, ctx), ctx)

        return compute

    def step(self, key: tuple[int, int, bool], plan: StepPlan, made: Made) -> Step:
        """The part of the results that belongs to the plan's rows."""
        count, total, packed = len(plan.rows), plan.num_tokens, self.packed[key[1]]
        batch = Batch(
            plan, made.tokens[:total], packed[0, :count], packed[1, :count], made.token_rows[:total],
            list(accumulate(plan.counts)), made.ctx,
        )  # fmt: skip
        return Step(batch, made.hidden[:total])

    def adapted(self, key: tuple[int, int, bool]) -> bool:
        """Do steps of this key have adapters?"""
        return key[2]

    def ahead(self) -> Iterator[tuple[int, int, bool]]:
        """Every rung of tokens with its rungs of rows, but for all rows of a large engine."""
        for tokens in reversed(self.tokens):
            for members in (n for n in self._rungs(tokens) if n <= 2 * MEMBERS[-1]):
                for adapted in self.kinds:
                    yield tokens, members, adapted


Key = tuple[int, bool, int, bool, bool]
"""The number of tokens, whether rows have adapters, the number of rows if rows have states (0 if not), whether some
rows try trees, whether every token is sampled behind."""


class RaggedTokens(Layout[Key]):
    """Layout for native tapes. Each token is given as its row and its distance from the row's next token.

    States pass from token to token, so recurrent layers need the rows' borders. Nodes of trees also have depths and
    paths. If every token is sampled behind (a step that tries drafts), the recording goes on to the most likely tokens;
    if each row is sampled once, a recording of so many lines' logits follows."""

    def __init__(self, model: CausalLM, kernels: Kernels, rows: Rows, pool: KVPool) -> None:
        super().__init__(model, kernels, rows, pool)
        self.packed: dict[int, Tensor] = {}
        self.filled: dict[int, tuple[list[int], list[int]]] = {}
        """By the number of tokens: the rows and counts that lie in `packed` (and in `members`)."""
        self.grants: dict[int, tuple[list[int], Tensor]] = {}
        """By the number of tokens: the last grants' ends, and their rows and counts."""
        self.members: dict[int, tuple[Tensor, Tensor]] = {}
        """By the number of tokens, for steps without trees: the row of each sequence and its last token's distance from
        the row's next one; the sequences' borders."""
        self.paths: dict[int, Paths] = {}
        """By the number of tokens: the paths of steps with trees."""
        self.recurring: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        """By the numbers of tokens and rows: the rows, their borders, and where the state behind each token is left."""
        row_bytes = 40 * model.spec.hidden_size * len(model.spec.kv_specs) + 8 * sum(t.shape[1] for t in rows.tables)
        self.most = min(MOST_TOKENS, ROOM // row_bytes)
        self.room_bytes = self.most * row_bytes
        self.heads = HeadTapes(model, kernels)
        self.most_sampled = self.room_bytes // (row_bytes + self.heads.line_bytes) if model.spec.ends[1] else 0
        """Most tokens of a recording that goes on to the most likely tokens."""

    def takes(self, plan: StepPlan) -> bool:
        """Is it a short step with contiguous tables in which some row computes several tokens, and are only logits
        needed?"""
        return (
            len(plan.rows) < plan.num_tokens <= self.most
            and max([0, *(n for i, n in enumerate(plan.counts) if i not in plan.nodes)]) <= MOST_OF_A_ROW
            and logits_suffice(self.rows, plan)
            and self.rows.contiguous(plan.rows)
        )

    def key(self, plan: StepPlan) -> Key:
        """See Key."""
        states, tokens = len(plan.rows) if self.pool.states is not None else 0, plan.num_tokens
        every = bool(plan.guesses) and tokens <= self.most_sampled and self._samples_all(plan)
        return tokens, self.rows.adapted(plan.rows), states, bool(plan.nodes), every

    @staticmethod
    def _samples_all(plan: StepPlan) -> bool:
        """Is every token sampled behind?"""
        return all(plan.samples) and all(n == 1 + plan.tried(i) for i, n in enumerate(plan.counts))

    def fill(self, key: Key, plan: StepPlan | None) -> None:
        """Write each token's row and place."""
        assert plan is not None, "nothing is recorded ahead"
        packed, wanted = self.packed.get(key[0]), (plan.rows, plan.counts)
        if packed is None:
            packed = self.packed[key[0]] = torch.zeros((3, key[0]), dtype=torch.int64)
        if key[3] or self.filled.get(key[0]) != wanted:
            self.filled.pop(key[0], None)  # what fails half-way is written again
            self.grants[key[0]] = list(accumulate(plan.counts)), torch.tensor(wanted)
            members = [row for row, n in zip(plan.rows, plan.counts, strict=True) for _ in range(n)]
            places = [k for n in plan.counts for k in range(n)]
            packed.copy_(torch.tensor([members, places, places]))
            if key[3]:
                self._fill_paths(key[0], plan)
            else:
                self._fill_members(key[0], plan)
                self.filled[key[0]] = wanted
        if self.pool.states is not None:
            tokens, count = key[0], key[2]
            if (tokens, count) not in self.recurring:
                made = torch.zeros(count, dtype=torch.int64), torch.zeros(count + 1, dtype=torch.int32)
                self.recurring[tokens, count] = *made, torch.zeros(tokens, dtype=torch.int64)
            rows, borders, left = self.recurring[tokens, count]
            rows.copy_(torch.tensor(plan.rows))
            borders.copy_(torch.tensor([0, *accumulate(plan.counts)]))
            left.copy_(torch.tensor(places_left(plan, self.pool.states.first)))

    def _fill_members(self, tokens: int, plan: StepPlan) -> None:
        """Write the rows as sequences, then empty ones of the spare row."""
        if tokens not in self.members:
            made = torch.zeros((2, tokens), dtype=torch.int64), torch.zeros(tokens + 1, dtype=torch.int32)
            self.members[tokens] = made
        given, borders = self.members[tokens]
        empty = tokens - len(plan.rows)
        lasts = [n - 1 for n in plan.counts]
        given.copy_(torch.tensor([plan.rows + [self.rows.spare] * empty, lasts + [0] * empty]))
        borders.copy_(torch.tensor([0, *accumulate(plan.counts), *[tokens] * empty]))

    def _fill_paths(self, tokens: int, plan: StepPlan) -> None:
        """Write the depth and the ancestors of each node of a tree; other tokens have no root."""
        if tokens not in self.paths:
            places = torch.zeros((tokens, self.rows.levels + 1), dtype=torch.int32)
            self.paths[tokens] = Paths(torch.zeros(tokens, dtype=torch.int64), places)
        paths, (row_ids, found) = self.paths[tokens], climb_trees(plan, self.rows)
        paths.roots.fill_(FAR)
        for g, i in enumerate(plan.nodes):
            end, count = sum(plan.counts[: i + 1]), plan.counts[i]
            paths.roots[end - count : end] = self.rows.computed[row_ids[g]]
            paths.places[end - count : end] = found.places[g, :count]
            self.packed[tokens][2, end - count : end] = found.depth[g, :count]

    def computing(self, key: Key) -> Callable[[], Made]:
        """Computes from tokens' places to hidden states, or to the most likely tokens."""
        packed, adapted = self.packed[key[0]], key[1]
        recurring = self.recurring.get((key[0], key[2]))
        starts = apart(self.rows.computed[packed[0]] + packed[2] + 1)
        paths, rows, size = self.paths.get(key[0]), self.rows, self.pool.layout.block_size
        spans = [] if key[3] else self._spans(key[0])

        def compute() -> Made:
            tokens, ctx = single_tokens(
                self.kernels, self.rows, self.pool, packed[0], starts, packed[1], adapted=adapted
            )
            if key[3]:  # nodes do not lie at the positions that they stand at
                found = self.kernels.gather_rows(packed[0], rows.tokens, rows.computed, [], size, packed[2])
                groups = [replace(group, paths=paths) for group in ctx.groups]
                ctx = replace(ctx, positions=found[1], kv_len=found[2], groups=groups)
            else:
                ctx = self._together(key[0], ctx, spans)
            if recurring is not None and ctx.rows is not None:
                whose, borders, left = recurring
                ctx = replace(ctx, rows=replace(ctx.rows, sequences=whose, borders=borders, left=left))
            made = Made(tokens, packed[0], self.model.forward(tokens, ctx), ctx)
            if key[4]:
                made.logits = logits_of(self.model, self.kernels, made.hidden, ctx)
                made.best = find_largest(made.logits, self.kernels, words_of(self.model, self.kernels))
            return made

        return compute

    def _spans(self, tokens: int) -> Spans:
        """The sequences of a step without trees as host integers, without the empty ones."""
        given, borders = self.members[tokens]
        lengths, starts = (self.rows.computed[given[0]] + given[1] + 1).tolist(), borders.tolist()
        return [(a, b - a, n) for a, b, n in zip(starts, starts[1:], lengths, strict=False) if b > a]

    def _together(self, tokens: int, ctx: ForwardContext, spans: Spans) -> ForwardContext:
        """The context in which all tokens of a row are one sequence; `ctx` has one for each token."""
        rows, (given, borders) = self.rows, self.members[tokens]
        found = self.kernels.gather_rows(
            given[0], rows.tokens, rows.computed, rows.tables, self.pool.layout.block_size, given[1]
        )
        groups = [
            replace(group, tables=table, entries=entries)
            for group, (table, entries, _) in zip(ctx.groups, found[3], strict=True)
        ]
        whose = None if ctx.rows is None else replace(ctx.rows, sequences=given[0])
        return replace(
            ctx, query_start=borders, kv_len=found[2], max_query=tokens, groups=groups, rows=whose, spans=spans
        )

    def step(self, key: Key, plan: StepPlan, made: Made) -> Step:
        """The hidden states, and the logits if each row is sampled once or every token is."""
        ends, given = self.grants[key[0]]
        batch = Batch(plan, made.tokens, given[0], given[1], made.token_rows, ends, made.ctx)
        batch.sequence = torch.arange(key[0]) if key[3] else None
        if key[4]:
            return Step(batch, made.hidden, made.logits, made.best)
        lines = None
        if not self.model.spec.ends[1] or not all(plan.samples):
            pass
        elif not plan.guesses:
            lines = ends
        elif self._samples_all(plan):
            lines = list(range(1, key[0] + 1))
        return Step(batch, made.hidden, None if lines is None else self.heads.logits(made, lines))

    def simplify(self) -> bool:
        """Leave out logits: what lies between the head and the logits may be all that prevents a recording."""
        could, self.most_sampled = self.most_sampled > 0, 0
        return could

    def adapted(self, key: Key) -> bool:
        """Do steps of this key have adapters?"""
        return key[1]

    def forget_adapted(self) -> None:
        """Drop recorded heads of steps with adapters."""
        for key in [key for key in self.heads.made if key[1]]:
            del self.heads.made[key]


class HeadTapes:
    """Native tapes of logits alone, by the number of lines."""

    def __init__(self, model: CausalLM, kernels: Kernels) -> None:
        self.model = model
        self.kernels = kernels
        self.made: dict[tuple[int, bool], tuple[Tensor, Tensor | None, Tensor, Callable[[], None]] | None] = {}
        self.line_bytes = 6 * model.spec.vocab_size
        self.left = ROOM

    def logits(self, made: Made, ends: list[int]) -> Tensor | None:
        """Logits [S, V] of the tokens before these ends; None: there is no recording for so many lines (yet)."""
        count, rows = len(ends), made.ctx.rows
        slots = None if rows is None else rows.adapters
        key = count, slots is not None
        if key not in self.made:
            self.made[key] = None
            return None
        lines, found = torch.tensor([end - 1 for end in ends]), self.made[key]
        if found is not None:
            given, whose, logits, replay = found
            torch.index_select(made.hidden, 0, lines, out=given)
            if slots is not None:
                torch.index_select(slots, 0, lines, out=whose)
            replay()
            return logits
        if self.left < count * self.line_bytes:
            return None
        given, ctx = made.hidden[lines], made.ctx.of(lines)
        whose = None if ctx.rows is None else ctx.rows.adapters
        logits, again = self.kernels.record(lambda: logits_of(self.model, self.kernels, given, ctx))
        if again is None:
            self.left = 0
        else:
            self.made[key] = given, whose, logits, again
            self.left -= count * self.line_bytes
        return logits
