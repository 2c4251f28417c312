"""Drafting models on the device: recorded passes, plans in flight, the same tokens with --deterministic, and no holes
in what a drafter keeps."""

from __future__ import annotations

import json
import random

import pytest
import torch

pytest.importorskip("triton")

from safetensors.torch import save_file
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.cpu.kernels.tree_batch import as_trees, attention_of, grown, width

from tokenmill import LLM, SamplingParams
from tokenmill.compute.forward import KVFormat, KVSpec
from tokenmill.core.drafting import AllOfThem
from tokenmill.demo import demo_dir
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton import TritonKernels
from tokenmill.kvcache.pool import KVPool, make_layout
from tokenmill.runner import runner
from tokenmill.runner.trees import make_tree_batch

MOST = 3
FORMATS = ("bfloat16", "float8_e4m3fn", "int8", "int4")
PROMPTS = [
    "Once upon a time there was a little",
    "<|im_start|>user\nWhat is 23 + 45?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a story about a dog.<|im_end|>\n<|im_start|>assistant\n",
    "one two three one two three one two",
] * 4
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2, seed=4, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=48, logprobs=2, ignore_eos=True),
] * 4


@pytest.fixture(scope="module")
def eagle(tmp_path_factory):
    """A random EAGLE-3 head for the demo model: nothing that it guesses is right."""
    folder, hidden, inner = tmp_path_factory.mktemp("eagle3"), 256, 512
    shapes = {f"self_attn.{x}_proj": (n, 2 * hidden) for x, n in (("q", 256), ("k", 128), ("v", 128))}
    shapes |= {"self_attn.o_proj": (hidden, 256), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    shapes |= {"mlp.down_proj": (hidden, inner)}
    tensors = {f"midlayer.{name}.weight": torch.randn(shape) * 0.05 for name, shape in shapes.items()}
    tensors |= {"fc.weight": torch.randn(hidden, 3 * hidden) * 0.05, "lm_head.weight": torch.randn(1024, hidden)}
    tensors["d2t"] = torch.arange(1024) * 5
    norms = ["norm", *(f"midlayer.{n}" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm"))]
    save_file(tensors | {f"{name}.weight": torch.ones(hidden) for name in norms}, folder / "model.safetensors")
    config = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 64, "vocab_size": 6144, "draft_vocab_size": 1024, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make(speculative=None, **options):
    """The demo model on the device; every draft is made."""
    options = {"max_num_seqs": 32, "max_model_len": 1024, "num_gpu_blocks_override": 1500, **options}
    llm = LLM(model="demo", device="cuda", speculative_config=speculative, **options)
    if speculative:
        llm.engine.scheduler.ahead.control = AllOfThem(llm.engine.scheduler.limits.max_guesses)
    return llm


def config(name, eagle):
    """--speculative-config of a drafter."""
    models = {"self": demo_dir("main"), "draft": demo_dir("draft"), "medusa": demo_dir("medusa"), "eagle3": eagle}
    method = {"self": "draft_model", "draft": "draft_model"}.get(name, name)
    return {"method": method, "model": str(models[name]), "num_speculative_tokens": MOST}


def tokens(llm):
    """Ids of two rounds, the second of which is served by the prefix cache."""
    return [[o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] for _ in range(2)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["self", "draft", "medusa", "eagle3"])
def test_the_same_tokens_with_deterministic(name, eager, eagle):
    with make(deterministic=True) as llm:
        wanted = tokens(llm)
    with make(config(name, eagle), deterministic=True, enforce_eager=eager) as llm:
        found = tokens(llm)
        counters = llm.engine.scheduler.counters
        assert counters.failures == 0 and counters.drafted > 500
        assert counters.accepted > 0 or name == "eagle3"
    assert found == wanted


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 32}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int4"}]
)
def test_a_model_that_drafts_for_itself_is_right(options, eagle):
    """bf16 sums in another order may flip a near tie, so not always; four bits make more of a sum that moved."""
    kept = 0.8 if options.get("kv_cache_dtype") == "int4" else 0.9
    plain = [SamplingParams(temperature=t, seed=7, max_tokens=64, ignore_eos=True) for t in (0.0, 0.8)] * 8
    with make(config("self", eagle), **options) as llm:
        for _ in range(2):
            llm.generate(PROMPTS, plain, use_tqdm=False)
        counters = llm.engine.scheduler.counters
        assert counters.accepted > kept * counters.drafted > 400


def test_drafts_do_not_wait_for_the_device(eagle):
    """With two plans in flight nothing in a step asks the device for a number."""
    with make(config("draft", eagle)) as llm:
        llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
        before = llm.engine.executor.runner.kernels.waits
        llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
        assert llm.engine.executor.runner.kernels.waits == before


TREES = {"speculative_token_tree": "best", "num_speculative_tokens": 12}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_trees_give_the_same_tokens_with_deterministic(name, eager, eagle):
    """Verified as trees, moved as the path that stands."""
    with make(deterministic=True) as llm:
        wanted = tokens(llm)
    with make(config(name, eagle) | TREES, deterministic=True, enforce_eager=eager) as llm:
        found = tokens(llm)
        counters, kernels = llm.engine.scheduler.counters, llm.engine.executor.runner.kernels.counters()
        assert counters.failures == 0 and counters.drafted > 500
        assert counters.accepted > 100 or name == "eagle3"
        assert kernels["accept_"]["calls"] > 20 and kernels["move_kv_"]["calls"] > 20
        assert not any(kernels[op]["fallbacks"] for op in ("attention", "accept_", "move_kv_"))
    assert found == wanted


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 64}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_trees_are_right_as_often_as_chains(options, eagle):
    """Or more often: nodes beside the chain, and all heads' first guesses among them."""
    kept = []
    for tree in ({}, TREES):
        with make(config("medusa", eagle) | tree, **options) as llm:
            plain = [SamplingParams(temperature=t, seed=7, max_tokens=64, ignore_eos=True) for t in (0.0, 0.8)] * 8
            llm.generate(PROMPTS, plain, use_tqdm=False)
            counters = llm.engine.scheduler.counters
            assert counters.failures == 0
            kept.append(counters.accepted / counters.output_tokens)
    assert kept[1] > kept[0] > 0.15  # plain torch on a CPU keeps 0.188 of the guesses at these prompts


@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_trees_are_recorded_and_wait_for_nothing(name, eagle, monkeypatch):
    """With two plans in flight; no tree's step is put together by hand."""
    by_hand = []
    monkeypatch.setattr(runner, "make_tree_batch", lambda *parts: by_hand.append(parts) or make_tree_batch(*parts))
    with make(config(name, eagle) | TREES) as llm:
        llm.generate(PROMPTS[:3], PARAMS[:3], use_tqdm=False)
        kernels = llm.engine.executor.runner.kernels
        before, made = kernels.waits, kernels.counters()["accept_"]["calls"]
        llm.generate(PROMPTS[:3], PARAMS[:3], use_tqdm=False)
        assert kernels.waits == before and kernels.counters()["accept_"]["calls"] > made + 10
        assert not by_hand and llm.engine.scheduler.counters.failures == 0


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("kind", ["full", "window", "latent"])
def test_nodes_see_what_they_descend_from(kind, steady):
    """A tree of 64 nodes and a small one beside a sequence without; unseen keys are NaN."""
    dice, reference, kernels = random.Random(kind), ReferenceKernels(), TritonKernels(steady=steady)
    kv = {"latent": KVSpec("latent", 1, 136, 128), "window": KVSpec("window", 2, 64, 64, 40)}.get(
        kind, KVSpec("full", 2, 64, 64)
    )
    spec = attention_of(kv, "cuda")
    ours, theirs = (PagedBatch((kv,), k, dtype=torch.bfloat16, blocks=80, device="cuda") for k in (kernels, reference))
    before = (torch.randn(240, width(kv), device="cuda") * 0.5).bfloat16()
    for batch, backend in ((ours, kernels), (theirs, reference)):
        backend.prepare_qkv(before, spec, batch.step([("a", 61), ("b", 160), ("c", 19)]))
    for chunk in (1, 40):
        grants = [("a", 9), ("c", chunk), ("b", 65)]
        trees = {seq: grown(grants[seq][1] - 1, dice) for seq in (0, 2)}
        x = (torch.randn(74 + chunk, width(kv), device="cuda") * 0.5).bfloat16()
        mine, other = (as_trees(batch.step(grants), trees) for batch in (ours, theirs))
        found, expected = (k.attend(x, spec, ctx) for k, ctx in ((kernels, mine), (reference, other)))
        assert (found.float() - expected.float()).norm() < 0.02 * expected.float().norm()
    assert kernels.waits == 0 and not any(count["fallbacks"] for count in kernels.counters().values())


def test_walks_and_moves():
    """As the reference has them, bit for bit."""
    kernels, reference, dice = TritonKernels(), ReferenceKernels(), random.Random(0)
    for _ in range(20):
        trees = [[dice.randint(0, j) for j in range(dice.randint(1, 64))] for _ in range(7)]
        tokens = torch.randint(0, 2, (12, 200), dtype=torch.int32)
        length, computed, rows = (
            torch.randint(1, 120, (12,)),
            torch.zeros(12, dtype=torch.int64),
            torch.randperm(12)[:7],
        )
        starts = torch.tensor([0, *(1 + len(tree) for tree in trees[:-1])]).cumsum(0)
        counts, deep = torch.tensor([len(tree) for tree in trees]), torch.randint(1, 17, (7,))
        marked = torch.randint(-1, 2, (int(counts.sum()) + 7,))
        parents = torch.tensor([tree + [0] * (64 - len(tree)) for tree in trees])
        given = [torch.stack((rows, starts, counts, deep)), parents, marked, tokens, length, computed]
        mine, other = ([t.clone().to(d) for t in given] for d in ("cuda", "cpu"))
        found = kernels.accept_(mine[0], 16, *mine[1:])
        wanted = reference.accept_(other[0], 16, *other[1:])
        for a, b in zip((*found, *mine), (*wanted, *other), strict=True):
            assert torch.equal(a.cpu(), b)
    pools = [KVPool(make_layout((KVSpec("full", 2, 64, 64),) * 3, 16, KVFormat(t)), [30], "cuda") for t in FORMATS]
    slots = torch.randperm(480, device="cuda")[:170].view(10, 17)
    path = torch.arange(17, device="cuda").expand(10, -1).clone()
    for row in range(1, 10):
        path[row, 1:5] = torch.tensor(sorted(dice.sample(range(1, 17), 4)))
    for pool in pools:
        pool.storage[0].view(torch.uint8).random_(255)
        wanted = KVPool(pool.layout, [30], "cuda")
        wanted.storage[0].copy_(pool.storage[0])
        kernels.move_kv_(pool.views, slots.gather(1, path), slots)
        reference.move_kv_(wanted.views, slots.gather(1, path), slots)
        assert torch.equal(wanted.storage[0], pool.storage[0])
