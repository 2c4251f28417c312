"""Several GPUs against one, in processes of their own; skipped where there is one."""

from __future__ import annotations

import pytest
import torch
from test_gpu_engine import CONFIG, agreement, ids, make, model, prompts  # noqa: F401

from tokenmill import SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none here")
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"quantization": "fp8"}])
def test_two_devices_agree_with_one(model, options):  # noqa: F811
    asked = prompts(24)
    narrow = {"dtype": "bfloat16"} if "quantization" in options else {"dtype": "float32"}
    with make(model, **narrow, **options) as llm:
        expected = ids(llm.generate(asked, PARAMS, use_tqdm=False))
    with make(model, **narrow, **options, tensor_parallel_size=2) as llm:
        found = ids(llm.generate(asked, PARAMS, use_tqdm=False))
    assert agreement(found, expected) > (0.3 if "quantization" in options else 0.97)


def test_deterministic_ranks_give_the_bytes_of_one(model):  # noqa: F811
    asked = prompts(12)
    with make(model, deterministic=True) as llm:
        expected = ids(llm.generate(asked, PARAMS, use_tqdm=False))
    with make(model, deterministic=True, tensor_parallel_size=2) as llm:
        assert ids(llm.generate(asked, PARAMS, use_tqdm=False)) == expected


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}])
def test_two_stages_agree_with_one(model, options):  # noqa: F811
    asked = prompts(24)
    with make(model, dtype="float32", **options) as llm:
        expected = ids(llm.generate(asked, PARAMS, use_tqdm=False))
    with make(model, dtype="float32", **options, pipeline_parallel_size=2) as llm:
        found = ids(llm.generate(asked, PARAMS, use_tqdm=False))
    assert agreement(found, expected) > 0.97


def test_engines_on_devices_of_their_own(model):  # noqa: F811
    asked = prompts(24)
    with make(model, dtype="float32") as llm:
        expected = ids(llm.generate(asked, PARAMS, use_tqdm=False))
    with make(model, dtype="float32", data_parallel_size=2) as llm:
        assert sorted(part.executor.ranks[0].process.pid for part in llm.engine.parts)
        assert agreement(ids(llm.generate(asked, PARAMS, use_tqdm=False)), expected) > 0.97
