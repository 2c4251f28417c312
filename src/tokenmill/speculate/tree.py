"""Draft trees of a shape. Owns: which nodes are likeliest, and the drafts at them.

Must not know: who guesses, plans.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokenmill.speculate.shapes import MOST_CHILDREN, Path, TreeShape, parents_of


def candidates(nodes: int, levels: int, children: int) -> tuple[Path, ...]:
    """Every path that can be among the `nodes` likeliest, if a level's guesses do not depend on those before: a path
    that takes no later guess than another at any level is at least as likely."""
    found: list[Path] = []
    level: list[tuple[Path, int]] = [((), 1)]
    for _ in range(levels):
        level = [((*path, n), size * (n + 1)) for path, size in level for n in range(min(children, nodes // size))]
        found += sorted(path for path, _ in level)
    return tuple(found)


class Best:
    """Chooses the likeliest nodes of trees whose levels do not depend on one another."""

    def __init__(self, nodes: int, levels: int, device: torch.device) -> None:
        paths = candidates(nodes, levels, MOST_CHILDREN)
        self.children = 1 + max(max(path) for path in paths)
        self.depth = torch.tensor([len(path) - 1 for path in paths], device=device)
        self.rank = torch.tensor([path[-1] for path in paths], device=device)
        self.parents = torch.tensor(parents_of(paths), device=device)
        numbers = [[n for n, path in enumerate(paths) if len(path) == level + 1] for level in range(levels)]
        self.levels = [torch.tensor(found, dtype=torch.int64, device=device) for found in numbers]

    def choose(self, likely: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """likely [S, levels, children]: logarithms, falling -> level and rank of `count` nodes [S, count], and their
        parents [S, count] (Kernels.accept_)."""
        own = likely[:, self.depth, self.rank]
        scores = torch.zeros(own.shape[0], own.shape[1] + 1, device=own.device)
        for at in self.levels:
            scores[:, at + 1] = scores[:, self.parents[at]] + own[:, at]
        order, parents = likeliest(scores[:, 1:], self.parents.expand(own.shape[0], -1), count)
        return self.depth[order], self.rank[order], parents


def likeliest(worth: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """worth [S, n], of no node more than of its parent, which comes before it -> the numbers of the `count` best nodes
    [S, count], in their order, and what these go on from, among themselves. parents: 1 + a node's number; 0: the
    root."""
    order = worth.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
    place = parents.new_zeros((worth.shape[0], worth.shape[1] + 1))
    place.scatter_(1, order + 1, torch.arange(1, order.shape[1] + 1, device=worth.device).expand_as(order))
    return order, place.gather(1, parents.gather(1, order))


def likeliest_words(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """scores [n, V] float32 -> the numbers of the `count` largest of each line [n, count], falling, and the logarithms
    of their shares."""
    top = scores.topk(count, dim=1)
    largest = top.values[:, :1]
    if scores.device.type == "cpu":  # a sum would wake torch's threads, which costs more than the whole tree
        with np.errstate(invalid="ignore"):  # a damaged drafter may say infinity
            total = torch.from_numpy(np.exp(scores.numpy() - largest.numpy()).sum(1, keepdims=True))
    else:
        total = (scores - largest).exp().sum(1, keepdim=True)
    return top.indices, (top.values - largest - total.log()).clamp_(max=0.0)


class Picking:
    """From scores of guesses, level by level, to the drafts of a tree."""

    def __init__(self, shape: TreeShape, levels: int, device: torch.device) -> None:
        self.best: Best | None = None
        if shape.paths is None:
            self.best = Best(shape.nodes, levels, device)
            self.children = self.best.children
        else:
            self.children = 1 + max(max(path) for path in shape.paths)
            self.level = torch.tensor([len(path) - 1 for path in shape.paths], device=device)
            self.rank = torch.tensor([path[-1] for path in shape.paths], device=device)
            self.parents = torch.tensor(parents_of(shape.paths), device=device)

    def pick(self, scores: list[Tensor], count: int) -> tuple[Tensor, Tensor]:
        """scores [S, V] of each level -> tokens [S, count] and their parents [S, count]."""
        children = min(self.children, scores[0].shape[1])
        top = [likeliest_words(x, children) for x in scores]
        ids = torch.stack([found for found, _ in top], 1)
        if self.best is None:
            level, rank = self.level[:count], self.rank[:count].clamp(max=children - 1)
            return ids[:, level, rank], self.parents[:count].expand(ids.shape[0], -1)
        likely = torch.stack([likely for _, likely in top], 1)
        level, rank, parents = self.best.choose(likely, count)
        return ids[torch.arange(ids.shape[0], device=ids.device)[:, None], level, rank], parents
