"""A choice constraint: one of the strings and nothing else, however it is computed."""

from __future__ import annotations

import itertools

import pytest
from tests.cpu.engine.engines import check_nothing_left, exact, open_llm, run

from tokenmill import SamplingParams

CHOICES = ["yes", "yes, of course", "no", "no!", "the mill grinds grain", "the mill", "風車🌾", "def grind(grain):"]
ENGINES = {
    "here": {},
    "depth 2": {"depth": 2},
    "process": {"executor": "process"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
    "drafts, depth 2": {"depth": 2, "speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
    "preemption": {"num_blocks": 5, "max_model_len": 80, "long_prefill_token_threshold": 5},
    "preemption, depth 2": {"num_blocks": 5, "max_model_len": 80, "depth": 2},
}
PROMPTS = ["Will it turn?", "the mill grinds grain, the mill grinds", "yes, of course, yes, of course, yes, no! no!"]


def parameters():
    """Greedy and sampled, one and several, with and without logprobs."""
    found = []
    for seed, (n, logprobs) in enumerate(itertools.product((1, 4), (None, 1))):
        found.append(
            SamplingParams(
                n=n,
                seed=seed,
                temperature=2.0,
                max_tokens=40,
                logprobs=logprobs,
                structured_outputs={"choice": CHOICES},
            )
        )
    found.append(SamplingParams(temperature=0.0, max_tokens=40, structured_outputs={"choice": CHOICES}))
    return found


@pytest.fixture(scope="module")
def expected(tiny):
    with open_llm(tiny, max_num_seqs=16) as llm:
        return [[exact(run(llm, [p], s)[0]) for p in PROMPTS] for s in parameters()]


@pytest.mark.parametrize("title", ENGINES)
def test_only_choices_are_said(title, tiny, expected):
    said = set()
    with open_llm(tiny, **{"max_num_seqs": 6, **ENGINES[title]}) as llm:
        every = [(p, s) for s in parameters() for p in PROMPTS]
        free = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
        prompts = [p for p, _ in every] + ["no constraint at all"] * 3
        outputs = run(llm, prompts, [s for _, s in every] + [free] * 3)
        for output in outputs[: len(every)]:
            for one in output.outputs:
                assert one.text in CHOICES and one.finish_reason == "stop", one
                said.add(one.text)
        assert [exact(o) for o in outputs[: len(every)]] == [e for row in expected for e in row]
        if "preemption" in title:
            assert llm.engine.scheduler.counters.preemptions > 0
        check_nothing_left(llm.engine)
    assert len(said) >= 4


def test_a_choice_that_does_not_fit_ends_at_its_length(tiny):
    with open_llm(tiny) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, structured_outputs={"choice": ["the mill grinds grain"]})
        (output,) = run(llm, ["x"], params)
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 3
        assert "the mill grinds grain".startswith(output.outputs[0].text)


def test_work_that_is_enqueued_ahead_waits_for_the_masks_before_it(tiny):
    """As on a GPU: a plan's forward pass begins when it is submitted, and its tokens come from the plan before it."""
    params = [SamplingParams(temperature=0.0, max_tokens=12, structured_outputs={"regex": "[a-f ]{9}[0-9]{3}"})]
    params = params * 4 + [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 2
    prompts = [PROMPTS[i % 3] + str(i) for i in range(6)]
    with open_llm(tiny) as llm:
        expected = [exact(o) for o in run(llm, prompts, params)]
    with open_llm(tiny, depth=2) as llm:
        llm.engine.executor.lazy = False
        assert [exact(o) for o in run(llm, prompts, params)] == expected
        check_nothing_left(llm.engine)
