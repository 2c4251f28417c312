"""The n-gram drafter guesses; it never changes a byte."""

from __future__ import annotations

import pytest
from engines import BACKENDS, check_nothing_left, exact, greedy, open_llm, run
from test_engine_families import ONE_OF_EACH, Family

from tokenmill import SamplingParams

DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_drafts_change_no_family(name, tmp_path):
    family = Family(name, tmp_path)
    prompts = [(p[:7] * 5)[:40] for p in family.prompts[:3]] + family.prompts[3:5]
    params = [greedy(48, logprobs=2), *[SamplingParams(seed=i, max_tokens=48, logprobs=0) for i in range(4)]]
    with family.open() as llm:
        wanted = run(llm, prompts, params)
    with family.open(**DRAFTS, num_blocks=40) as llm:
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_repetitive_text_gives_more_than_one_and_a_half_tokens_per_step(backend, parrot):
    with open_llm(parrot, kernels=backend) as llm:
        wanted = run(llm, [[5, 9, 200]], greedy(120))
    with open_llm(parrot, kernels=backend, **DRAFTS) as llm:
        found = run(llm, [[5, 9, 200]], greedy(120))
        counters = llm.engine.scheduler.counters
        assert counters.output_tokens / counters.steps > 1.5
    assert [exact(o) for o in found] == [exact(o) for o in wanted]


PARAMETERS = {
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


@pytest.mark.parametrize("title", PARAMETERS)
def test_drafts_leave_every_feature_alone(title, tiny, parrot):
    more = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, **PARAMETERS[title]}
    params = SamplingParams(**more)
    prompts = [" mill mill mill mill mill", "flour becomes flour becomes flour becomes", "mill mill mill flour"]
    for folder in (tiny, parrot):
        with open_llm(folder) as llm:
            wanted = run(llm, prompts, params)
        with open_llm(folder, **DRAFTS, num_blocks=60) as llm:
            found = run(llm, prompts, params)
            check_nothing_left(llm.engine)
        assert [exact(o) for o in found] == [exact(o) for o in wanted]
        for a, b in zip(found, wanted, strict=True):  # added up in other groups: the last bit may differ
            assert [o.cumulative_logprob for o in a.outputs] == [
                o.cumulative_logprob and pytest.approx(o.cumulative_logprob, rel=1e-12) for o in b.outputs
            ]
