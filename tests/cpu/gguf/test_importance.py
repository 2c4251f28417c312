"""Importance of columns: measured on a text, and in both forms of llama.cpp's files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from typer.testing import CliRunner

from tokenmill.checkpoint.folder import read_config
from tokenmill.checkpoint.gguf_metadata import architecture, place
from tokenmill.cli.verbs import app
from tokenmill.core.errors import ModelError, UserError
from tokenmill.quant import importance
from tokenmill.quant.importance import Sums
from tokenmill.quantize.gguf_export import export
from tokenmill.quantize.gguf_importance import measure
from tokenmill.testing.tiny import make_tiny

TOKENS = torch.arange(96).view(3, 32) * 7 % 300


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=256)


@pytest.fixture(scope="module")
def measured(tiny: Path) -> dict[str, Sums]:
    return measure(tiny, TOKENS)


def test_sums_are_those_of_what_transformers_multiplies(tiny: Path, measured: dict[str, Sums]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    config, found = read_config(tiny), {}
    arch = architecture(config, "")

    def hook(name: str):
        def note(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            where = place(f"{name}.weight", arch, config, "")
            assert where is not None
            found[where.name] = inputs[0].detach().flatten(0, -2).square().sum(0, keepdim=True)

        return note

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(hook(name))
    model(TOKENS)
    assert set(found) == set(measured) and len(found) == 14
    for name, sums in measured.items():
        torch.testing.assert_close(sums.squares, found[name], rtol=1e-3, atol=1e-4)
        assert sums.tokens.tolist() == [[96.0]]


def test_experts_count_their_own_tokens(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, moe_intermediate_size=32, num_experts=40, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = measure(tmp_path, TOKENS[:1])
    router, gate = found["blk.0.ffn_gate_inp.weight"], found["blk.0.ffn_gate_exps.weight"]
    assert gate.squares.shape == (40, 64) and float(gate.tokens.sum()) == 2 * 32
    torch.testing.assert_close(gate.squares.sum(0), 2 * router.squares[0], rtol=1e-4, atol=1e-4)
    missed = gate.tokens[:, 0] == 0
    assert missed.any() and (gate.squares[missed] == 0).all() and (gate.means()[missed] == 1).all()


@pytest.mark.parametrize("name", ["imatrix.gguf", "imatrix.dat"])
def test_what_was_measured_is_written_for_others(name: str, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / name
    made = ["--samples", "2", "--length", "32", "--save-imatrix", str(file)]
    command = ["quantize", str(tiny), "--format", "gguf-q2_k"]
    done = CliRunner().invoke(app, [*command[:2], str(tmp_path / "a.gguf"), *command[2:], *made])
    assert done.exit_code == 0 and "64 tokens" in done.output, done.output
    again = CliRunner().invoke(app, [*command[:2], str(tmp_path / "b.gguf"), *command[2:], "--imatrix", str(file)])
    assert again.exit_code == 0, again.output
    one, other = (GGUFReader(tmp_path / f"{which}.gguf") for which in "ab")
    for a, b in zip(one.tensors, other.tensors, strict=True):
        assert a.name == b.name and (a.data == b.data).mean() > 0.98, "but for roundings of the means"
    if name.endswith(".gguf"):
        fields = GGUFReader(file).fields
        assert {"imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"} <= set(fields)
        return
    raw = file.read_bytes()  # entries, then the first one: its name, calls, and how many numbers
    entries, length = struct.unpack_from("<ii", raw)
    calls, numbers = struct.unpack_from("<ii", raw, 8 + length)
    assert (entries, raw[8 : 8 + length].startswith(b"blk."), calls, numbers) == (14, True, 2, 256)


def test_fewest_bits_are_measured_unasked_and_others_are_not(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.cli.quantize.SAMPLES", 1)
    for kind, expected in (("iq2_xxs", True), ("iq3_xxs", False)):
        target = tmp_path / f"{kind}.gguf"
        done = CliRunner().invoke(app, ["quantize", str(tiny), str(target), "--format", f"gguf-{kind}"])
        assert done.exit_code == 0 and ("count by their inputs" in done.output) == expected, done.output


def test_older_files_hold_experts_one_behind_the_other(tmp_path: Path, measured: dict[str, Sums]) -> None:
    sums = Sums(torch.rand(4, 32) + 0.1, torch.full((4, 1), 5.0))
    importance.write(tmp_path / "m.dat", {"blk.0.ffn_gate_exps.weight": sums}, "text", (3, 8))
    (found,) = importance.read(tmp_path / "m.dat").values()
    torch.testing.assert_close(found.view(4, 32), sums.means())


LIES = {
    "empty": b"",
    "none": struct.pack("<i", 0),
    "a count below zero": struct.pack("<i", -3),
    "more than it has": struct.pack("<ii", 2, 1 << 30),
    "a length below zero": struct.pack("<ii", 1, -4) + bytes(64),
    "numbers below zero": struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", 1, -1) + bytes(64),
    "no numbers": struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", 1, 0),
    "calls below zero": struct.pack("<ii", 1, 1) + b"a" + struct.pack("<iif", -1, 1, 1.0),
    "twice": struct.pack("<i", 2) + 2 * (struct.pack("<i", 1) + b"a" + struct.pack("<iif", 1, 1, 1.0)),
    "nan": struct.pack("<ii", 1, 1) + b"a" + struct.pack("<iif", 1, 1, float("nan")),
    "squares below zero": struct.pack("<ii", 1, 1) + b"a" + struct.pack("<iif", 1, 1, -1.0),
    "of another model": struct.pack("<ii", 1, 1) + b"a" + struct.pack("<iif", 1, 1, 1.0),
}


@pytest.mark.parametrize("lie", LIES)
def test_older_files_that_lie_are_refused_in_a_sentence(lie: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "m.dat").write_bytes(LIES[lie])
    with pytest.raises((ModelError, UserError), match=r"^.{10,200}\.$"):
        export(tiny, tmp_path / "out.gguf", "q2_k", importance=importance.read(tmp_path / "m.dat"))
    assert not (tmp_path / "out.gguf").exists()


def test_a_cut_off_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    importance.write(tmp_path / "m.dat", {"a": Sums(torch.ones(1, 3), torch.ones(1, 1))}, "", (1, 1))
    raw = (tmp_path / "m.dat").read_bytes()
    used = len(raw) - 8  # what follows the matrices is not needed
    for size in range(used):
        (tmp_path / "m.dat").write_bytes(raw[:size])
        with pytest.raises(ModelError):
            importance.read(tmp_path / "m.dat")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--format", "gguf-q4_k", "--imatrix", "a.dat", "--samples", "3"], "use one of them"),
        (["--format", "gguf-q8_0", "--save-imatrix", "a.dat"], "--save-imatrix goes with"),
        (["--method", "gptq", "--save-imatrix", "a.dat"], "--save-imatrix goes with"),
        (["--format", "gguf-q8_0", "--calibration", "a.txt"], "--calibration goes with"),
        (["--format", "gguf-q4_k", "--group", "64"], "--group has no effect"),
        (["--format", "fp8", "--group", "64"], "--group has no effect"),
        (["--format", "gguf-q4_k", "--samples", "0"], "--samples takes"),
    ],
)
def test_flags_without_effect_are_refused(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], told: str, tiny: Path, tmp_path: Path
) -> None:
    """Files are there: paths that are not are told first."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.dat", "a.txt"):
        (tmp_path / name).touch()
    done = CliRunner().invoke(app, ["quantize", str(tiny), str(tmp_path / "out.gguf"), *flags])
    assert done.exit_code == 2 and told in " ".join(done.output.split()), done.output
