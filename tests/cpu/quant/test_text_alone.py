"""Models that also see: every method rounds what writes text, and nothing else; groups that divide every matrix."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.thinned import WHOLE
from typer.testing import CliRunner

from tokenmill.cli.verbs import app
from tokenmill.demo import demo_dir
from tokenmill.measure import quality
from tokenmill.quant import left_out
from tokenmill.quantize import folds, prune_columns, recipes
from tokenmill.quantize.recipes import Recipe, complete_recipe
from tokenmill.testing.tiny import make_tiny

TEXT = "A mill grinds grain. The picture shows a red circle on the left and a blue square on the right. " * 4
DATA_FREE = [m for m in recipes.METHODS if m not in recipes.CALIBRATED]
NOISE = ("bitnet", "magnitude")
"""What models that were not trained for it do not bear."""
ASKED = ("rtn", "fp8-block", "nvfp4", "nf4", "llm.int8", "awq", "4.5 bits")
"""One of each form of files, which are asked every time; the others at night."""
FORMS = {**{method: ["--method", method] for method in DATA_FREE},
         **{form: ["--format", form] for form in ("int4", "int8", "fp8")},
         "gptq": ["--method", "gptq", "--samples", "2", "--length", "64"],
         "awq": ["--method", "awq", "--format", "awq", "--samples", "2", "--length", "64"],
         "4.5 bits": ["--method", "rtn", "--bits", "4.5", "--samples", "2", "--length", "64"]}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_model_that_sees(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "_STEPS", 4)  # there are scales; how good they are is not what is tested
    monkeypatch.setattr(folds, "_FINALISTS", 1)
    source, out = demo_dir("vlm"), tmp_path / "out"
    result = CliRunner().invoke(app, ["quantize", str(source), str(out), *FORMS[name]])
    assert result.exit_code == 0, result.output
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    kept = [each for each in before if not each.startswith("language_model.model.layers.")]
    assert len(kept) > 50 and all(torch.equal(before[each], after[each]) for each in kept)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlavaForConditionalGeneration"]
    report = json.loads((out / "quantization_report.json").read_text())["weights"]
    assert len(report) == 6 * 7 and all(each["name"] in before for each in report)
    said = config.get("quantization_config", {})
    left = said.get("ignore") or said.get("modules_to_not_convert") or said.get("llm_int8_skip_modules") or []
    assert not said or "vision_tower.encoder.layers.0.mlp.fc1" in left
    if name in ASKED or (WHOLE and name not in NOISE):
        _, found = quality.compare(str(source), [str(out)], quality.Questions(TEXT, speed=False))
        assert found.kl is not None and 0 < found.kl < 0.6


READ = {
    "whole": ["--method", "int8"],
    "plain": ["--format", "int8"],
    "left out": ["--method", "fp8", "--skip", r"layers\.[01]\.mlp"],
    "7.5 bits": ["--method", "rtn", "--symmetric", "--bits", "7.5", "--samples", "2", "--length", "64"],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READ)
def test_transformers_finds_what_was_left_out(name: str, tmp_path: Path) -> None:
    """Its modules have other names than the files' tensors."""
    from transformers import AutoModelForImageTextToText

    source, out, ids = demo_dir("vlm"), tmp_path / "out", torch.tensor([[5, 9, 20, 33, 41, 7, 8, 100]])
    result = CliRunner().invoke(app, ["quantize", str(source), str(out), *READ[name]])
    assert result.exit_code == 0, result.output
    wanted = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    found, told = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values()), told
    rounded = [n for n, module in found.named_modules() if getattr(module, "quantization_scheme", None) is not None]
    assert len(rounded) == (36 if name == "left out" else 42)
    assert all("language_model" in module for module in rounded)
    with torch.no_grad():
        one, other = (model(input_ids=ids).logits for model in (wanted, found))
    assert float((one - other).norm() / one.norm()) < 0.1


@pytest.mark.parametrize(("name", "pattern"), [
    ("model.visual.blocks.0.attn.qkv", "visual"), ("vision_tower.vision_model.encoder.layers.3.fc1", "vision_tower"),
])  # fmt: skip
def test_names_of_other_parts(name: str, pattern: str) -> None:
    """The whole part, whatever stands before it; and no more than one layer of the text's part."""
    found = re.compile(left_out.pattern_of(name, {name}))
    assert all(found.match(f"{before}{pattern}.x.y") for before in ("", "model.", "a.b."))
    assert not found.match(f"my{pattern}.x") and not found.match("model.language_model.layers.3.fc1")
    text = re.compile(left_out.pattern_of("language_model.model.layers.1.mlp.gate", {name}))
    assert text.match("model.language_model.layers.1.mlp.gate") and text.match("layers.1.mlp.gate")
    for other in ("layers.11.mlp.gate", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.gate.x"):
        assert not text.match(other)
    assert left_out.told(["b", "a"], set()) == ["a", "b"]


def test_names_to_leave_alone_are_stored_ones(tmp_path: Path) -> None:
    options = ["--method", "int8", "--skip", r"^language_model\.model\.layers\.0"]
    result = CliRunner().invoke(app, ["quantize", str(demo_dir("vlm")), str(tmp_path / "out"), *options])
    assert result.exit_code == 0 and "35 matrices rounded" in result.output, result.output


@pytest.mark.parametrize("method", list(recipes.INTEGERS))
def test_a_smaller_group_where_none_was_asked_for(method: str, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny", hidden=64)
    few = [] if method in ("rtn", "hqq") else ["--samples", "2", "--length", "32"]
    options = ["quantize", str(tiny), str(tmp_path / "out"), "--method", method, *few]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0 and "Groups of 64 columns: 128 do not divide" in result.output, result.output
    weights = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert weights["group_0"]["weights"]["group_size"] == 64
    result = CliRunner().invoke(app, [*options[:2], str(tmp_path / "asked"), *options[3:], "--group", "128"])
    assert result.exit_code == 0 and "12 matrices are not in whole groups" in " ".join(result.output.split())
    assert "a smaller --group may divide them" in " ".join(result.output.split())


def test_pruned_models_are_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands with their defaults, one after the other."""
    monkeypatch.setattr(prune_columns, "ROUNDS", 4)  # how well columns are chosen is not what is tested
    few = ["--samples", "2", "--length", "32"]
    pruned, out = tmp_path / "pruned", tmp_path / "out"
    result = CliRunner().invoke(app, ["prune", str(demo_dir("main")), str(pruned), "--channels", "0.25", *few])
    assert result.exit_code == 0 and "576 channels are left (multiples of 64)" in result.output, result.output
    result = CliRunner().invoke(app, ["quantize", str(pruned), str(out), "--method", "gptq", *few])
    assert result.exit_code == 0 and "Groups of 64 columns" in result.output, result.output


def test_groups_that_divide() -> None:
    recipe = complete_recipe(Recipe(method="rtn"))
    for widths, group in (({256, 576}, 64), ({4096}, 128), ({96}, 32), ({40}, 32)):
        assert recipes.dividing(recipe, widths, smaller=True).group == group
    assert recipes.dividing(recipe, {576}, smaller=False).group == 128


def test_experts_in_one_tensor_are_told(tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=32,
                          num_key_value_heads=1, intermediate_size=64, num_local_experts=2, num_experts_per_tok=1,
                          layer_types=["full_attention"], max_position_embeddings=64, rope_parameters={
                              "rope_type": "default", "rope_theta": 1e4}, rope_scaling=None)  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(tmp_path / "tiny")
    for form in (["--format", "int8"], ["--method", "int8"]):
        result = CliRunner().invoke(app, ["quantize", str(tmp_path / "tiny"), str(tmp_path / form[0]), *form])
        assert result.exit_code == 0 and "2 tensors hold several experts each" in result.output, result.output
