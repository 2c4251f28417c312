"""Sleep on a GPU: the device gets its memory back, recordings stay, and answers are those of before.

What the device has free is measured where nobody else is at work (-n 0).
"""

from __future__ import annotations

import os

import pytest
import torch

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import BusyError
from tokenmill.testing.tiny import make_tiny

PROMPTS = [[1, 2, 3], [4, 5] * 40, list(range(9, 30))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def said(llm):
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


ALONE = "PYTEST_XDIST_WORKER" not in os.environ


def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def recorded(llm):
    found = [dict(each.recordings.made) for each in llm.engine.executor.runner.recorders]
    assert any(found), "steps were recorded"
    return found


@pytest.mark.parametrize("quantization", [None, "int4", "fp8"])
def test_memory_goes_and_comes_back(quantization, tmp_path):
    folder = make_tiny(tmp_path / "wide", hidden=1024, heads=8, kv_heads=8, layers=8, vocab=16000)
    cache = 1 << 30
    options = {"dtype": "bfloat16", "device": "cuda", "quantization": quantization, "max_num_seqs": 8,
               "deterministic": quantization is None, "max_model_len": 256, "enable_sleep_mode": True,
               "kv_cache_memory_bytes": cache, "enable_prefix_caching": True}  # fmt: skip
    with LLM(str(folder), **options) as llm:
        before, runner = said(llm), llm.engine.executor.runner
        bed, steps = runner.sleeper.bed, recorded(llm)
        held = bed.weights.mapped + bed.cache.mapped
        assert bed.weights.used >= 0.95 * llm.built.facts.weight_bytes
        for level in (1, 1, 2, 1):
            awake = free()
            llm.sleep(level)
            assert not bed.weights.awake and not bed.cache.awake
            if ALONE:
                assert free() - awake >= 0.98 * held, "weights and cache have been given back"
            with pytest.raises(BusyError):
                said(llm)
            llm.wake_up(["weights"])
            assert llm.is_sleeping
            llm.wake_up()
            assert bed.weights.mapped + bed.cache.mapped == held
            if ALONE:
                assert awake - free() <= 64 << 20
            assert said(llm) == before
            now = recorded(llm)
            assert all(each[key] is made for each, old in zip(now, steps, strict=True) for key, made in old.items())


def test_drafts_adapters_and_updates_survive(tmp_path):
    folder = make_tiny(tmp_path / "a", hidden=256, heads=4, kv_heads=2, vocab=512)
    other = make_tiny(tmp_path / "b", seed=5, hidden=256, heads=4, kv_heads=2, vocab=512)
    options = {"dtype": "bfloat16", "device": "cuda", "max_num_seqs": 8, "max_model_len": 256,
               "num_gpu_blocks_override": 200, "enable_sleep_mode": True, "deterministic": True}  # fmt: skip
    with LLM(str(other), **{**options, "enable_sleep_mode": False}) as fresh:
        wanted = said(fresh)
    drafts = {"model": str(folder), "num_speculative_tokens": 3}
    with LLM(str(folder), speculative_config=drafts, **options) as llm:
        before = said(llm)
        llm.sleep(1)
        llm.wake_up()
        assert said(llm) == before
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.update_weights(other / "model.safetensors")
        llm.wake_up(["kv_cache"])
        assert said(llm) == wanted
        llm.sleep(1)
        llm.wake_up()
        assert said(llm) == wanted, "level 1 keeps what was updated"


def test_two_models_share_a_device(tmp_path):
    sizes = {"hidden": 512, "heads": 8, "kv_heads": 8, "vocab": 4000}
    folders = [make_tiny(tmp_path / str(seed), seed=seed, **sizes) for seed in (1, 2)]
    options = {"dtype": "bfloat16", "device": "cuda", "max_num_seqs": 8, "max_model_len": 256,
               "enable_sleep_mode": True, "kv_cache_memory_bytes": 256 << 20}  # fmt: skip
    models = [LLM(str(folder), **options) for folder in folders]
    try:
        right = []
        for llm in models:
            right.append(said(llm))
            llm.sleep()
        for turn in range(6):
            llm = models[turn % 2]
            llm.wake_up()
            assert said(llm) == right[turn % 2]
            llm.sleep()
    finally:
        for llm in models:
            llm.close()
