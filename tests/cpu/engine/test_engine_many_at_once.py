"""Many requests at once: the device is at work before the last one has been looked at."""

from __future__ import annotations

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.engine.steps.engine import Engine
from tokenmill.testing.tiny import make_tiny

PROMPTS = [{"prompt_token_ids": [3 + (7 * i + k) % 90 for k in range(40)]} for i in range(12)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("many") / "tiny")


@pytest.fixture
def begun(monkeypatch):
    """How many requests were open at each plan that was sent before all were there."""
    seen, own = [], Engine.begin

    def begin(self, tokens):
        before = len(self.flying)
        own(self, tokens)
        if len(self.flying) > before:
            seen.append(len(self.scheduler.roster.groups))

    monkeypatch.setattr(Engine, "begin", begin)
    return seen


def opened(folder, **options):
    return LLM(str(folder), device="cpu", max_num_batched_tokens=100, **options)


def said(llm, prompts=PROMPTS, priority=None):
    found = llm.generate(prompts, PARAMS, use_tqdm=False, priority=priority)
    assert not llm.engine.has_work
    return [each.outputs[0].token_ids for each in found]


@pytest.fixture
def wanted(folder, begun):
    with opened(folder) as llm:
        found = said(llm)
    assert not begun, "here a step is computed by whoever asks for it"
    return found


def test_a_full_plan_does_not_wait_for_the_other_requests(folder, wanted, begun):
    with opened(folder, executor="process") as llm:
        assert said(llm) == wanted
        assert begun == [3, 5], "two plans may be in flight, of 100 tokens each"
        begun.clear()
        assert said(llm, PROMPTS[:2]) == wanted[:2] and not begun
    with opened(folder, data_parallel_size=2) as llm:
        assert said(llm) == wanted
    assert sorted(begun) == [2, 3, 5, 5], "the first five requests are two engines'"


def test_where_the_last_may_be_the_first_all_are_awaited(folder, wanted, begun):
    ranks = [-i for i in range(len(PROMPTS))]
    with opened(folder, executor="process", scheduling_policy="priority") as llm:
        assert said(llm, priority=ranks) == wanted and not begun
    with opened(folder, executor="process", batching="static") as llm:
        assert said(llm) == wanted and not begun
