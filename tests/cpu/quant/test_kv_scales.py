"""Scales of K/V in a checkpoint: they change nothing, which is said."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenmill import LLM, SamplingParams
from tokenmill.testing.tiny import make_tiny

NAMES = (
    "self_attn.k_scale",
    "self_attn.v_scale",
    "self_attn.kv_scale",
    "self_attn.q_scale",
    "self_attn.k_proj.k_scale",
)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_without_them_and_a_reason_tells(name, tmp_path):
    make_tiny(tmp_path)
    with LLM(str(tmp_path), executor="inprocess") as llm:
        wanted = llm.generate("mill", GREEDY)[0].outputs[0].token_ids
        assert not any("scales of K/V" in reason for reason in llm.built.facts.reasons)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), f"model.layers.0.{name}": torch.tensor([float("nan")])}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    said = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": SCHEME}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    with LLM(str(tmp_path), executor="inprocess") as llm:
        assert llm.generate("mill", GREEDY)[0].outputs[0].token_ids == wanted
        assert any("scales of K/V" in reason for reason in llm.built.facts.reasons)
