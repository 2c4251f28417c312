"""Drafts as trees: whatever is guessed, in whatever shape, no byte changes.

A tree here is made by somebody who knows the text and now and then says something else, so that paths of every kind
stand: first children and last ones, whole lines and none.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from tests.cpu.engine.drafters import MOST, make_eagle, make_medusa
from tests.cpu.engine.engine_draft_models_helpers import STEM, plain_outputs
from tests.cpu.engine.engine_families_helpers import ALL, ONE_OF_EACH, Family
from tests.cpu.engine.engines import BACKENDS, OTHER, all_of_them, check_nothing_left, exact, greedy, run
from tests.cpu.engine.engines import open_usual as open_llm

from tokenmill import SamplingParams
from tokenmill.core.errors import UserError
from tokenmill.kernels import ReferenceKernels
from tokenmill.speculate.eagle_tree import Growth
from tokenmill.speculate.tree import likeliest_words
from tokenmill.testing.tiny import make_tiny

NODES = 9
FAMILIES = ONE_OF_EACH if os.environ.get("TOKENMILL_FAMILIES") else ("gemma3", "deepseek-v2", "gpt-oss")
SHAPE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("trees")
    heads = {"medusa": make_medusa(root / "medusa"), "eagle": make_eagle(root / "eagle")}
    return {"self": make_tiny(root / "target"), "eagle3": make_eagle(root / "eagle3", words=100), **heads}


def trees(folder, shape="best", **more):
    """--speculative-config."""
    nodes = {"num_speculative_tokens": NODES} if shape == "best" else {}
    config = {"method": "medusa", "model": str(folder), "speculative_token_tree": shape, **nodes, **more}
    return {"speculative_config": config}


def know(llm, texts, seed=0):
    """After each honest proposal its drafts become a tree around what will be said."""
    drafter, dice, shapes = llm.engine.executor.runner.drafter, random.Random(seed), set()
    honest, size = drafter.propose, llm.engine.executor.runner.model.spec.vocab_size

    def propose(step):
        honest(step)
        for row in step.row_list:
            known = int(step.rows.length[row])
            told = step.rows.tokens[row, :known].tolist()
            text = next((t for t in texts if t[:known] == told), told)
            lines, parents, drafts = [[]], [], []
            for _ in range(step.count):
                parent = dice.choice([n for n, line in enumerate(lines) if len(line) < MOST][-4:])
                at = known + len(lines[parent])
                right = at < len(text) and told + lines[parent] == text[:at] and dice.random() < 0.6
                drafts.append(text[at] if right else dice.randrange(size))
                lines.append([*lines[parent], drafts[-1]])
                parents.append(parent)
            step.rows.tokens[row, known : known + step.count] = torch.tensor(drafts, dtype=torch.int32)
            step.rows.parents[row, : step.count] = torch.tensor(parents)
            shapes.add(tuple(parents))

    drafter.propose = propose
    return shapes


def texts_of(outputs):
    return [[*o.prompt_token_ids, *part.token_ids] for o in outputs for part in o.outputs]


PROMPTS = [STEM + tail for tail in ([], [8], [1, 2, 3, 1, 2], [9] * 20, [4, 4], [7])]
PARAMETERS = [
    greedy(24, logprobs=1),
    greedy(25, repetition_penalty=1.3, frequency_penalty=0.4, bad_words=[" mill"]),
    SamplingParams(temperature=0.9, seed=3, max_tokens=24, n=3, ignore_eos=True),
    SamplingParams(temperature=0.4, top_k=8, seed=5, max_tokens=19, logprobs=2, min_tokens=4),
    greedy(24, no_repeat_ngram_size=2, presence_penalty=0.3),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, dry_multiplier=0.8, ignore_eos=True),
]
ENGINES = {
    "chunks": {"max_num_batched_tokens": 24},
    "preemption": {"num_blocks": 22},
    "as short as can be": {"max_model_len": 56},
    "blocks of one token": {"block_size": 1, "num_blocks": 260},
    "other kernels": {"kernels": OTHER},
    "no recordings": {"enforce_eager": True},
    "three plans in flight": {"depth": 3, "num_blocks": 24, "max_num_batched_tokens": 32},
    "as on a GPU": {"depth": 2},
    "8 bit keys": {"kv_cache_dtype": "int8"},
    "4 bit keys": {"kv_cache_dtype": "int4"},
}


@pytest.fixture(scope="module")
def plain(folders):
    return plain_outputs(folders["self"], PROMPTS, PARAMETERS)


@pytest.mark.parametrize("title", ENGINES)
def test_every_engine_gives_the_same_bytes(title, folders, plain):
    """Twice, so that the second time is served by the prefix cache."""
    options = {"max_model_len": 64, "block_size": 8, **ENGINES[title]}
    wanted = plain(**{k: v for k, v in options.items() if k in ("max_model_len", "kernels", "kv_cache_dtype")})
    with all_of_them(open_llm(folders["self"], **trees(folders["medusa"]), **options)) as llm:
        shapes = know(llm, texts_of(wanted))
        if "GPU" in title:
            llm.engine.executor.lazy = False  # submitting computes
        found = [run(llm, PROMPTS, PARAMETERS) for _ in range(2)]
        counters, kernels = llm.engine.scheduler.counters, llm.engine.executor.runner.kernels.counters()
        assert counters.preemptions > 0 or title != "preemption"
        assert counters.cached_tokens > 0 and counters.failures == 0
        assert counters.accepted > 60 and len(counters.accepted_at) == MOST and len(shapes) > 20
        assert kernels["move_kv_"]["calls"] > 10 and (not kernels["attention"]["fallbacks"] or "4 bit" in title)
        check_nothing_left(llm.engine)
    for outputs in found:
        assert [exact(o) for o in outputs] == [exact(o) for o in wanted]


@pytest.mark.parametrize("name", FAMILIES)
def test_trees_change_no_family(name, tmp_path):
    """Windows, latent keys, sinks."""
    family = Family(ALL[name], tmp_path)
    prompts = [(p[:7] * 5)[:40] for p in family.prompts[:3]]
    params = [greedy(48, logprobs=2), *[SamplingParams(seed=i, max_tokens=48, logprobs=0) for i in range(2)]]
    with family.open() as llm:
        wanted = run(llm, prompts, params)
        spec = llm.engine.executor.runner.model.spec
    heads = make_medusa(tmp_path / "medusa", hidden=spec.hidden_size, vocab=spec.vocab_size)
    with all_of_them(family.open(**trees(heads), num_blocks=60)) as llm:
        know(llm, texts_of(wanted))
        found = run(llm, prompts, params)
        assert llm.engine.scheduler.counters.accepted > 20
        check_nothing_left(llm.engine)
    assert [exact(o) for o in found] == [exact(o) for o in wanted]


@pytest.mark.parametrize("shape", ["best", SHAPE, str([tuple(path) for path in SHAPE])])
def test_heads_make_trees(shape, folders, plain):
    """What the heads themselves say, in a shape that is written down or found anew each time."""
    wanted = plain(max_model_len=64)
    with all_of_them(open_llm(folders["self"], **trees(folders["medusa"], shape), max_model_len=64)) as llm:
        found = run(llm, PROMPTS, PARAMETERS)
        assert llm.engine.scheduler.counters.drafted > 500
        check_nothing_left(llm.engine)
    assert [exact(o) for o in found] == [exact(o) for o in wanted]


@pytest.mark.parametrize(
    "name, title",
    [("eagle", "preemption"), ("eagle", "other kernels"), ("eagle3", "chunks"), ("eagle3", "three plans in flight")],
)
def test_heads_with_keys_of_their_own_make_trees(name, title, folders, plain):
    options = {"max_model_len": 64, "block_size": 8, **ENGINES[title]}
    wanted = plain(**{k: v for k, v in options.items() if k in ("max_model_len", "kernels")})
    config = trees(folders[name], method=name, num_speculative_tokens=7)
    with all_of_them(open_llm(folders["self"], **config, **options)) as llm:
        found = [run(llm, PROMPTS, PARAMETERS) for _ in range(2)]
        counters = llm.engine.scheduler.counters
        assert counters.drafted > 200 and counters.failures == 0
        check_nothing_left(llm.engine)
    for outputs in found:
        assert [exact(o) for o in outputs] == [exact(o) for o in wanted]


@pytest.mark.parametrize("shape", ["best", None])
@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3"])
def test_rows_that_are_filled_up(name, shape, folders, plain):
    """On a GPU three rows are computed as four: the spare row gets a tree, or a chain, too."""
    config = trees(folders[name], method=name)
    if shape is None:
        config["speculative_config"] |= {"speculative_token_tree": None, "num_speculative_tokens": MOST}
    wanted = plain(max_model_len=64)
    with all_of_them(open_llm(folders["self"], **config, max_model_len=64, kernels="reference")) as llm:
        llm.engine.executor.runner.drafter.choosing.exact = False
        found = run(llm, PROMPTS, PARAMETERS)
        assert llm.engine.scheduler.counters.failures == 0 < llm.engine.scheduler.counters.drafted
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
        check_nothing_left(llm.engine)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_an_eagle_tree_sees_what_its_chain_would(kernels, folders, plain):
    """One branch a level is a chain: it says what the chain says, whatever trees were verified in between."""
    said, texts = {}, texts_of(plain(max_model_len=64, kernels=kernels)[:1])
    for shape in (None, "best"):
        config = {"method": "eagle", "model": str(folders["eagle"]), "num_speculative_tokens": 3}
        if shape is not None:
            config |= {"speculative_token_tree": shape}
        with all_of_them(open_llm(folders["self"], speculative_config=config, kernels=kernels)) as llm:
            drafter = llm.engine.executor.runner.drafter
            if shape is not None:
                drafter.growth, drafter.levels = Growth(3, 3, 1), 3
            honest = drafter.propose

            def propose(step, honest=honest, shape=shape):
                honest(step)
                for row in step.row_list:
                    known = int(step.rows.length[row])
                    told = step.rows.tokens[row, : known + step.count].tolist()
                    said.setdefault(tuple(told[:known]), {})[shape] = told[known:]

            drafter.propose = propose
            if shape is not None:
                know(llm, texts)
            run(llm, PROMPTS[:1], PARAMETERS[0])
            assert (llm.engine.scheduler.counters.accepted > 5) == (shape is not None)
    both = [found for found in said.values() if len(found) == 2]
    assert len(both) > 8 and all(found[None] == found["best"] for found in both)


TOLD = {
    "pattern": {"structured_outputs": {"regex": "([0-9]{3} [a-z]{4} ){3}done"}, "temperature": 0.9, "seed": 5},
    "processor": {"logits_processors": [lambda said, x: x + (len(said) % 3 == 0) * 0.5 * (x == x[said[-1:] or [0]])]},
    "mirostat": {"mirostat": 2, "temperature": 0.9, "seed": 5},
    "beams": {"use_beam_search": True, "n": 2},
}


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_that_try_no_trees_beside_those_that_do(depth, folders):
    """Chains where the host has a say, nothing where states go from line to line or texts compete."""
    usual = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
    params = [SamplingParams(**{**usual, **more}) for more in ({}, *TOLD.values())]
    prompts = [" mill mill mill", "12345", "flour becomes flour", "flour", " mill"]
    with open_llm(folders["self"]) as llm:
        wanted = [run(llm, [p], q)[0] for p, q in zip(prompts, params, strict=True)]
    with all_of_them(open_llm(folders["self"], **trees(folders["medusa"]), depth=depth)) as llm:
        know(llm, texts_of(wanted))
        found = run(llm, prompts[:4], params[:4])
        tried = [o.metrics.drafted_tokens for o in found]
        assert tried[0] > 4 * MOST and tried[1] > 0 and tried[2] > 0 and tried[3] == 0
        found += run(llm, prompts[4:], params[4])
        check_nothing_left(llm.engine)
    assert [exact(o) for o in found] == [exact(o) for o in wanted]


@pytest.mark.parametrize("kernels", BACKENDS)
def test_a_tree_gets_on_by_more_than_a_chain(kernels, folders, plain):
    """As many nodes, of which one line is right: deeper or wider as the text wants it."""
    wanted = plain(max_model_len=64, kernels=kernels)[:1]
    with all_of_them(open_llm(folders["self"], **trees(folders["medusa"]), max_model_len=64, kernels=kernels)) as llm:
        know(llm, texts_of(wanted))
        (found,) = run(llm, PROMPTS[:1], PARAMETERS[0])
        counters = llm.engine.scheduler.counters
        assert counters.output_tokens / counters.steps > 1.8
        assert (found.metrics.drafted_tokens, found.metrics.accepted_tokens) == (counters.drafted, counters.accepted)


REFUSED = {
    "no list": ({"speculative_token_tree": "chain"}, '"best" or a list'),
    "no numbers": ({"speculative_token_tree": [["a"]]}, '"best" or a list'),
    "a gap": ({"speculative_token_tree": [[0], [1, 0]]}, r"\[1, 0\] goes on from \[1\]"),
    "twice": ({"speculative_token_tree": [[0], [0]]}, "twice"),
    "another count": ({"speculative_token_tree": [[0], [1]], "num_speculative_tokens": 3}, "there are 2 paths"),
    "too many": ({"speculative_token_tree": [[0] * n for n in range(1, 17)] + [[0] * 17]}, "up to 16"),
    "too deep for its heads": ({"speculative_token_tree": [[0] * n for n in range(1, 5)]}, "4 levels.*3 heads"),
    "a list for EAGLE": ({"method": "eagle", "speculative_token_tree": [[0]]}, "likeliest nodes"),
    "another method": ({"method": "ngram", "model": None, "speculative_token_tree": "best"}, "speculative_token_tree"),
}


@pytest.mark.parametrize("title", REFUSED)
def test_what_is_refused(title, folders):
    config, said = REFUSED[title]
    config = {"method": "medusa", "model": str(folders["medusa"]), **config}
    with pytest.raises(UserError, match=said):
        open_llm(folders["self"], speculative_config={k: v for k, v in config.items() if v is not None})


def test_models_with_states_are_refused(folders, tmp_path):
    family = Family(ALL["qwen3-next"], tmp_path)
    with pytest.raises(UserError, match="trees are not built for models with recurrent layers"):
        family.open(**trees(folders["medusa"]))


def test_backends_whose_attention_knows_no_paths_are_refused(folders, monkeypatch):
    honest = ReferenceKernels.__init__

    def plain(self, **options):
        honest(self, **options)
        self.trees = False

    monkeypatch.setattr(ReferenceKernels, "__init__", plain)
    with pytest.raises(UserError, match="trees are not built on cpu; without it drafts are chains"):
        open_llm(folders["self"], **trees(folders["medusa"]))


@pytest.mark.skipif(not os.environ.get("TOKENMILL_FAMILIES"), reason="processes start for as long as all else takes")
@pytest.mark.parametrize("options", [{"executor": "process"}, {"tensor_parallel_size": 2}], ids=str)
def test_other_processes(options, folders, plain):
    """Every rank grows the same trees and moves its own keys."""
    wanted = plain(max_model_len=64)
    with all_of_them(
        open_llm(folders["self"], **trees(folders["eagle"], method="eagle"), max_model_len=64, **options)
    ) as llm:
        found = run(llm, PROMPTS, PARAMETERS)
        assert llm.engine.scheduler.counters.drafted > 200
        check_nothing_left(llm.engine)
    assert [exact(o) for o in found] == [exact(o) for o in wanted]


def test_infinite_scores_of_a_damaged_drafter_warn_nobody():
    words, _ = likeliest_words(torch.tensor([[1.0, torch.inf, torch.inf], [0.0, 2.0, 1.0]]), 2)
    assert words.tolist()[1] == [1, 2]
