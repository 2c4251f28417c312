"""Scales of K/V in a checkpoint: they change nothing, which is said; and those that are measured for other engines."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV2Config
from typer.testing import CliRunner

from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.folder import open_checkpoint, read_config
from tokenmill.cli.verbs import app
from tokenmill.core.errors import UserError
from tokenmill.quantize import kv_scales
from tokenmill.testing.tiny import make_tiny

NAMES = (
    "self_attn.k_scale",
    "self_attn.v_scale",
    "self_attn.kv_scale",
    "self_attn.q_scale",
    "self_attn.k_proj.k_scale",
    "self_attn.v_proj.output_scale",
    "self_attn.qkv_proj.output_scale",
    "self_attn.k_zero_point",
)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.mark.parametrize("said", [{"kv_cache_scheme": SCHEME | {"dynamic": True}}, {"kv_cache_scheme": None}])
def test_a_wish_for_8_bits_without_scales_is_told(said, tmp_path):
    make_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, **said}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": whole}))
    with LLM(str(tmp_path), executor="inprocess") as llm:
        told = any("wish for 8 bits" in reason for reason in llm.built.facts.reasons)
    assert told == bool(said["kv_cache_scheme"])


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


def test_the_largest_that_was_kept_becomes_the_largest_of_float8(tmp_path):
    make_tiny(tmp_path)
    tokens = torch.arange(300).view(3, 100) * 7 % 300
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    kept = model(tokens, use_cache=True).past_key_values.layers
    found = kv_scales.measure(read_config(tmp_path), open_checkpoint(tmp_path), "cpu", tokens)
    assert list(found) == [f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2)]
    for layer, scales in zip(kept, found.values(), strict=True):
        for numbers, scale in zip((layer.keys, layer.values), scales, strict=True):
            torch.testing.assert_close(scale, numbers.abs().max().view(1) / 448, rtol=1e-4, atol=1e-7)


def test_they_are_written_where_readers_look(tmp_path):
    tiny = make_tiny(tmp_path / "tiny", hidden=128)
    command = ["quantize", str(tiny), str(tmp_path / "out"), "--method", "rtn", "--kv-scales", "--samples", "2"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.strategy, scheme.dynamic) == (8, "float", "tensor", False)
    tensors = load_file(next((tmp_path / "out").glob("*.safetensors")))
    scales = {f"model.layers.{i}.self_attn.{part}_scale" for i in range(2) for part in "kv"}
    assert {n for n in tensors if n.endswith(("k_scale", "v_scale"))} == scales
    assert all(tensors[name].shape == (1,) and tensors[name] > 0 for name in scales)
    with LLM(str(tmp_path / "out"), executor="inprocess") as llm:
        assert len(llm.generate("mill", GREEDY)[0].outputs[0].token_ids) == 6


@pytest.mark.parametrize("flags", [["--method", "nf4"], ["--method", "rtn", "--format", "gptq"]])
def test_forms_that_hold_none_are_refused(flags, tmp_path):
    done = CliRunner().invoke(app, ["quantize", "demo", str(tmp_path / "out"), *flags, "--kv-scales"])
    assert done.exit_code == 2 and "--kv-scales has no effect" in done.output


def test_one_vector_for_keys_and_values_is_refused(tmp_path):
    config = DeepseekV2Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=24, first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        n_group=1, topk_group=1, head_dim=8,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no names for scales"):
        kv_scales.measure(read_config(tmp_path), open_checkpoint(tmp_path), "cpu", torch.arange(32).view(1, 32))
