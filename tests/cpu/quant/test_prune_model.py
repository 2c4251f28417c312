"""Models with fewer channels, heads and layers: what goes, what the rest takes over, files, repair, refusals.

Every family against Transformers: tests/cpu/models/test_pruned_families.py."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from tokenmill.cli.verbs import app
from tokenmill.core.errors import ModelError, UserError
from tokenmill.measure import quality
from tokenmill.quantize import prunable
from tokenmill.quantize.inputs import Inputs
from tokenmill.quantize.prune_columns import METHODS, prune_columns
from tokenmill.quantize.prune_model import REPORT, Cut, prune_model, without_least
from tokenmill.testing.tiny import make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), layers=4)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 300, (6, 48), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def problem() -> tuple[Tensor, Tensor, Inputs]:
    """A weight, inputs that have much to do with each other, and their sums."""
    random_ = torch.Generator().manual_seed(1)
    x = torch.randn(500, 24, generator=random_) @ torch.randn(24, 48, generator=random_)
    x = x * torch.logspace(-1.0, 0.5, 48) + 0.1 * torch.randn(500, 48, generator=random_)
    inputs = Inputs(48, torch.device("cpu"))
    inputs.add(x)
    return torch.randn(20, 48, generator=random_), x, inputs


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("method", METHODS)
def test_what_stays_makes_up_for_what_goes(method: str, width: int, problem: tuple[Tensor, Tensor, Inputs]) -> None:
    weight, x, inputs = problem
    found = prune_columns(weight, inputs, 32 // width, width=width, method=method, damping=1e-8)
    assert len(found.kept) == 32 and (found.kept.diff() > 0).all()
    assert all((part - part[0] == torch.arange(width)).all() for part in found.kept.view(-1, width))
    wanted = x @ weight.T
    best = torch.linalg.lstsq(x[:, found.kept].double(), wanted.double()).solution.T
    mine, least, plain = (
        float((x[:, found.kept].double() @ w.T.double() - wanted).norm() / wanted.norm())
        for w in (found.weight, best, weight[:, found.kept])
    )
    assert mine <= 1.01 * least + 1e-4 and mine < 0.7 * plain
    assert abs(found.lost - mine) < 0.01


def test_obs_chooses_better_than_sums(problem: tuple[Tensor, Tensor, Inputs]) -> None:
    weight, _, inputs = problem
    obs, wanda = (prune_columns(weight, inputs, 26, method=method).lost for method in ("obs", "wanda"))
    assert obs < 0.9 * wanda
    dead = Inputs(48, torch.device("cpu"))
    assert torch.isfinite(prune_columns(weight, dead, 26).weight).all()


def test_layers_that_do_nothing_go(tiny: Path, tokens: Tensor, tmp_path: Path) -> None:
    """A layer that writes nothing has no influence, and without it all is as it was."""
    from safetensors.torch import save_file

    folder = make_tiny(tmp_path / "lazy", layers=4)
    tensors = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.2.{name}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors")
    left = prune_model(folder, tmp_path / "less", Cut(layers=1), tokens)
    assert left.layers == [0, 1, 3] and abs(left.influence[2] or 0.0) < 1e-6 and left.influence[0] is None
    text = "The mill grinds grain into flour, and flour becomes bread. " * 3
    _, found = quality.compare(str(folder), [str(tmp_path / "less")], quality.Questions(text, speed=False))
    assert found.kl is not None and found.kl < 1e-9
    assert without_least([None, 0.3, 0.1, 0.2, None], 2) == [0, 1, 4]


def command(source: Path, target: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["prune", str(source), str(target), "--samples", "4", "--length", "32", *options])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_the_command_and_repair(tiny: Path, tmp_path: Path) -> None:
    words = random.Random(0).choices(["mill", "flour", "bread", "grain", "sails"], k=1200)
    data = tmp_path / "text.txt"
    data.write_text(" grinds ".join(words))
    cut = ("--channels", "0.5", "--heads", "0.5", "--layers", "1")
    said = command(tiny, tmp_path / "cut", *cut)
    assert "layers gone" in said and "outputs that lost most" in said and "left: 1 of 2 key heads, 2 of 4 query" in said
    repair = ("--repair", str(data), "--steps", "30", "--line", "32", "--batch", "8", "--rate", "0.003")
    assert "held-out tokens" in command(tiny, tmp_path / "mended", *cut, *repair)
    config = json.loads((tmp_path / "mended" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["intermediate_size"], config["head_dim"]) == (3, 64, 16)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (2, 1)
    names = sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "mended").iterdir()) and REPORT in names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "mended", "text.txt"]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "mended"))
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {n: (t.shape, t.dtype) for n, t in after.items()}
    copies = [str(tmp_path / name) for name in ("cut", "mended")]
    _, plain, mended = quality.compare(str(tiny), copies, quality.Questions(data.read_text()[-3000:], speed=False))
    assert plain.kl and mended.kl and mended.kl < 0.8 * plain.kl
    assert mended.weight_bytes == plain.weight_bytes


REFUSED = {
    "nothing": ([], "Say what to remove"),
    "share": (["--channels", "1.5"], "between 0 and 1"),
    "little": (["--channels", "0.1"], "smaller --multiple"),
    "heads": (["--heads", "0.9"], "one must stay"),
    "layers": (["--layers", "3"], "2 of 4 can go"),
    "course": (["--layers", "1", "--steps", "3"], "--steps goes with --repair"),
    "rate": (["--layers", "1", "--repair", "DATA", "--rate", "7"], "--rate 7"),
    "text": (["--layers", "1", "--repair", "/nowhere/x"], "cannot be read"),
    "calibration": (["--layers", "1", "--calibration", "/nowhere/x"], "cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, tiny: Path, tmp_path: Path) -> None:
    options, told = REFUSED[name]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_text("The mill grinds. " * 400)
    options = [str(tmp_path / "data" / "text.txt") if each == "DATA" else each for each in options]
    result = CliRunner().invoke(app, ["prune", str(tiny), str(tmp_path / "out"), *options])
    assert result.exit_code == 2 and told in " ".join(result.output.split()), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("cut", [Cut(channels=0.5), Cut(layers=1)], ids=["channels", "layers"])
@pytest.mark.parametrize(
    ("name", "bad", "told"),
    [
        (
            "model.embed_tokens.weight",
            "nan",
            "model.embed_tokens.weight holds NaN",
        ),
        ("model.layers.1.input_layernorm.weight", "inf", "Layer 1 computes"),
        ("model.norm.weight", "inf", "Layer 3 computes"),
    ],
)
def test_a_damaged_model_is_refused_as_such(
    name: str, bad: str, told: str, cut: Cut, tiny: Path, tokens: Tensor, tmp_path: Path
) -> None:
    """Copies of it were written (the text may lack the word that is damaged), or its config.json was blamed."""
    shutil.copytree(tiny, tmp_path / "in")
    tensors = load_file(tiny / "model.safetensors")
    tensors[name].view(-1)[-1] = float(bad)
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=told):
        prune_model(tmp_path / "in", tmp_path / "out", cut, tokens)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_said_is_refused(
    tiny: Path, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that would compute anything else is found out, whatever the reason."""
    honest = prunable.config_without

    def lying(*given: object) -> dict[str, object]:
        return {**honest(*given), "rms_norm_eps": 0.5}  # type: ignore[arg-type]

    monkeypatch.setattr(prunable, "config_without", lying)
    with pytest.raises(ModelError, match="cannot describe"):
        prune_model(tiny, tmp_path / "out", Cut(channels=0.5), tokens)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModelError, match="phi3: heads"):
        prunable.heads_of({"model_type": "phi3", "num_attention_heads": 4})
    prune_model(tiny, tmp_path / "out", Cut(channels=0.5), tokens)
    with pytest.raises(UserError, match="exists already"):
        prune_model(tiny, tmp_path / "out", Cut(channels=0.5), tokens)
