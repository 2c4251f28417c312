"""Decode steps that are recorded natively give the bytes of steps that are not; what cannot be recorded is not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from engines import BACKENDS, exact, follow, greedy, open_llm, run
from test_engine_families import Family
from test_engine_same_bytes import stories

from tokenmill import LLM, SamplingParams

pytestmark = pytest.mark.skipif("auto" not in BACKENDS, reason="no native module")


def replay(llm: LLM):
    return llm.engine.executor.runner.kernels._replay


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int4"}, {"kv_dtype": "int8"}])
def test_recorded_steps_change_no_byte(tiny, options):
    requests = stories(16, 8)
    found = []
    for eager in (True, False):
        with open_llm(tiny, kernels="auto", enforce_eager=eager, **options) as llm:
            found.append(follow(llm, requests, None))
            if eager:
                assert replay(llm) is None
            else:
                assert replay(llm).possible and replay(llm).made
    for request in requests:
        assert exact(found[0][request.id]) == exact(found[1][request.id]), request


def test_tables_outgrow_a_recording(tiny):
    """16 positions a block, room for 64 at first: the recording is made again, and bytes stay."""
    params = greedy(40)
    prompts = [[5] * 20, [7] * 1100]
    found = []
    for eager in (True, False):
        with open_llm(tiny, kernels="auto", enforce_eager=eager, max_model_len=2048) as llm:
            found.append([run(llm, [prompt], params)[0].outputs[0].token_ids for prompt in prompts])
            if not eager:
                (made,) = replay(llm).made.values()
                assert made.ctx.groups[0].tables.shape[1] > 64
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "deepseek-v2", "qwen3"])
def test_families_with_and_without_recordings(family, tmp_path):
    made = Family(family, tmp_path)
    found = []
    for eager in (True, False):
        with made.open(kernels="auto", enforce_eager=eager) as llm:
            params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, ignore_eos=True)
            outputs = run(llm, made.prompts[:1], params)
            found.append([exact(output) for output in outputs])
            if not eager and family == "qwen3":
                assert replay(llm).made
            if not eager and family == "gpt-oss":  # experts are chosen by torch
                assert not replay(llm).possible and not replay(llm).made
    assert found[0] == found[1]


def test_a_broken_input_is_still_refused(tiny):
    with open_llm(tiny, kernels="auto") as llm, torch.inference_mode():
        run(llm, [[1, 2, 3]], greedy(8))
        made = replay(llm).made[1]
        made.tokens.fill_(10**6)
        with pytest.raises(ValueError, match="out of range"):
            made.tape.replay()
        made.tokens.fill_(1)
        made.ctx.groups[0].slots.fill_(2**40)
        with pytest.raises(ValueError, match="outside the pages"):
            made.tape.replay()
        assert torch.isfinite(made.hidden).all()


def test_recording_loads_no_compiler():
    """torch imports its compiler for whoever watches it and does not decline: a second's standstill, and its memory."""
    code = (
        "import sys, torch; from tokenmill.kernels.cpu.replay import _Watch\n"
        "with torch.inference_mode(), _Watch() as watch: torch.empty(2)\n"
        "assert watch.kept and 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
