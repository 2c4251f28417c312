"""Draft trees on the Triton backend, in the interpreter, against the reference: what nodes see, which drafts stand,
where keys of the path that stands go."""

from __future__ import annotations

import itertools
import os
import pathlib
import random

import pytest
import torch
from tests.cpu.engine.drafters import make_medusa
from tests.cpu.engine.engines import greedy, open_llm, run
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.cpu.kernels.tree_batch import as_trees, attention_of, grown, width
from tests.cpu.triton.fake_graph import FakeRecorder

from tokenmill import SamplingParams
from tokenmill.compute.forward import KVFormat, KVSpec
from tokenmill.core.drafting import AllOfThem
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kvcache.pool import KVPool, make_layout
from tokenmill.runner.nodes import TreeTokens
from tokenmill.runner.recorder import Graphs, RecordedSteps
from tokenmill.testing.tiny import make_tiny

REFERENCE = ReferenceKernels()
NODES = 5
WHOLE = os.environ.get("TOKENMILL_FAMILIES") == "1"
SPECS = {
    "full": KVSpec("full", 2, 16, 16),
    "window": KVSpec("window", 2, 16, 16, 21),
    "latent": KVSpec("latent", 1, 40, 32),
}


ALL = tuple(
    itertools.product(SPECS, ["float32", "int8", "int4", "float8_e4m3fn"], [1, 40], [False, True], [False, True])
)
FEW = (
    ("full", "float32", 1, False, False),
    ("full", "float32", 40, False, False),
    ("full", "float32", 1, True, False),
    ("full", "int8", 1, False, False),
    ("full", "int4", 1, False, False),
    ("full", "int4", 40, False, False),
    ("window", "float32", 1, False, True),
    ("window", "float8_e4m3fn", 1, False, False),
    ("window", "int4", 1, False, True),
    ("window", "float32", 1, True, True),
    ("latent", "float32", 1, False, False),
    ("latent", "float32", 9, True, False),
)
"""Kind of group, pages, tokens of a sequence without a tree, steady kernels, tables that drop what no query sees."""


@pytest.mark.parametrize("kind, dtype, chunk, steady, drop", ALL if WHOLE else FEW)
def test_nodes_see_what_they_descend_from(kind: str, dtype: str, chunk: int, steady: bool, drop: bool) -> None:
    """Trees of many shapes and sizes over pages whose unseen keys are NaN, beside a sequence without a tree."""
    if kind == "latent" and dtype != "float32":
        pytest.skip("pages made by hand have no scales for latent keys")
    dice, kv = random.Random(f"{kind} {chunk}"), SPECS[kind]
    torch.manual_seed(3)
    spec = attention_of(kv, **({} if kind == "latent" else {"sinks": torch.randn(4), "softcap": 9.0}))
    kernels = TritonKernels(steady=steady)
    stored = None if dtype == "float32" else KVFormat(dtype)
    ours, theirs = (
        PagedBatch((kv,), k, stored=stored, block_size=4, blocks=80, drop=drop) for k in (kernels, REFERENCE)
    )
    stored, _ = (batch.step([("a", 27), ("b", 38), ("c", 19)]) for batch in (theirs, ours))
    REFERENCE.prepare_qkv(torch.randn(84, width(kv)), spec, stored)
    ours.copy_pages(theirs)
    grants = [("a", 5), ("c", chunk), ("b", 65 if WHOLE else 9)]
    trees = {seq: grown(grants[seq][1] - 1, dice) for seq in (0, 2)}
    x = torch.randn(sum(n for _, n in grants), width(kv))
    mine, other = (as_trees(batch.step(grants), trees) for batch in (ours, theirs))
    assert (mine.groups[0].first is not None) == (kind == "window" and drop)
    found, expected = (k.attend(x, spec, ctx) for k, ctx in ((kernels, mine), (REFERENCE, other)))
    most = {"float32": 1e-5, "int8": 0.002, "int4": 0.002, "float8_e4m3fn": 0.12}[dtype]
    assert (found - expected).norm() < most * expected.norm()
    assert not kernels.launch.scratch.counters(x.device).any() and kernels.waits == 0
    assert not any(count["fallbacks"] for count in kernels.counters().values())


def test_trees_that_share_a_prefix_read_it_once() -> None:
    kv, kernels = SPECS["full"], TritonKernels()
    spec, dice = attention_of(kv), random.Random(4)
    ours, theirs = (PagedBatch((kv,), k, block_size=8, blocks=60) for k in (kernels, REFERENCE))
    before, x = torch.randn(90, width(kv)), torch.randn(7, width(kv))
    stored, _ = (batch.step([("a", 90)]) for batch in (theirs, ours))
    REFERENCE.prepare_qkv(before, spec, stored)
    ours.copy_pages(theirs)
    trees = {0: grown(6, dice)}
    contexts = [as_trees(batch.step([("a", 7)]), trees) for batch in (ours, theirs)]
    contexts[0].groups[0].shared = True
    found, expected = (
        k.attention(k.prepare_qkv(x, spec, ctx), spec, ctx)
        for k, ctx in zip((kernels, REFERENCE), contexts, strict=True)
    )
    assert torch.allclose(found, expected, atol=2e-5)
    assert int(kernels._stepping._common[1]) == 11, "what lies before the root's block"


def test_the_walk_down_a_tree() -> None:
    """As the reference has it, which tests/cpu/kernels/test_trees.py holds to its words."""
    kernels, dice = TritonKernels(), random.Random(0)
    for deepest, most_nodes in ((0, 0), (2, 5), (6, 20), (16, 64)):
        tokens = torch.randint(0, 2, (12, 120), dtype=torch.int32, generator=torch.Generator().manual_seed(deepest))
        length, computed = torch.zeros(12, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)
        grants, trees, samples = [], [], []
        for row in dice.sample(range(12), 7):
            trees.append([dice.randint(0, j) for j in range(dice.randint(0, most_nodes))])
            longest = dice.randint(min(1, deepest), deepest) if trees[-1] else 0
            grants.append((row, len(samples), len(trees[-1]), longest))
            samples += dice.choices([0, 1, ~0, ~1], [6, 6, 1, 1], k=len(trees[-1]) + 1)
            length[row] = dice.choice([1, 9, 120 - len(trees[-1]) - 1])
        wide = max(1, *map(len, trees))
        parents = torch.tensor([tree + [0] * (wide - len(tree)) for tree in trees])
        state, given = [t.clone() for t in (tokens, length, computed)], torch.tensor(grants).T
        most, marked = max(g[3] for g in grants), torch.tensor(samples)
        found = kernels.accept_(given, most, parents, marked, tokens, length, computed)
        wanted = REFERENCE.accept_(given, most, parents, marked, *state)
        for mine, other in zip((*found, tokens, length, computed), (*wanted, *state), strict=True):
            assert torch.equal(mine, other)
    assert kernels.counters()["accept_"] == {"calls": 4, "fallbacks": 0}


@pytest.mark.parametrize("pages", ["float32", "bfloat16", "int8", "int4", "latent", "odd"])
def test_keys_of_a_path_move(pages: str) -> None:
    """Of all layers together, bit for bit; what does not stand, and rows that move nothing, stay."""
    kernels, dice = TritonKernels(), random.Random(pages)
    spec = {"latent": KVSpec("latent", 1, 24, 16), "odd": KVSpec("full", 3, 5, 7)}.get(pages, KVSpec("full", 2, 8, 16))
    form = KVFormat("bfloat16" if pages in ("latent", "odd") else pages)
    pool = KVPool(make_layout((spec,) * 3, 4, form), [30], "cpu")
    pool.storage[0].view(torch.uint8).random_(255)
    slots = torch.tensor(dice.sample(range(120), 60)).view(5, 12)
    src, dst = slots.clone(), slots.clone()
    for row, count in enumerate((0, 3, 5, 1, 7)):
        path = sorted(dice.sample(range(1, 12), count))
        src[row, 1 : 1 + count], dst[row, 1 : 1 + count] = slots[row, path], slots[row, 1 : 1 + count]
    wanted = KVPool(pool.layout, [30], "cpu")
    wanted.storage[0].copy_(pool.storage[0])
    REFERENCE.move_kv_(wanted.views, src, dst)
    assert not torch.equal(wanted.storage[0], pool.storage[0])
    kernels.move_kv_(pool.views, src, dst)
    assert torch.equal(wanted.storage[0], pool.storage[0])
    assert kernels.counters()["move_kv_"] == {"calls": 1, "fallbacks": 0}


PROMPTS = [[5, 6, 7], [9] * 11]
PARAMS = [greedy(12), SamplingParams(temperature=0.9, seed=4, max_tokens=9, ignore_eos=True)]


def texts(folder: pathlib.Path, more: dict, told: list[list[int]] | None) -> tuple[list[list[int]], Graphs | None]:
    """What the Triton kernels say, with trees (of which some nodes are `told` next) where that is not None."""
    options = {"max_num_seqs": 3, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "enforce_eager": True}
    with open_llm(folder, **options, **more) as llm:
        runner, graphs = llm.engine.executor.runner, None
        kernels = runner.kernels = TritonKernels()
        if told is not None:
            llm.engine.scheduler.ahead.control = AllOfThem(NODES)
            graphs, layout = (
                Graphs(kernels, FakeRecorder()),
                TreeTokens(runner.model, kernels, runner.rows, runner.pool),
            )
            layout.rungs = [layout.alone, 12]
            runner.recorders = [RecordedSteps(layout, graphs)]
            _know(runner.drafter, told)
            runner.warm()
            assert len(graphs.made) == 3, "one row's tree, also with a prefix to share"
        found = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in run(llm, PROMPTS, PARAMS)]
        counters = llm.engine.scheduler.counters
        assert counters.failures == 0 and (told is None or counters.accepted > 5)
        assert kernels.waits == 0 and (told is None or kernels.counters()["move_kv_"]["calls"] > 3)
        assert not any(count["fallbacks"] for op, count in kernels.counters().items())
        return found, graphs


def _know(drafter, told: list[list[int]]) -> None:
    """In place of what heads would say: nodes at random, each right or not."""
    dice = random.Random(1)

    def propose(step) -> None:
        for row in step.row_list:
            known = int(step.rows.length[row])
            text = next((t for t in told if t[:known] == step.rows.tokens[row, :known].tolist()), [])
            depth, parents, drafts = [0], [], []
            for _ in range(step.count):
                parents.append(dice.choice([n for n, deep in enumerate(depth) if deep < 3][-3:]))
                depth.append(depth[parents[-1]] + 1)
                at = known + depth[-1] - 1
                drafts.append(text[at] if at < len(text) and dice.random() < 0.7 else dice.randrange(40))
            step.rows.tokens[row, known : known + step.count] = torch.tensor(drafts, dtype=torch.int32)
            step.rows.parents[row, : step.count] = torch.tensor(parents)

    drafter.propose = propose


def test_recorded_steps_with_trees(tmp_path: pathlib.Path) -> None:
    """Steps of trees are filled up and replayed, with plans in flight: the tokens are those of plain steps."""
    folder = make_tiny(tmp_path / "tiny", hidden=16, heads=2, kv_heads=1, layers=1)
    heads = make_medusa(tmp_path / "medusa", hidden=16)
    config = {
        "method": "medusa",
        "model": str(heads),
        "speculative_token_tree": "best",
        "num_speculative_tokens": NODES,
    }
    wanted, _ = texts(folder, {}, None)
    found, graphs = texts(folder, {"speculative_config": config, "depth": 2}, wanted)
    assert found == wanted
    assert graphs is not None and len(graphs.made) == 3 and graphs.possible
