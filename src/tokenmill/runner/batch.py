"""One step's tensors. Owns: gathering rows into token ids, positions, slots and a ForwardContext.

Must not know: models, sampling, the scheduler. Positions come from the rows (the device knows how far it is), so a
batch can be made while the step before it still runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, GroupPlan, Kernels, KVView, Paths, StepRows
from tokenmill.core.step import StepPlan
from tokenmill.kvcache.pool import CacheLayout, KVPool
from tokenmill.runner.rows import Rows
from tokenmill.sampling.arrays import send

Spans = list[tuple[int, int, int]]
"""(query_start, query count, kv_len) of each sequence, as in ForwardContext."""
Flags = tuple[bool, ...]
"""One for each KV group; () stands for none."""
SHARED_ENTRIES = 8
"""Telling the kernels that all rows share a prefix pays off from so many equal leading table entries on."""


class Placed(Protocol):
    """What a step's tensors are derived from: the rows, or a drafter's view of them (drafter_rows.py)."""

    tokens: Tensor
    computed: Tensor
    tables: list[Tensor]
    first: list[Tensor]
    held: list[Tensor]
    layout: CacheLayout
    device: torch.device

    @property
    def adapters(self) -> Tensor | None:
        """Each row's adapter slot; None if there can be no adapters."""
        ...


class Paged(Protocol):
    """Where keys, values and states lie."""

    views: list[KVView]
    state_views: list[tuple[Tensor, ...]]
    layout: CacheLayout


@dataclass(slots=True)
class Batch:
    """One step's tensors: tokens [T]; `row_ids` [S] and `counts` [S] on the device; `ends[i]`: index after grant i's
    last token."""

    plan: StepPlan
    tokens: Tensor
    row_ids: Tensor
    counts: Tensor
    token_rows: Tensor
    ends: list[int]
    ctx: ForwardContext
    sequence: Tensor | None = None
    """The context's sequence of each token [T], if rows try trees: a grant then consists of several sequences."""

    def paths(self, at: Tensor | None) -> Paths | None:
        """Where the ancestors of these tokens (None: of all) lie; returns None if no row tries a tree."""
        found = self.ctx.groups[0].paths
        if found is None or self.sequence is None:
            return None
        return found.of(self.sequence if at is None else self.sequence[at])


def make_batch(plan: StepPlan, rows: Rows, pool: KVPool, kernels: Kernels) -> Batch:
    """Make the batch of the rows that `plan` grants tokens to."""
    device, block = rows.device, pool.layout.block_size
    packed = send(torch.tensor([plan.rows, plan.counts], dtype=torch.int64), device)
    longest = max(plan.counts)
    widths = (max(len(blocks[row]) for row in plan.rows) for blocks in rows.blocks)
    kinds = list(zip(widths, rows.moved(plan.rows), strict=True))
    adapted, left = rows.adapted(plan.rows), None
    if plan.guesses and pool.states is not None:
        left = send(torch.tensor(places_left(plan, pool.states.first), dtype=torch.int64), device)
    size = sum(plan.counts), longest
    tokens, token_rows, ctx = lay_out(rows, pool, kernels, packed, size, kinds, adapted=adapted, left=left)
    for group, made in enumerate(ctx.groups):
        made.shared = longest == 1 and share_prefix(rows, group, plan.rows)
        made.reach = reach(plan, rows, group, block)
    ends = list(accumulate(plan.counts))
    if device.type == "cpu":
        ctx.spans = [(e - c, c, n) for e, c, n in zip(ends, plan.counts, ctx.kv_len.tolist(), strict=True)]
    return Batch(plan, tokens, packed[0], packed[1], token_rows, ends, ctx)


def lay_out(
    rows: Placed,
    pool: Paged,
    kernels: Kernels,
    packed: Tensor,
    size: tuple[int, int],
    kinds: list[tuple[int, bool]],
    *,
    adapted: bool = False,
    left: Tensor | None = None,
) -> tuple[Tensor, Tensor, ForwardContext]:
    """Token ids [T], their rows [T] and the context of a step, derived from the rows' state on the device alone.

    packed [2, S]: rows, and how many tokens each computes. size: T, and the largest of these counts. kinds: for each KV
    group the entries of the longest table, and whether tables are shifted (some entry j does not begin at j * block
    size). adapted: some rows have adapters. left [T]: see StepRows."""
    row_ids, counts = packed[0], packed[1]
    plain = [(rows.tables[g], rows.held[g], width) for g, (width, shifted) in enumerate(kinds) if not shifted]
    tokens, token_rows, positions, query_start, kv_len, gathered = kernels.gather_spans(
        row_ids, counts, size, rows.tokens, rows.computed, plain, rows.layout.block_size
    )
    rest, groups = iter(gathered), []
    for group, (width, shifted) in enumerate(kinds):
        if shifted:
            groups.append(group_plan(rows, group, (row_ids, token_rows, positions), width, shifted=True))
        else:
            table, entries, slots = next(rest)
            groups.append(GroupPlan(table, None, entries, slots))
    ctx = ForwardContext(
        kernels=kernels,
        positions=positions,
        query_start=query_start,
        kv_len=kv_len,
        max_query=size[1],
        kv=pool.views,
        groups=groups,
        rows=StepRows(row_ids, token_rows, pool.state_views, adapter_slots(rows, token_rows, adapted), left),
        block_size=pool.layout.block_size,
    )
    return tokens, token_rows, ctx


def adapter_slots(rows: Placed, token_rows: Tensor, adapted: bool) -> Tensor | None:
    """Each token's adapter slot [T], looked up once for all products of the step; None: no row has one."""
    return rows.adapters.index_select(0, token_rows) if adapted and rows.adapters is not None else None


def apart(lengths: Tensor) -> tuple[Tensor, Spans | None]:
    """query_start and spans of a step in which each token is the last one of a sequence of its own; lengths [S]."""
    spans = [(i, 1, n) for i, n in enumerate(lengths.tolist())] if lengths.device.type == "cpu" else None
    return torch.arange(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device), spans


def bare_context(kernels: Kernels, count: int, device: torch.device) -> ForwardContext:
    """A context of `count` tokens without positions: nothing attends."""
    ids = torch.zeros(count, dtype=torch.int64, device=device)
    starts, _ = apart(ids)
    return ForwardContext(
        kernels=kernels, positions=ids, query_start=starts, kv_len=ids.to(torch.int32), max_query=1, kv=[], groups=[]
    )


def single_tokens(
    kernels: Kernels,
    rows: Placed,
    pool: Paged,
    row_ids: Tensor,
    starts: tuple[Tensor, Spans | None],
    offsets: Tensor | None = None,
    *,
    kinds: tuple[Flags, Flags] = ((), ()),
    adapted: bool = False,
) -> tuple[Tensor, ForwardContext]:
    """Token ids [S] and the context of a step with one token for each of row_ids [S]: the row's next token, or the one
    `offsets` [S] behind it. One operation of the kernels derives all but `starts`, which `apart` gives. kinds: which KV
    groups have shifted tables, and in which all tables begin with the same entries. adapted: some rows have
    adapters."""
    shifted, shared = kinds
    size = pool.layout.block_size
    tokens, positions, kv_len, gathered = kernels.gather_rows(
        row_ids, rows.tokens, rows.computed, rows.tables, size, offsets
    )
    groups = []
    for g, (table, entries, slots) in enumerate(gathered):
        if any(shifted) and shifted[g]:
            groups.append(group_plan(rows, g, (row_ids, row_ids, positions), table.shape[1], shifted=True))
        else:
            groups.append(GroupPlan(table, None, entries, slots, any(shared) and shared[g]))
    ctx = ForwardContext(
        kernels=kernels,
        positions=positions,
        query_start=starts[0],
        kv_len=kv_len,
        max_query=1,
        kv=pool.views,
        groups=groups,
        rows=StepRows(row_ids, row_ids, pool.state_views, adapter_slots(rows, row_ids, adapted)),
        spans=starts[1],
        block_size=size,
    )
    return tokens, ctx


def places_left(plan: StepPlan, first: int) -> list[int]:
    """The place where the state behind each of the step's tokens is left (-1: nowhere). Places for drafts begin at
    `first`."""
    left: list[int] = []
    for i, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=True)):
        tried = plan.guesses.get(i, 0)
        left += [-1] * (count - 1 - tried)
        left += range(first, first + tried)
        left.append(row)
        first += tried
    return left


def reach(plan: StepPlan, rows: Rows, group: int, block_size: int) -> int:
    """An upper bound of the positions that are read by rows which compute several tokens."""
    blocks = rows.blocks[group]
    return block_size * sum(len(blocks[row]) for row, n in zip(plan.rows, plan.counts, strict=True) if n > 1)


def group_plan(rows: Placed, group: int, ids: tuple[Tensor, Tensor, Tensor], width: int, *, shifted: bool) -> GroupPlan:
    """Tables of rows [S], `width` entries wide, and the slots of their tokens' positions. ids: the rows [S], the row of
    each token [T], the positions [T]. shifted: some entry j does not begin at j * block size."""
    row_ids, token_rows, positions = ids
    size = rows.layout.block_size
    table = rows.tables[group]
    if not shifted:
        first = None
        entry = positions // size
        offset = positions - entry * size
    else:
        first = rows.first[group][row_ids, :width]
        starts = rows.first[group][token_rows, :width]
        entry = torch.searchsorted(starts, positions.to(torch.int32)[:, None], right=True)[:, 0] - 1
        # A drafter may write behind its row's last block: it then overwrites its own newest entry, no other row's.
        offset = (positions - starts.gather(1, entry[:, None])[:, 0]).clamp_(max=size - 1)
    slots = table[token_rows, entry].long() * size + offset
    return GroupPlan(table[row_ids, :width], first, rows.held[group][row_ids], slots)


def share_prefix(rows: Rows, group: int, row_list: list[int]) -> bool:
    """Do the tables of all these rows begin with the same entries? (Equal cached blocks have equal blocks before
    them.)"""
    if len(row_list) < 2 or rows.device.type == "cpu":
        return False
    blocks, last = rows.blocks[group], SHARED_ENTRIES - 1
    model = blocks[row_list[0]]
    return len(model) > last and all(len(b) > last and b[last] == model[last] for b in (blocks[r] for r in row_list))
