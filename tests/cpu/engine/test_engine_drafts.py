"""The n-gram drafter guesses; it never changes a byte."""

from __future__ import annotations

import os

import pytest
from tests.cpu.engine.engine_draft_models_helpers import PARAMETERS, PROMPTS
from tests.cpu.engine.engine_families_helpers import ALL, ONE_OF_EACH, Family
from tests.cpu.engine.engines import BACKENDS, OTHER, check_nothing_left, exact, greedy, run
from tests.cpu.engine.engines import open_usual as open_llm

from tokenmill import SamplingParams

DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}}
DEPTHS = [1, 2, 3]
FEW = ("llama", "gemma3", "deepseek-v2", "gpt-oss")
FAMILIES = ONE_OF_EACH if os.environ.get("TOKENMILL_FAMILIES") else FEW
"""With one plan in flight the host drafts, with more of them the device does."""


@pytest.mark.parametrize("depth", DEPTHS[:2])
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_change_no_family(name, depth, tmp_path):
    family = Family(ALL[name], tmp_path)
    prompts = [(p[:7] * 5)[:40] for p in family.prompts[:3]] + family.prompts[3:5]
    params = [greedy(48, logprobs=2), *[SamplingParams(seed=i, max_tokens=48, logprobs=0) for i in range(4)]]
    with family.open() as llm:
        wanted = run(llm, prompts, params)
    with family.open(**DRAFTS, num_blocks=40, depth=depth) as llm:
        found = run(llm, prompts, params)
        counters = llm.engine.scheduler.counters
        assert counters.drafted > counters.accepted > 0
        check_nothing_left(llm.engine)
    assert [exact(o) for o in found] == [exact(o) for o in wanted]


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    """A model whose next token depends on the last one alone, so that its text runs in a circle."""
    import torch
    from safetensors.torch import load_file, save_file

    from tokenmill.testing.tiny import make_tiny

    folder = make_tiny(tmp_path_factory.mktemp("parrot"), hidden=32, layers=1, architecture="llama")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_repetitive_text_gives_more_than_one_and_a_half_tokens_per_step(backend, depth, parrot):
    with open_llm(parrot, kernels=backend) as llm:
        wanted = run(llm, [[5, 9, 200]], greedy(120))
    with open_llm(parrot, kernels=backend, depth=depth, **DRAFTS) as llm:
        found = run(llm, [[5, 9, 200]], greedy(120))
        counters = llm.engine.scheduler.counters
        assert counters.output_tokens / counters.steps > 1.5
        if depth > 1:
            assert (
                not llm.engine.scheduler.roster.drafter.drafter.indexes and llm.engine.executor.runner.drafter.most == 4
            )
    assert [exact(o) for o in found] == [exact(o) for o in wanted]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_rows_of_any_length_try_drafts_in_one_recorded_step(kv_cache_dtype, tiny):
    """A recording serves all ways in which so many tokens fall to rows, and contexts of any number of chunks."""
    options = {"max_model_len": 1200, "kv_cache_dtype": kv_cache_dtype, "enable_prefix_caching": False}
    circle = list(range(40, 240, 7))
    prompts = [(circle * 40)[n : n + count] for n, count in enumerate((40, 505, 1020, 90))]
    params = [greedy(count, logprobs=2) for count in (60, 25, 60, 40)]
    with open_llm(tiny, **options) as llm:
        wanted = run(llm, prompts, params)
    with open_llm(tiny, **options, **DRAFTS) as llm:
        tapes = next(r.recordings for r in llm.engine.executor.runner.recorders if hasattr(r.layout, "members"))
        for _ in range(2):
            assert [exact(o) for o in run(llm, prompts, params)] == [exact(o) for o in wanted]
        counters = llm.engine.scheduler.counters
        assert tapes.made and counters.drafted > counters.accepted > 20


def test_a_row_with_drafts_of_the_device_is_in_two_plans_at_a_time(parrot):
    with open_llm(parrot, depth=2, **DRAFTS) as llm:
        scheduler, guesses = llm.engine.scheduler, []
        honest = scheduler.plan

        def plan():
            made = honest()
            if made is not None and len(scheduler.flying) == 2:
                guesses.append(sorted(made.guesses.values()))
            return made

        scheduler.plan = plan
        run(llm, [[5, 9, 200], [7, 3]], greedy(60))
        assert len(guesses) > scheduler.counters.steps * 0.8
        assert guesses.count([4, 4]) > len(guesses) / 2


FEATURES = {
    "plain": {},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "stop string": {"stop": ["a", "er", "m"], "min_tokens": 9},
    "stop ids": {"stop_token_ids": list(range(40, 60))},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 4},
    "samples": {"temperature": 1.0, "n": 3, "seed": 8, "logprobs": 1},
    "bias": {"logit_bias": {7: 30.0, 8: 29.0}, "bad_words": ["mill"], "allowed_token_ids": [7, 8, 9, 10]},
    "best of": {"temperature": 1.0, "n": 1, "best_of": 3, "seed": 8},
    "beams": {"use_beam_search": True, "n": 3},
    "choice": {"structured_outputs": {"choice": ["mill mill mill mill", "mill mill miller", "flour"]}},
    "choice with logprobs": {"structured_outputs": {"choice": ["mill mill mill mill", "flour"]}, "logprobs": 2},
    "processor": {"logits_processors": [lambda said, x: x + (len(said) % 3 == 0) * 0.5 * (x == x[said[-1:] or [0]])]},
}


@pytest.mark.parametrize("depth", DEPTHS[:2])
@pytest.mark.parametrize("title", FEATURES)
def test_drafts_leave_every_feature_alone(title, depth, tiny, parrot):
    more = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, **FEATURES[title]}
    params = SamplingParams(**more)
    prompts = [" mill mill mill mill mill", "flour becomes flour becomes flour becomes", "mill mill mill flour"]
    for folder in (tiny, parrot)[depth - 1 :]:  # what the device drafts is the same, so the second half is enough
        with open_llm(folder) as llm:
            wanted = run(llm, prompts, params)
        with open_llm(folder, **DRAFTS, num_blocks=60, depth=depth) as llm:
            found = run(llm, prompts, params)
            while llm.engine.flying:  # planned before the last token was known to be the last
                llm.engine.step()
            check_nothing_left(llm.engine)
        assert [exact(o) for o in found] == [exact(o) for o in wanted]
        for a, b in zip(found, wanted, strict=True):  # to the last bit, however many tokens came at a time
            assert [o.cumulative_logprob for o in a.outputs] == [o.cumulative_logprob for o in b.outputs]


ENGINES = {
    "chunks": {"max_num_batched_tokens": 16},
    "a token at a time": {"max_num_batched_tokens": 1},
    "preemption": {"num_blocks": 14},
    "as short as can be": {"max_model_len": 50},
    "few rows": {"max_num_seqs": 2},
    "blocks of one token": {"block_size": 1, "num_blocks": 160},
    "no prefix cache": {"enable_prefix_caching": False},
    "eager": {"enforce_eager": True},
    "other kernels": {"kernels": OTHER},
    "three plans in flight": {"depth": 3, "num_blocks": 14, "max_num_batched_tokens": 24},
    "as on a GPU": {},
    "another process": {"executor": "process", "depth": None},
}


@pytest.mark.parametrize("title", ENGINES)
def test_drafts_of_the_device_in_every_engine(title, parrot):
    """Prompts share a beginning and come twice, so that the second time is served by the prefix cache."""
    options = {"max_model_len": 64, "block_size": 8, **ENGINES[title]}
    plain = {k: v for k, v in options.items() if k in ("max_model_len", "kernels")}
    with open_llm(parrot, **plain, enforce_eager=True, depth=1) as llm:
        wanted = run(llm, PROMPTS, PARAMETERS)
    with open_llm(parrot, **{"depth": 2, **DRAFTS, **options}) as llm:
        if "GPU" in title:
            llm.engine.executor.lazy = False  # submitting computes
        found = [run(llm, PROMPTS, PARAMETERS) for _ in range(2)]
        counters = llm.engine.scheduler.counters
        assert counters.accepted > 0 or title == "a token at a time"
        assert counters.preemptions > 0 or "num_blocks" not in options or title.startswith("blocks")
        assert counters.cached_tokens > 0 or "cache" in title
        check_nothing_left(llm.engine)
    for outputs in found:
        assert [exact(o) for o in outputs] == [exact(o) for o in wanted]
