"""Drafts as trees: a node attends as a chain of its ancestors would, walks down trees, moves of keys and values."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, Kernels, KVSpec, Paths, RopeSpec
from tokenmill.kernels import ReferenceKernels, make_kernels
from tokenmill.runner.trees import climb

BACKENDS = ["reference", "auto"]
SPECS = {
    "full": KVSpec("full", 2, 32, 32),
    "window": KVSpec("window", 2, 32, 32, 7),
    "latent": KVSpec("latent", 1, 48, 32),
}
PARENTS = [0, 0, 1, 1, 2, 3, 3, 6, 8, 9]
"""Of ten drafts: two children of the root, a line of five below one of them."""
LEVELS = 6


def made(backend: str) -> Kernels:
    return ReferenceKernels() if backend == "reference" else make_kernels("cpu")


def lines(parents: list[int]) -> list[list[int]]:
    """What the root and each draft descend from, themselves included."""
    found = [[0]]
    for j, parent in enumerate(parents):
        found.append([*found[parent], j + 1])
    return found


def test_climbing_a_tree() -> None:
    """Depths and ancestors, and what is deeper than may be."""
    found = climb(torch.tensor([PARENTS, list(range(10))]), torch.tensor([LEVELS, 4]), 10)
    for tree, parents in enumerate((PARENTS, list(range(10)))):
        for node, line in enumerate(lines(parents)):
            most = (LEVELS, 4)[tree]
            assert found.depth[tree, node] == min(len(line) - 1, most)
            assert found.places[tree, node, : len(line)].tolist() == line


def attention_of(spec: KVSpec) -> AttentionSpec:
    turns = torch.arange(256)[:, None] * torch.rand(16, generator=torch.Generator().manual_seed(2))
    rope = RopeSpec(turns.cos(), turns.sin(), 32, start=spec.key_dim - 32)
    return AttentionSpec(0, 0, 4, spec, scale=0.2, rope=rope, window=spec.window)


def width(spec: KVSpec) -> int:
    heads = spec.key_dim if spec.kind == "latent" else spec.heads * (spec.key_dim + spec.value_dim)
    return 4 * spec.key_dim + heads


def as_trees(ctx: ForwardContext, known: int, parents: list[int]) -> ForwardContext:
    """The only sequence of a context as a root and its drafts."""
    found = climb(torch.tensor([parents]), torch.tensor([LEVELS]), LEVELS)
    count, (plan,) = len(parents) + 1, ctx.groups
    depth = found.depth[0]
    plan = dataclasses.replace(
        plan,
        tables=plan.tables.expand(count, -1).contiguous(),
        first=None if plan.first is None else plan.first.expand(count, -1).contiguous(),
        entries=plan.entries.expand(count).contiguous(),
        paths=Paths(torch.full((count,), known - 1), found.places[0].to(torch.int32).contiguous()),
    )
    return dataclasses.replace(
        ctx,
        positions=known - 1 + depth,
        query_start=torch.arange(count + 1, dtype=torch.int32),
        kv_len=(known + depth).to(torch.int32),
        groups=[plan],
        spans=[(i, 1, int(known + d)) for i, d in enumerate(depth)],
        max_query=1,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("known", [1, 9, 63, 130])
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_node_attends_as_a_chain_of_its_ancestors(backend: str, known: int, kind: str, dtype: torch.dtype) -> None:
    """Bit for bit, wherever the ancestors lie; and so does what follows once its path has moved."""
    if kind == "latent" and dtype == torch.int8:
        pytest.skip("the pages made by hand have no scales for latent keys")
    spec, kernels = SPECS[kind], made(backend)
    attention, dice = attention_of(spec), torch.Generator().manual_seed(known)
    past = torch.randn(known + len(PARENTS), width(spec), generator=dice)
    after = torch.randn(1, width(spec), generator=dice)

    def batch() -> PagedBatch:
        made = PagedBatch((spec,), kernels, dtype=dtype, block_size=4, blocks=80)
        if known > 1:
            kernels.attend(past[: known - 1], attention, made.step([("a", known - 1)]))
        return made

    tree = batch()
    ctx = tree.step([("a", 1 + len(PARENTS))])
    found = kernels.attend(past[known - 1 :], attention, as_trees(ctx, known, PARENTS))
    for node, line in enumerate(lines(PARENTS)):
        if len(line) - 1 > LEVELS:
            continue
        chain = batch()
        wanted = kernels.attend(past[known - 1 :][line], attention, chain.step([("a", len(line))]))
        assert torch.equal(found[node], wanted[-1]), (node, line)
        if node in (4, 9):
            moved = PagedBatch.__new__(PagedBatch)
            moved.__dict__ = {**tree.__dict__, "kv": [clone(view) for view in tree.kv]}
            slots = ctx.groups[0].slots
            kernels.move_kv_(moved.kv, slots[line][None], slots[: len(line)][None])
            last = kernels.attend(after, attention, chain.step([("a", 1)]))
            moved.seqs["a"].computed = known - 1 + len(line)
            again = kernels.attend(after, attention, moved.step([("a", 1)]))
            moved.seqs["a"].computed = known + len(PARENTS)
            assert torch.equal(again, last), (node, line)


def clone(view):  # type: ignore[no-untyped-def]
    key = view.key.clone()
    if view.value.data_ptr() == view.key.data_ptr():
        return type(view)(key, key[..., : view.value.shape[3]])
    scales = [None if s is None else s.clone() for s in (view.key_scale, view.value_scale)]
    return type(view)(key, view.value.clone(), *scales)


def walk(samples: list[int], drafts: list[int], parents: list[int], most: int) -> tuple[list[int], list[int]]:
    """By the words of the specification: lines and samples that stand."""
    path = [0]
    while len(path) <= most:
        children = [j + 1 for j, p in enumerate(parents) if p == path[-1] and drafts[j] == samples[path[-1]]]
        if not children:
            break
        path.append(children[0])
    if len(path) > 1 and samples[path[-1]] < 0:
        path.pop()
    said = [samples[line] for line in path]
    return path, [~s if s < 0 else s for s in said]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_walk_down_a_tree(backend: str) -> None:
    dice, kernels = random.Random(0), made(backend)
    for _ in range(150):
        rows = dice.randint(1, 4)
        tokens = torch.full((9, 40), 7, dtype=torch.int32)
        length, computed = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
        first, grants, samples, wanted = 0, [], [], []
        cases = []
        for row in dice.sample(range(9), rows):
            count, known = dice.randint(0, 12), dice.randint(1, 20)
            parents = [dice.randint(0, j) for j in range(count)]
            drafts = [dice.randint(0, 2) for _ in range(count)]
            said = [dice.choice([0, 0, 1, 1, 2, ~1] if dice.random() < 0.5 else [0, 1]) for _ in range(count + 1)]
            most = dice.randint(1, 5) if count else 0
            tokens[row, known : known + count] = torch.tensor(drafts, dtype=torch.int32)
            length[row] = known
            grants.append((row, first, count, most))
            cases.append(parents)
            samples += said
            wanted.append(walk(said, drafts, parents, most))
            first += len(said)
        wide = max(1, *map(len, cases))
        above = torch.tensor([p + [0] * (wide - len(p)) for p in cases])
        before = length.clone()
        given = torch.tensor(grants).T.contiguous()
        most = max(g[3] for g in grants)
        path, kept = kernels.accept_(given, most, above, torch.tensor(samples), tokens, length, computed)
        for i, (row, _, _, _) in enumerate(grants):
            stand, said = wanted[i]
            assert path[i, : int(kept[i])].tolist() == stand
            known = int(before[row])
            assert tokens[row, known : int(length[row])].tolist() == said
            assert computed[row] == length[row] - 1 and length[row] == known + len(said)


def test_a_chain_is_a_tree() -> None:
    """The walk gives what is found of a chain without its parents."""
    dice = random.Random(1)
    for backend in BACKENDS:
        kernels = made(backend)
        for _ in range(50):
            count, known = dice.randint(1, 5), dice.randint(1, 9)
            drafts = torch.tensor([dice.randint(0, 1) for _ in range(count)], dtype=torch.int32)
            marked = torch.tensor([dice.choice([0, 0, 1, ~0]) for _ in range(count + 1)])
            states: list[tuple[Tensor, Tensor, Tensor]] = []
            for tree in (False, True):
                tokens = torch.zeros((1, 20), dtype=torch.int32)
                tokens[0, known : known + count] = drafts
                length, computed = torch.tensor([known]), torch.tensor([0])
                if tree:
                    grants = torch.tensor([[0], [0], [count], [count]])
                    kernels.accept_(grants, count, torch.arange(count)[None], marked, tokens, length, computed)
                else:
                    grants = torch.tensor([[0], [0], [count]])
                    kernels.accept_(grants, count, None, marked, tokens, length, computed)
                states.append((tokens[:, : int(length[0])], length, computed))
            assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_nothing_is_read_by_the_host() -> None:
    """Tensors without contents: whoever asks for a number raises."""

    def empty(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device="meta")

    given = empty(4, 3), 2, empty(3, 5), empty(12), empty(8, 20), empty(8), empty(8)
    path, kept = ReferenceKernels().accept_(*given)
    assert path.shape == (3, 3) and kept.shape == (3,)
