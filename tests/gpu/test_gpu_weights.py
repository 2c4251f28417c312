"""Weights that change in place on a GPU: recorded steps compute with the new ones, in every packed format."""

from __future__ import annotations

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.testing.tiny import make_tiny

PROMPTS = [[1, 2, 3], [4, 5] * 40, list(range(9, 30))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def said(llm):
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_recorded_steps_follow(architecture, quantization, tmp_path):
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "vocab": 512, "architecture": architecture}
    old, new = make_tiny(tmp_path / "a", **sizes), make_tiny(tmp_path / "b", seed=5, **sizes)
    options = {"dtype": "bfloat16", "device": "cuda", "quantization": quantization,
               "deterministic": quantization is None, "max_num_seqs": 8, "max_model_len": 256,
               "num_gpu_blocks_override": 200, "enable_prefix_caching": False}  # fmt: skip
    with LLM(str(new), **options) as fresh:
        wanted = said(fresh)
    with LLM(str(old), **options) as llm:
        before = said(llm)
        assert before != wanted
        llm.update_weights(new / "model.safetensors")
        assert said(llm) == wanted and said(llm) == wanted
        llm.update_weights(old / "model.safetensors")
        assert said(llm) == before
