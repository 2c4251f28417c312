"""Settings of methods: each changes what is made; files that other programs take for something else are told of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tokenmill.checkpoint.folder import open_checkpoint
from tokenmill.cli.verbs import app
from tokenmill.engine.load.model_source import find_source
from tokenmill.measure import quality
from tokenmill.quant.detect import WeightRequest, check_config, load_weight
from tokenmill.quantize import recipes
from tokenmill.quantize.inputs import Inputs
from tokenmill.quantize.recipes import Recipe, complete_recipe

CPU = torch.device("cpu")
NAME = "model.layers.0.mlp.up_proj"


def quantised(source: Path, target: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["quantize", str(source), str(target), *options])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def meant(folder: Path) -> torch.Tensor:
    """What one weight of a folder means to our reader."""
    how = check_config(json.loads((folder / "config.json").read_text()))
    shape = (128, 64)
    ckpt = open_checkpoint(folder)
    try:
        return load_weight(ckpt, WeightRequest(NAME, shape), torch.float32, CPU, None, how).dense().clone()
    finally:
        ckpt.close()


@pytest.mark.parametrize("method", ["nf4", "fp4"])
def test_scales_as_they_are(method: str, tiny: Path, tmp_path: Path) -> None:
    plain = load_file(tiny / "model.safetensors")[f"{NAME}.weight"].float()
    lost = {}
    for way in ("double", "single"):
        quantised(tiny, tmp_path / way, "--method", method, f"--{way}")
        said = json.loads((tmp_path / way / "config.json").read_text())["quantization_config"]
        assert said["bnb_4bit_use_double_quant"] is (way == "double")
        names = load_file(tmp_path / way / "model.safetensors").keys()
        assert (f"{NAME}.weight.nested_absmax" in names) is (way == "double")
        lost[way] = float((meant(tmp_path / way) - plain).norm() / plain.norm())
    assert 0 < lost["single"] < 0.15 and abs(lost["single"] - lost["double"]) < 0.01


def test_one_scale_in_all(tiny: Path, tmp_path: Path) -> None:
    quantised(tiny, tmp_path / "out", "--method", "fp8-tensor")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors[f"{NAME}.weight"].dtype == torch.float8_e4m3fn and tensors[f"{NAME}.weight_scale"].shape == (1,)
    plain = load_file(tiny / "model.safetensors")[f"{NAME}.weight"].float()
    assert float((meant(tmp_path / "out") - plain).norm() / plain.norm()) < 0.04


@pytest.mark.parametrize("method", recipes.DAMPED)
def test_damping_is_heeded(method: str) -> None:
    random = torch.Generator().manual_seed(1)
    inputs = Inputs(64, CPU)
    inputs.add(torch.randn(100, 64, generator=random) @ torch.randn(64, 64, generator=random))
    weight = torch.randn(16, 64, generator=random)
    made = [
        recipes.hold(complete_recipe(Recipe(method=method, group=32, damping=damping)), weight, 4, inputs).dense
        for damping in (0.01, 0.01, 0.9)
    ]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


TOLD = {
    "sparsegpt": (["--method", "magnitude", "--format", "compressed-tensors"], True),
    "squeezellm": (["--method", "squeezellm", "--samples", "2", "--length", "32"], True),
    "plain": (["--method", "magnitude"], False),
    "rtn": (["--method", "rtn"], False),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_others_read_wrongly_is_told(name: str, tiny: Path, tmp_path: Path) -> None:
    options, wrong = TOLD[name]
    assert ("computes noise from this copy" in quantised(tiny, tmp_path / "out", *options)) is wrong


READABLE = [(method, form) for method, form in (
    *((method, "") for method in (*recipes.WHOLE, "rtn", "magnitude")),
    *((method, "compressed-tensors") for method in ("rtn", "magnitude")), ("squeezellm", ""))]  # fmt: skip


@pytest.mark.parametrize(("method", "form"), READABLE)
def test_the_warning_is_true(method: str, form: str, tiny: Path, tmp_path: Path) -> None:
    """Transformers reads what we read, refuses with an error, or we have warned."""
    from transformers import AutoModelForCausalLM

    more = ["--format", form] if form else []
    more += ["--symmetric"] if method == "rtn" else []
    few = ["--samples", "2", "--length", "32"] if method in recipes.CALIBRATED else []
    told = quantised(tiny, tmp_path / "out", "--method", method, *more, *few)
    ids = torch.arange(40, 80)[None]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # its reader of bitnet compiles what it runs
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
            theirs = model(ids).logits.log_softmax(-1)[0]
    except (ImportError, RuntimeError, ValueError):
        return

    read = quality._read(find_source(str(tmp_path / "out")), ids, "cpu", None)
    ours = quality.logits(read.model, read.hidden[0], read.kernels, CPU).log_softmax(-1)
    divergence = float((ours.exp() * (ours - theirs)).sum(-1).mean())
    assert (divergence > 0.1) is ("computes noise from this copy" in told), divergence


REFUSED = {
    "damping": (["--method", "gptq", "--damping", "0"], "use a part between 0 and 1"),
    "catching up": (["--method", "gptq", "--catch-up", "1.5"], "use a part from 0 to 1"),
    "catching up without effect": (["--method", "rtn", "--catch-up", "0.5"], "--catch-up has no effect"),
    "damping without effect": (["--method", "awq", "--damping", "0.1"], "--damping has no effect"),
    "fewer bits than integers have": (["--method", "gptq", "--bits", "1.58"], "--method bitnet stores -1, 0 and 1"),
    "single without effect": (["--method", "rtn", "--single"], "has no effect"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, tiny: Path, tmp_path: Path) -> None:
    options, told = REFUSED[name]
    result = CliRunner().invoke(app, ["quantize", str(tiny), str(tmp_path / "out"), *options])
    assert result.exit_code == 2 and told in " ".join(result.output.split()), result.output
