"""Shapes of draft trees: those that are written down, the likeliest nodes, and whether trees pay."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tokenmill.speculate.control import TreeControl
from tokenmill.speculate.eagle_tree import Growth
from tokenmill.speculate.shapes import TreeShape, parents_of, read_shape
from tokenmill.speculate.tree import Best, Picking, candidates, likeliest


def test_shapes_are_put_in_order() -> None:
    found = read_shape([[1], [0, 0], [0], (1, 2), [0, 0, 0]], None)
    assert found == TreeShape(5, ((0,), (1,), (0, 0), (1, 2), (0, 0, 0)))
    assert found.paths is not None and parents_of(found.paths) == [0, 0, 1, 2, 3]
    assert read_shape("[(0,), (0, 0)]", 2).paths == ((0,), (0, 0))
    assert read_shape("best", None) == TreeShape(16) and read_shape("best", 5) == TreeShape(5)


@pytest.mark.parametrize(
    "said",
    [[], "", "[", "__import__('os')", "[" * 5000, [[]], [[-1]], [[True]], [[0.0]], [0], 5, None, {"a": 1}, [[0] * 17],
     [[n, m] for n in range(16) for m in range(16)],
     [[n] for n in range(16)] + [[n, m] for n in range(8) for m in range(8)]],
    ids=lambda said: str(said)[:20],
)  # fmt: skip
def test_shapes_that_are_none(said: object) -> None:
    with pytest.raises(ValueError):
        read_shape(said, None)


@pytest.mark.parametrize("nodes, levels", [(1, 1), (4, 2), (9, 3), (16, 3), (20, 4)])
def test_the_likeliest_nodes_are_those_of_a_whole_search(nodes: int, levels: int) -> None:
    """Of all paths, by what all of their guesses are worth together."""
    dice = torch.Generator().manual_seed(nodes)
    best = Best(nodes, levels, torch.device("cpu"))
    likely = torch.rand(6, levels, best.children, generator=dice).log().sort(2, descending=True).values
    level, rank, parents = best.choose(likely, nodes)
    for row in range(6):
        each = {
            path: float(sum(likely[row, d, n] for d, n in enumerate(path)))
            for depth in range(1, levels + 1)
            for path in itertools.product(range(min(nodes, 6)), repeat=depth)
            if max(path) < best.children
        }
        wanted = sorted(each, key=lambda path: -each[path])[:nodes]
        found: list[tuple[int, ...]] = [()]
        for d, n, parent in zip(level[row].tolist(), rank[row].tolist(), parents[row].tolist(), strict=True):
            assert parent < len(found) and len(found[parent]) == d
            found.append((*found[parent], n))
        if max(max(path) for path in wanted) < 5:  # the search above was as wide as it had to be
            assert set(found[1:]) == set(wanted)


def test_few_paths_can_be_the_likeliest() -> None:
    assert candidates(3, 2, 16) == ((0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0), (2, 0))
    assert all(len(candidates(64, 5, 16)) >= n for n in (64,))


def test_nodes_of_equal_worth_keep_their_parents() -> None:
    dice = random.Random(0)
    for _ in range(100):
        parents = [dice.randint(0, j) for j in range(20)]
        worth = [0.0]
        for parent in parents:
            worth.append(worth[parent] - dice.choice([0.0, 0.0, 1.0]))
        order, found = likeliest(torch.tensor([worth[1:]]), torch.tensor([parents]), 9)
        kept = order[0].tolist()
        for n, (node, parent) in enumerate(zip(kept, found[0].tolist(), strict=True)):
            above = parents[node]
            assert parent <= n and (above == 0 if parent == 0 else kept[parent - 1] == above - 1)


def test_picking_takes_tokens_by_level_and_rank() -> None:
    scores = [torch.tensor([[0.1, 3.0, 2.0, 0.0]]), torch.tensor([[5.0, 0.0, 1.0, 4.0]])]
    paths = ((0,), (1,), (0, 0), (1, 1))
    tokens, parents = Picking(TreeShape(4, paths), 2, torch.device("cpu")).pick(scores, 4)
    assert tokens.tolist() == [[1, 2, 0, 3]] and parents.tolist() == [[0, 0, 1, 2]]
    tokens, parents = Picking(TreeShape(3), 2, torch.device("cpu")).pick(scores, 3)
    assert tokens.tolist() == [[1, 2, 0]] and parents.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("nodes", range(1, 65))
def test_what_a_level_leaves_has_room(nodes: int) -> None:
    """Nodes that an EAGLE head is given lie where the tree's own nodes will."""
    growth = Growth.of(nodes)
    assert growth.width >= 1 and growth.width * (growth.levels - 1) <= nodes + 1
    assert sum(growth.width**n for n in range(1, 3)) >= min(nodes, 2) or growth.levels == 1


@pytest.mark.parametrize("right, pays", [(0.1, False), (1.5, True)])
def test_trees_are_tried_where_they_pay(right: float, pays: bool) -> None:
    """Of a step that takes 1.6 times as long with a tree."""
    control, dice, used = TreeControl(16, None, 1000), random.Random(0), 0
    for step in range(3000):
        nodes = control.depth(1)
        assert nodes in (0, 16)
        if nodes:
            control.observe(4, min(4, int(right) + (dice.random() < right % 1)))
        control.timed(1, nodes, 1.6 if nodes else 1.0)
        used += step > 1000 and nodes > 0
    assert (used > 1900) == pays and (used < 100) != pays
