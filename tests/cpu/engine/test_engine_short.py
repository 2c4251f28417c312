"""Short steps with prompts or drafts, filled up to rungs with the spare row: the tokens of steps of their own size.

Recordings exist on a GPU only; here one is made again at each replay, which fills the same tensors from equal inputs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.runner.short import ShortRecorder

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a fox. " * 4,
    "1 2 3 4 1 2 3 4 1 2 3 4 1 2",
    "Hello",
    "What is a KV cache? " * 9,
    "中国的首都是",
]


class Again:
    """Records nothing: what was asked for is computed at each replay."""

    def record(self, compute):
        return SimpleNamespace(replay=compute)


class Never(int):
    """A count of waits that stays."""

    def __add__(self, other):
        return self


class Patient(ShortRecorder):
    """The reference kernels ask the device for lengths, which cannot be recorded; here that does no harm."""

    def __init__(self, runner):
        super().__init__(runner.model, runner.kernels, runner.rows, runner.pool, Again())
        self.plans = []

    def _find(self, key):
        before, self.kernels.waits = self.kernels.waits, Never()
        try:
            return super()._find(key)
        finally:
            self.kernels.waits = before

    def run(self, plan):
        self.plans.append(plan)
        return super().run(plan)


def answers(options, short):
    made = {"kernels": "reference", "max_num_seqs": 12, "max_model_len": 400, "num_gpu_blocks_override": 60}
    with LLM("demo", **made, **options) as llm:
        runner = llm.engine.executor.runner
        if short:
            waiting = ShortRecorder(runner.model, runner.kernels, runner.rows, runner.pool, Again())
            waiting.warm()
            assert not waiting.possible and not waiting.made
            runner.short = Patient(runner)
            runner.short.warm()
            assert len(runner.short.made) == len(runner.short.tokens) > 3
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in found], runner.short.plans if short else []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 64},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["plain", "chunks", "drafts"],
)
def test_the_same_tokens(options):
    expected, _ = answers(options, short=False)
    found, replayed = answers(options, short=True)
    assert found == expected
    assert replayed, "some steps were short"
    assert any(len(plan.rows) > 1 for plan in replayed)
