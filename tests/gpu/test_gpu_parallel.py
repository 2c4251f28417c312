"""Several GPUs against one, in processes of their own; skipped where there is one."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch
from tests.gpu.gpu_engine_helpers import CONFIG, agreement, ids, make, model, prompts  # noqa: F401
from tests.gpu.gpu_lora_helpers import adapters, asked  # noqa: F401
from tests.gpu.gpu_lora_helpers import make as make_adapted
from tests.gpu.gpu_lora_helpers import model as adapted  # noqa: F401

from tokenmill import SamplingParams
from tokenmill.core.config import LINKS, environment_with
from tokenmill.core.drafting import AllOfThem

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
    if "quantization" in options:  # each rank rounds its own part of the activations: later tokens go their own ways
        assert sum(a[0] == b[0] for a, b in zip(found, expected, strict=True)) > 0.7 * len(found)
    else:
        assert agreement(found, expected) > 0.97


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


@pytest.mark.parametrize("several", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}])
def test_adapters_over_devices(adapted, adapters, several, options):  # noqa: F811
    wanted, found = [], []
    prompt = [{"prompt_token_ids": [7 * i + 3 for i in range(5 + 3 * n)]} for n in range(14)]
    chosen = [None if each is not None and each.lora_name == "a7" else each for each in asked(adapters, 14)]  # DoRA
    for answers, more in ((wanted, {}), (found, several)):
        with make_adapted(adapted, dtype="float32", **options, **more) as llm:
            answers += ids(llm.generate(prompt, PARAMS, use_tqdm=False, lora_request=chosen))
    assert agreement(found, wanted) > 0.97


@pytest.mark.parametrize("several", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_drafts_over_devices(model, several):  # noqa: F811
    asked_for, drafts = prompts(12), {"speculative_config": {"model": str(model), "num_speculative_tokens": 3}}
    with make(model, dtype="float32") as llm:
        expected = ids(llm.generate(asked_for, PARAMS, use_tqdm=False))
    with make(model, dtype="float32", **several, **drafts) as llm:
        llm.engine.scheduler.ahead.control = AllOfThem(3)  # whether they pay is a matter of time
        found = ids(llm.generate(asked_for, PARAMS, use_tqdm=False))
        assert llm.engine.scheduler.counters.drafted
    assert agreement(found, expected) > 0.97


def test_long_sums_are_exchanged_in_pieces(tmp_path):
    """To the bit, however late one rank is."""
    script = pathlib.Path(__file__).with_name("gpu_exchange_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "ranks")],
            env=environment_with(LINKS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            said, _ = rank.communicate(timeout=300)
            assert "EXCHANGED" in said, said[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
