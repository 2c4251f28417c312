"""Shapes of draft trees. Owns: what a path is, shapes that are written down, and which nodes are the likeliest.

A path names, level by level, which of the likeliest guesses is taken: (0,) is the first level's best one, (1, 0) the
best one behind the first level's second best. Nodes are in an order in which parents come before children. Must not
know: who guesses, plans.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_NODES, MOST_LEVELS, MOST_CHILDREN = 64, 16, 16
LONGEST = 4096
"""Characters of a shape that is written down."""
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """paths: of a tree that is always the same; None: the `nodes` likeliest ones, found anew each time."""

    nodes: int
    paths: tuple[Path, ...] | None = None


def read_shape(said: Any, nodes: int | None) -> Shape:
    """A list of paths, also as vLLM's text "[(0,), (0, 0), (1,)]", or "best"; nodes: how many there are to be. A
    ValueError says what is wrong."""
    if said == "best":
        return Shape(nodes or 16)
    if isinstance(said, str):
        try:
            said = ast.literal_eval(said) if len(said) <= LONGEST else None
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            said = None
    if not isinstance(said, (list, tuple)) or not said or not all(_is_path(path) for path in said):
        raise ValueError(
            f'it must be "best" or a list of paths like [[0], [1], [0, 0]], of up to {MOST_LEVELS} numbers from 0 to '
            f"{MOST_CHILDREN - 1} each"
        )
    paths = sorted({tuple(path) for path in said}, key=lambda path: (len(path), path))
    if len(paths) != len(said):
        raise ValueError("a path comes twice")
    if len(paths) > MOST_NODES:
        raise ValueError(f"{len(paths)} paths are more than {MOST_NODES}")
    for path in paths:
        if len(path) > 1 and path[:-1] not in paths:
            raise ValueError(f"{list(path)} goes on from {list(path[:-1])}, which is not there")
    if nodes not in (None, len(paths)):
        raise ValueError(f"num_speculative_tokens is {nodes}, and there are {len(paths)} paths")
    return Shape(len(paths), tuple(paths))


def parents_of(paths: tuple[Path, ...]) -> list[int]:
    """1 + the number of what each path goes on from; 0: the newest known token."""
    places = {path: n + 1 for n, path in enumerate(paths)}
    return [places[path[:-1]] if len(path) > 1 else 0 for path in paths]


def candidates(nodes: int, levels: int, children: int) -> tuple[Path, ...]:
    """Every path that can be among the `nodes` likeliest, where the guesses of a level do not depend on those before:
    whatever takes no later guess at any level is at least as likely."""
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
    if scores.device.type == "cpu":  # torch wakes its threads for a sum, which costs more than all of the tree
        total = torch.from_numpy(np.exp(scores.numpy() - largest.numpy()).sum(1, keepdims=True))
    else:
        total = (scores - largest).exp().sum(1, keepdim=True)
    return top.indices, (top.values - largest - total.log()).clamp_(max=0.0)


class Picking:
    """From scores of guesses, level by level, to the drafts of a tree."""

    def __init__(self, shape: Shape, levels: int, device: torch.device) -> None:
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


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, (list, tuple))
        and 0 < len(path) <= MOST_LEVELS
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < MOST_CHILDREN for n in path)
    )
