"""The engine on the device: recorded steps, overlap, and the same tokens with and without them."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.gpu_engine_helpers import agreement, ids, make, prompts
from tests.gpu.gpu_engine_helpers import model as shared_model

from tokenmill import SamplingParams

model = shared_model


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"pipeline_depth": 1}])
def test_like_the_reference(model, options):
    asked = prompts(24)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with make(model, dtype="float32", kernels="reference", enforce_eager=True) as llm:
        expected = ids(llm.generate(asked, params, use_tqdm=False))
    with make(model, dtype="float32", **options) as llm:
        found = ids(llm.generate(asked, params, use_tqdm=False))
    assert agreement(found, expected) > 0.97


def test_sampled_rows_do_not_mind_the_overlap(model):
    asked = prompts(12)
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=16, ignore_eos=True) for i in range(12)]
    params[3] = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
    params[5] = SamplingParams(temperature=1, seed=1, max_tokens=16, ignore_eos=True, repetition_penalty=1.3)
    with make(model, dtype="float32") as llm:
        first = llm.generate(asked, params, use_tqdm=False)
    with make(model, dtype="float32", pipeline_depth=1, enforce_eager=True) as llm:
        second = llm.generate(asked, params, use_tqdm=False)
    assert agreement(ids(first), ids(second)) > 0.97
    assert len(first[3].outputs[0].logprobs) == 16


def test_blocks_and_memory_come_back(model):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with make(model, enable_prefix_caching=False) as llm:
        llm.generate(prompts(64), params, use_tqdm=False)
        pool = llm.engine.scheduler.tables.pools[0]
        free, memory = pool.available, torch.cuda.memory_allocated()
        for _ in range(8):
            llm.generate(prompts(150), params, use_tqdm=False)
        assert pool.available == free
        assert torch.cuda.memory_allocated() <= memory + (4 << 20)


def test_a_prefix_that_all_share(model):
    head = torch.randint(0, 2048, (300,)).tolist()
    asked = [{"prompt_token_ids": head + p["prompt_token_ids"][:20]} for p in prompts(40)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with make(model, dtype="float32") as llm:
        llm.generate(asked[:1], params, use_tqdm=False)
        found = ids(llm.generate(asked, params, use_tqdm=False))
    with make(model, dtype="float32", enforce_eager=True, enable_prefix_caching=False) as llm:
        expected = ids(llm.generate(asked, params, use_tqdm=False))
    assert agreement(found, expected) > 0.97


def test_deterministic_in_any_company(model):
    """bfloat16, near ties everywhere: one other bit would soon be another token."""
    asked = prompts(30)
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
        if i % 2
        else SamplingParams(temperature=0.9, seed=i, max_tokens=24, ignore_eos=True)
        for i in range(30)
    ]

    def run(picked, **options):
        with make(model, dtype="bfloat16", deterministic=True, enable_prefix_caching=False, **options) as llm:
            found = llm.generate([asked[i] for i in picked], [params[i] for i in picked], use_tqdm=False)
        scores = [
            [{t: e.logprob for t, e in line.items()} for line in o.outputs[0].logprobs] if o.outputs[0].logprobs else []
            for o in found
        ]
        return dict(zip(picked, zip(ids(found), scores, strict=True), strict=True))

    whole = run(range(30))
    assert run(range(30), max_num_batched_tokens=96, max_num_seqs=7) == whole
    some = run([3, 4, 17], enforce_eager=True)
    assert some == {i: whole[i] for i in some}
    alone = run([11])
    assert alone[11] == whole[11]
