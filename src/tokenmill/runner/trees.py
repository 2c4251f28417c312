"""Drafts that are trees. Owns: a step's tensors where rows try trees, and where the keys of the path that stands go.

A row's drafts lie behind its newest known token, one after the other, in the token buffer and in every KV group.
`Rows.parents` names each draft's parent. A node is a sequence of its own: it stands at the position of its depth and
sees its ancestors at theirs (compute/descriptors.py: Paths), so it computes what a chain of them would. The keys of the
path that stands are then moved to their place. Must not know: who guesses, sampling, the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, Kernels, Paths, StepRows
from tokenmill.core.step import StepPlan
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import Batch, adapter_slots, group_plan, reach
from tokenmill.runner.rows import Rows
from tokenmill.sampling.arrays import send, send_columns


@dataclass(slots=True)
class Climbed:
    """Depths and ancestors of the nodes of G trees with N drafts each; node 0 is the newest known token. Depth [G, 1 +
    N]; by depth the ancestors of each node, itself included [G, 1 + N, W] (behind its own depth: itself again). For
    single nodes [T]: [T] and [T, W]."""

    depth: Tensor
    places: Tensor


def climb(parents: Tensor, most: Tensor, levels: int) -> Climbed:
    """parents [G, N] as Kernels.accept_ has them, for trees of up to `levels`. most [G]: deeper nodes are put at this
    depth. They are computed in vain, but their position exists."""
    own = torch.arange(parents.shape[1] + 1, device=parents.device).expand(parents.shape[0], -1)
    return _climb(parents, own, most[:, None], levels)


def climb_each(parents: Tensor, node: Tensor, most: Tensor, levels: int) -> Climbed:
    """The same for single nodes [T], each with its own tree; parents [T, N]."""
    found = _climb(parents, node[:, None], most[:, None], levels)
    return Climbed(found.depth[:, 0], found.places[:, 0])


def _climb(parents: Tensor, own: Tensor, most: Tensor, levels: int) -> Climbed:
    above = torch.cat((parents.new_zeros((parents.shape[0], 1)), parents), 1)
    line = [own]
    for _ in range(levels):
        line.append(above.gather(1, line[-1]))
    up = torch.stack(line, 2)  # 0, 1, ... steps towards the root
    depth = (up[:, :, :-1] != 0).sum(2)
    steps = (depth[:, :, None] - torch.arange(levels + 1, device=parents.device)).clamp_(min=0)
    return Climbed(depth.minimum(most), up.gather(2, steps))


def climb_trees(plan: StepPlan, rows: Rows) -> tuple[Tensor, Climbed]:
    """The rows that try trees [G], and their trees."""
    tried = [[plan.rows[i], plan.guesses[i]] for i in plan.nodes]
    row_ids, most = send_columns(tried, rows.device)
    return row_ids, climb(rows.parents[row_ids, : max(plan.nodes.values())], most, rows.levels)


def make_tree_batch(plan: StepPlan, rows: Rows, pool: KVPool, kernels: Kernels) -> Batch:
    """The same as make_batch, for plans in which some grants try trees."""
    device = rows.device
    granted = send(torch.tensor([plan.rows, plan.counts], dtype=torch.int64), device)
    row_ids, counts, tree, node = send(_sequences(plan), device)
    found = climb_trees(plan, rows)[1]
    total, ends = plan.num_tokens, counts.cumsum(0)
    sequence = torch.repeat_interleave(counts, output_size=total)
    within = torch.arange(total, device=device) - (ends - counts)[sequence]
    start, real = rows.computed[row_ids], tree >= 0
    depth = torch.where(real, found.depth[tree, node], 0)
    stored = (start + node)[sequence] + within
    kv_len = start + depth + counts
    token_rows, widths = row_ids[sequence], [max(len(blocks[row]) for row in plan.rows) for blocks in rows.blocks]
    ctx = ForwardContext(
        kernels=kernels,
        positions=(start + depth)[sequence] + within,
        query_start=torch.cat((ends.new_zeros(1), ends)).to(torch.int32),
        kv_len=kv_len.to(torch.int32),
        max_query=max([1, *(n for i, n in enumerate(plan.counts) if i not in plan.nodes)]),
        kv=pool.views,
        groups=[
            group_plan(rows, g, (row_ids, token_rows, stored), width, shifted=moved)
            for g, (width, moved) in enumerate(zip(widths, rows.moved(plan.rows), strict=True))
        ],
        rows=StepRows(row_ids, token_rows, (), adapter_slots(rows, token_rows, rows.adapted(plan.rows))),
        block_size=pool.layout.block_size,
    )
    paths = Paths(torch.where(real, start, kv_len), found.places[tree, node].to(torch.int32))
    for group, made in enumerate(ctx.groups):
        made.paths = paths
        made.reach = reach(plan, rows, group, pool.layout.block_size)
    if device.type == "cpu":
        borders = ends.tolist()
        ctx.spans = [(e - c, c, n) for e, c, n in zip(borders, counts.tolist(), kv_len.tolist(), strict=True)]
    tokens = rows.tokens[token_rows, stored].long()
    return Batch(plan, tokens, granted[0], granted[1], token_rows, list(accumulate(plan.counts)), ctx, sequence)


def _sequences(plan: StepPlan) -> Tensor:
    """[4, S]: the row, token count, tree (-1: none) and node of each sequence, in the order of the grants."""
    trees, made = {i: g for g, i in enumerate(plan.nodes)}, []
    for i, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=True)):
        made += [(row, 1, trees[i], j) for j in range(count)] if i in trees else [(row, count, -1, 0)]
    return torch.tensor(made, dtype=torch.int64).t().contiguous()


def all_parents(plan: StepPlan, rows: Rows, grants: list[int], row_ids: Tensor) -> Tensor:
    """[S, N]: the parent of each draft of these grants; drafts of the host are chains."""
    width = max(plan.nodes.get(i, plan.guesses.get(i, 0)) for i in grants)
    chain = torch.arange(width, device=rows.device)
    real = send(torch.tensor([i in plan.nodes for i in grants]), rows.device)
    lying = rows.parents[row_ids, :width]
    if lying.shape[1] < width:
        lying = torch.nn.functional.pad(lying, (0, width - lying.shape[1]))
    return torch.where(real[:, None], lying, chain)


def move_path(kernels: Kernels, pool: KVPool, batch: Batch, first: Tensor, kept: Tensor, path: Tensor) -> None:
    """Move the keys and values of the drafts that stand to their positions. first [S]: the token in the batch of each
    row's first line. kept, path: what stands (verdict.py)."""
    ahead = torch.arange(path.shape[1], device=path.device)
    stays = (ahead >= kept[:, None]) | (path == ahead)
    src, dst = first[:, None] + torch.where(stays, 0, path), first[:, None] + torch.where(stays, 0, ahead)
    if path.device.type == "cpu":
        moves = ~stays
        if not moves.any():
            return
        src, dst = src[moves][None], dst[moves][None]
    for group, made in enumerate(batch.ctx.groups):
        kernels.move_kv_(pool.group_views(group), made.slots[src], made.slots[dst])
