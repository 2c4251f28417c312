"""Trees of an EAGLE head. Owns: growing them level by level, likeliest nodes first.

The likeliest nodes of a level (by the product of the probabilities on their path) go through the head, which gives each
a state and so its children. Of all nodes seen, the likeliest stay. Nodes lie behind one another in the head's own
pages; each sees only its ancestors (runner/trees.py). Must not know: networks, plans, verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, Kernels, Paths, StepRows
from tokenmill.runner.batch import group_plan
from tokenmill.runner.drafter_rows import Side
from tokenmill.speculate.shapes import MOST_CHILDREN
from tokenmill.speculate.tree import likeliest, likeliest_words


@dataclass(frozen=True, slots=True)
class Growth:
    """nodes: how many stay. levels: how deep trees are. width: nodes per level that go through the head (and its
    pages)."""

    nodes: int
    levels: int
    width: int

    @classmethod
    def of(cls, nodes: int) -> Growth:
        """Deeper and wider with the number of nodes."""
        levels = nodes.bit_length()
        return cls(nodes, levels, min(MOST_CHILDREN, (nodes + 1) // max(1, levels - 1)))


@dataclass(slots=True)
class TreeHead:
    """What a tree needs from a head. scores(states [n, hidden], rows [n], positions [n]) -> [n, V], for the words that
    follow tokens at these positions. ids [V]: the token that each word means (None: the same id).
    go_on(tokens [n], states [n, hidden], context) -> states."""

    scores: Callable[[Tensor, Tensor, Tensor], Tensor]
    ids: Tensor | None
    go_on: Callable[[Tensor, Tensor, ForwardContext], Tensor]
    side: Side
    shifted: tuple[bool, ...]
    kernels: Kernels


@dataclass(slots=True)
class TreeSoFar:
    """All nodes so far of S rows: worth, tokens and parents [S, n]. A parent is 1 + its node's number; 0 is the
    root."""

    worth: Tensor
    tokens: Tensor
    parents: Tensor

    def join(self, worth: Tensor, tokens: Tensor, parents: Tensor) -> TreeSoFar:
        """The same with one more level."""
        pairs = ((self.worth, worth), (self.tokens, tokens), (self.parents, parents))
        return TreeSoFar(*(torch.cat(pair, 1) for pair in pairs))


def grow(head: TreeHead, growth: Growth, row_ids: Tensor, known: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Grow a tree per row: row_ids [S] with `known` [S] tokens, and the states [S, hidden] of the newest ones -> tokens
    and parents of `growth.nodes` drafts [S, nodes]."""
    count, root = row_ids.shape[0], (known - 1).clamp(min=0)  # the spare row has no known tokens
    none = known.new_zeros((count, 0))
    seen = TreeSoFar(states.new_zeros((count, 0), dtype=torch.float32), none, none)
    beam = states[:, None]
    worth, above = torch.zeros((count, 1), device=root.device), known.new_zeros((count, 1))
    line = known.new_zeros((count, 1, 0))
    taken = 0
    for level in range(growth.levels):
        wide = beam.shape[1]
        owners, stands = row_ids.repeat_interleave(wide), (root + level).repeat_interleave(wide)
        scores = head.scores(beam.flatten(0, 1), owners, stands)
        words, shares = likeliest_words(scores, min(growth.width, scores.shape[1]))
        likely = shares.view(count, wide, -1)
        children = likely.shape[2]
        total = (worth[:, :, None] + likely).flatten(1)
        ids = (words if head.ids is None else head.ids[words]).view(count, -1)
        first = seen.tokens.shape[1]
        seen = seen.join(total, ids, above.repeat_interleave(children, 1))
        if level + 1 == growth.levels:
            break
        best = total.topk(min(growth.width, total.shape[1]), dim=1)
        parent = best.indices // children
        worth, above, tokens = best.values, first + 1 + best.indices, ids.gather(1, best.indices)
        made = parent.shape[1]
        before = beam.gather(1, parent[:, :, None].expand(-1, -1, beam.shape[2]))
        own = (taken + torch.arange(made, device=root.device)).expand(count, -1)[:, :, None]
        line = torch.cat((line.gather(1, parent[:, :, None].expand(-1, -1, level)), own), 2)
        taken += made
        ctx = _context(head, row_ids, root, line)
        beam = head.go_on(tokens.flatten(), before.flatten(0, 1), ctx).view(count, made, -1)
    order, parents = likeliest(seen.worth, seen.parents, growth.nodes)
    return seen.tokens.gather(1, order), parents


def _context(head: TreeHead, row_ids: Tensor, root: Tensor, line: Tensor) -> ForwardContext:
    """The context of one level's nodes. line [S, n, depth]: each node's path from the root's child to itself."""
    side, (_, wide, depth) = head.side, line.shape
    owners, roots = row_ids.repeat_interleave(wide), root.repeat_interleave(wide)
    places = line.flatten(0, 1)
    stored, stands = roots + places[:, -1], roots + depth - 1
    paths = Paths(roots, places.to(torch.int32).contiguous())
    groups = [
        replace(group_plan(side, g, (owners, owners, stored), table.shape[1], shifted=head.shifted[g]), paths=paths)
        for g, table in enumerate(side.tables)
    ]
    total = owners.shape[0]
    kv_len = (stands + 1).to(torch.int32)
    return ForwardContext(
        kernels=head.kernels,
        positions=stands,
        query_start=torch.arange(total + 1, dtype=torch.int32, device=root.device),
        kv_len=kv_len,
        max_query=1,
        kv=side.views,
        groups=groups,
        rows=StepRows(owners, owners),
        spans=[(i, 1, n) for i, n in enumerate(kv_len.tolist())] if root.device.type == "cpu" else None,
        block_size=side.layout.block_size,
    )
