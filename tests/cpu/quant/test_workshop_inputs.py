"""What a person can get wrong with the verbs that make models: one sentence names the flag, and nothing is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tokenmill.cli.verbs import app
from tokenmill.quantize.calibration_text import read
from tokenmill.testing.tiny import make_tiny

FEW = ("--samples", "2", "--length", "32")
SHORT = ("--steps", "1", "--batch", "1", "--length", "16")
UP, EMPTY = "model.layers.1.mlp.up_proj.weight", torch.zeros(0, 64)
Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]
TEXT = "Words go in at the top; tokens fall out at the bottom. " * 40


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    make_tiny(folder / "tiny", hidden=64, layers=4)
    make_tiny(folder / "odd", hidden=80, heads=5, kv_heads=5, architecture="llama")
    make_tiny(folder / "uneven", hidden=30, heads=5, kv_heads=5, architecture="llama")
    make_tiny(folder / "narrow", hidden=32, heads=2, kv_heads=1, layers=1)
    make_tiny(folder / "odder", hidden=40, heads=5, kv_heads=5, architecture="llama")
    shutil.copytree(folder / "tiny", folder / "foreign")
    small = make_tiny(folder / "small", hidden=64, layers=4, vocab=260)
    for name in ("config.json", "model.safetensors"):  # a tokenizer of a larger model
        shutil.copy(small / name, folder / "foreign")
    (folder / "text.txt").write_text(TEXT)
    (folder / "word.txt").write_text("a")
    (folder / "nothing.txt").write_text(" \n")
    (folder / "odd.jsonl").write_text('{"text": "one"}\n{"words": "two"}\n')
    (folder / "lines.jsonl").write_text("".join(f"{json.dumps({key: TEXT})}\n" for key in ("text", "prompt")))
    return folder


def run(place: Path, target: Path, *words: str) -> tuple[int, str]:
    """{place} and {target} stand for the folders."""
    filled = [word.format(place=place, target=target) for word in words]
    result = CliRunner().invoke(app, filled)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


QUANTIZE = ("quantize", "{place}/tiny", "{target}")
PRUNE = ("prune", "{place}/tiny", "{target}")
DISTILL = ("distill", "{place}/tiny", "{target}", "--data", "{place}/text.txt", *SHORT)
ON_DEVICE = {
    "rounding": (*QUANTIZE, "--method", "rtn"),
    "calibrating": (*QUANTIZE, "--method", "gptq", *FEW),
    "a GGUF file": ("quantize", "{place}/tiny", "{target}.gguf", "--format", "gguf-q4_k", *FEW),
    "pruning": (*PRUNE, "--layers", "1", *FEW),
    "repairing": (*PRUNE, "--layers", "1", "--repair", "{place}/text.txt", "--line", "16", *FEW),
    "comparing": ("quality", "{place}/tiny", "--against", "{place}/tiny", "--no-speed"),
    "distilling": DISTILL,
}


@pytest.mark.parametrize("verb", ON_DEVICE)
@pytest.mark.parametrize("device", ["meta", "cuda:99", "no device"])
def test_devices_that_are_not_there(verb: str, device: str, place: Path, tmp_path: Path) -> None:
    code, told = run(place, tmp_path / "out", *ON_DEVICE[verb], "--device", device)
    assert (code == 2 and "Unknown device" in told) or "can be used here" in told or "no device" in told, told
    assert not list(tmp_path.iterdir())


REFUSED = {
    "no group": ((*QUANTIZE, "--format", "int8", "--group", "0"), "--group 0: use 32"),
    "a pattern without match": ((*QUANTIZE, "--format", "int8", "--skip", "none"), "--skip 'none' has no effect"),
    "such a pattern for a method": ((*QUANTIZE, "--method", "rtn", "--skip", "norm"), "--skip 'norm' has no effect"),
    "such a pattern for a file": (
        ("quantize", "{place}/tiny", "{target}.gguf", "--format", "gguf-f16", "--skip", "mlp"),
        "--skip 'mlp' has no effect",
    ),
    "a folder with a file's name": (("quantize", "{place}/tiny", "{target}.gguf", "--format", "int8"), "ends in .gguf"),
    "importance of no form": (("quantize", "{place}/tiny", "{target}.gguf", "--format", "gguf-q4_k", "--save-imatrix",
                               "{target}.txt"), "must end in .gguf or .dat"),
    "importance in the model's file": (("quantize", "{place}/tiny", "{target}.gguf", "--format", "gguf-q4_k",
                                        "--save-imatrix", "{target}.gguf"), "is the model's own file"),
    "rows in no fours": (("quantize", "{place}/uneven", "{target}", "--method", "bitnet", "--skip", "gate|up"),
                         "not in whole groups of 4 rows, and the others are no better."),
    "no group divides": (("quantize", "{place}/odder", "{target}", "--method", "rtn"),
                         "not in whole groups of 32 columns, and the others are no better."),
    "another group would not do": (("quantize", "{place}/odder", "{target}", "--format", "int4"),
                                   "not in whole groups of 32 columns, and the others are no better."),
    "no block divides": (("quantize", "{place}/odder", "{target}.gguf", "--format", "gguf-q4_k"),
                         "no matrix would be rounded, as rows are no multiples of 32"),
    "another group would": ((*QUANTIZE, "--method", "rtn", "--group", "256"), "choose another --group"),
    "blocks are not chosen": (("quantize", "{place}/narrow", "{target}", "--method", "nf4", "--skip", "down_proj"),
                              "not in whole groups of 64 columns, and the others are no better."),
    "a form without K/V": ((*QUANTIZE, "--method", "rtn", "--format", "gptq", "--kv-scales"),
                           "--kv-scales has no effect with --method rtn --format gptq"),
    "no zeros": ((*QUANTIZE, "--method", "magnitude", "--sparsity", "0.0001"), "makes none of 128 columns zero"),
    "only zeros": ((*QUANTIZE, "--method", "magnitude", "--sparsity", "0.9999"), "makes all of 64 columns zero"),
    **{f"{name} for {flag}": ((*words, flag, value), "--samples takes 1 to 65536")
       for flag, value in (("--samples", "0"), ("--length", "1"), ("--length", "9999999"))
       for name, words in (("pruning", (*PRUNE, "--channels", "0.3")), ("a method", (*QUANTIZE, "--method", "gptq")),
                           ("a file", ("quantize", "{place}/tiny", "{target}.gguf", "--format", "gguf-q4_k")))},
    **{f"nothing to read for {flag}": ((*words, flag, "{place}/nothing.txt"), "nothing.txt holds no text")
       for flag, words in (("--perplexity", (*QUANTIZE, "--format", "int8")),
                           ("--calibration", (*QUANTIZE, "--method", "gptq")))},
    "nothing to predict": ((*QUANTIZE, "--format", "int8", "--perplexity", "{place}/word.txt"),
                           "--perplexity: the text is too short"),
    "a word to calibrate on": ((*QUANTIZE, "--method", "gptq", "--calibration", "{place}/word.txt"),
                               "--calibration: the text has"),
    **{f"another model's tokenizer: {verb}": (words, "foreign has 260 embeddings, and its tokenizer gives id")
       for verb, words in {
           "distill": ("distill", "{place}/foreign", "{target}", "--data", "{place}/text.txt", *SHORT),
           "quality": ("quality", "{place}/foreign", "--against", "{place}/foreign", "--text", "{place}/text.txt"),
           "perplexity": ("quantize", "{place}/foreign", "{target}", "--perplexity", "{place}/text.txt"),
       }.items()},
    **{f"another model's tokenizer: {' '.join(words)}": (
        (words[0], "{place}/foreign", "{target}", *words[1:], *FEW), "has 260 embeddings, and its tokenizer gives id")
       for words in (("quantize", "--method", "gptq"), ("quantize", "--method", "rtn", "--kv-scales"),
                     ("quantize", "--method", "rtn", "--bits", "4.5"), ("prune", "--channels", "0.3"))},
    "lines without text": ((*QUANTIZE, "--method", "gptq", "--calibration", "{place}/odd.jsonl"),
                           'odd.jsonl, line 2: needs a string under "text" or "prompt"'),
    "no layers": ((*PRUNE, "--layers", "-1"), "--layers -1: use a positive number"),
    "multiples of nothing": ((*PRUNE, "--channels", "0.3", "--multiple", "0"), "--multiple 0: use a positive number"),
    "multiples of what stays": ((*PRUNE, "--layers", "1", "--multiple", "64"), "--multiple has no effect"),
    "importance of what stays": ((*PRUNE, "--layers", "1", "--importance", "wanda"), "--importance has no effect"),
    "time before now": ((*PRUNE, "--layers", "1", "--repair", "{place}/text.txt", "--minutes", "-1"), "--minutes -1"),
    "no time": ((*PRUNE, "--layers", "1", "--repair", "{place}/text.txt", "--minutes", "nan"), "--minutes nan"),
    "a word to learn from": ((*PRUNE, "--layers", "1", "--repair", "{place}/word.txt"), "or a smaller --line"),
    "a word for a drafter": (("distill", "{place}/tiny", "{target}", "--data", "{place}/word.txt", *SHORT),
                             "or a smaller --length"),
    "answers of no length": ((*DISTILL, "--answers", "-1"), "--answers"),
    "a seed beyond 63 bits": ((*DISTILL, "--seed", str(1 << 70)), "--seed"),
    "a teacher that is not there": (("distill", "{place}/none", "{target}", "--data", "{place}/text.txt", *SHORT),
                                    "neither an existing folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_one_sentence_and_nothing_left(name: str, place: Path, tmp_path: Path) -> None:
    words, told = REFUSED[name]
    code, said = run(place, tmp_path / "out", *words)
    assert code == 2 and told in said, said
    assert not list(tmp_path.iterdir()), "nothing stays"


def test_json_lines_are_texts(place: Path, tmp_path: Path) -> None:
    """Their syntax is no text."""
    both = tmp_path / "both.txt"
    both.write_text(f"{TEXT}\n\n{TEXT}")
    for name, file in (("lines", place / "lines.jsonl"), ("plain", both)):
        code, said = run(place, tmp_path / name, *QUANTIZE, "--method", "gptq", *FEW, "--calibration", str(file))
        assert code == 0, said
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("lines", "plain"))
    assert one == other
    assert read(place / "lines.jsonl", "--text") == both.read_text()


BROKEN: dict[str, tuple[Change, str]] = {
    "a tensor is missing": (lambda tensors, config: tensors.pop(UP), f"has no tensor '{UP}'"),
    "a tensor has no elements": (lambda tensors, config: tensors.update({"model.layers.1.mlp.x.weight": EMPTY}), ""),
    "another shape": (lambda tensors, config: tensors.update({UP: torch.zeros(128, 32)}), "has shape [128, 32]"),
    "a tensor too many": (lambda tensors, config: tensors.update({"model.layers.1.mlp.x.weight": torch.ones(8, 64)}),
                          "tensors that this architecture does not use: model.layers.1.mlp.x.weight"),
    "a layer too many": (lambda tensors, config: config.update(num_hidden_layers=3), "does not use: model.layers.3"),
    "a layer too few": (lambda tensors, config: config.update(num_hidden_layers=5), "has no tensor 'model.layers.4"),
    "another vocabulary": (lambda tensors, config: config.update(vocab_size=512), "the config asks for [512, 64]"),
    "whole numbers": (lambda tensors, config: tensors.update({UP: torch.zeros(128, 64, dtype=torch.int32)}),
                      f"'{UP}' holds int32"),
}  # fmt: skip
MAKERS = {
    "rounding": ("--format", "int8"),
    "a method": ("--method", "nvfp4"),
    "calibrating": ("--method", "wanda", *FEW),
    "a file": ("--format", "gguf-q8_0"),
    "pruning": ("--layers", "1", *FEW),
}


@pytest.mark.parametrize("name", BROKEN)
def test_sources_that_are_not_whole(name: str, place: Path, tmp_path: Path) -> None:
    """What would be made of them could not be loaded."""
    change, told = BROKEN[name]
    source = tmp_path / "source"
    shutil.copytree(place / "tiny", source)
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(config))
    for maker, words in MAKERS.items():
        target = tmp_path / ("out.gguf" if maker == "a file" else maker)
        verb = "prune" if maker == "pruning" else "quantize"
        code, said = run(place, target, verb, str(source), "{target}", *words)
        if not told and code == 0:
            continue  # nothing is lost with it
        assert code == 2 and told in said, (maker, said)
        assert [path.name for path in tmp_path.iterdir() if "out" in path.name or path.name == maker] == []


def test_sources_of_families_that_are_not_built_here(place: Path, tmp_path: Path) -> None:
    """Other engines may know them."""
    source = tmp_path / "source"
    shutil.copytree(place / "tiny", source)
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}
    (source / "config.json").write_text(json.dumps(config))
    assert run(place, tmp_path / "out", "quantize", str(source), "{target}", "--format", "int8")[0] == 0


def test_a_folder_that_was_there_stays(place: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    words, _ = REFUSED["a word for a drafter"]
    assert run(place, tmp_path / "out", *words)[0] == 2
    assert (tmp_path / "out").is_dir()


def test_heads_that_are_left_are_told(place: Path, tmp_path: Path) -> None:
    code, told = run(place, tmp_path / "out", *PRUNE, "--heads", "0.5", *FEW)
    assert code == 0 and "left: 1 of 2 key heads, 2 of 4 query heads" in told, told


def test_rows_that_no_block_divides_are_told(place: Path, tmp_path: Path) -> None:
    words = ("quantize", "{place}/odd", "{target}.gguf", "--format", "gguf-q4_k")
    code, told = run(place, tmp_path / "out", *words)
    assert code == 0 and "14 of 21 tensors have rows that are no multiples of 32: they stay in 16 bits" in told, told


LYING: tuple[tuple[str, Any], ...] = (
    ("num_attention_heads", "x"), ("num_attention_heads", [2]), ("num_key_value_heads", float("nan")),
    ("head_dim", "x"), ("head_dim", [2]), ("num_hidden_layers", 1 << 40), ("num_hidden_layers", -1),
)  # fmt: skip
"""Entries of config.json that are no numbers of anything."""
MAKING: dict[str, list[str]] = {
    "prune heads": ["prune", "--heads", "0.5"], "prune channels": ["prune", "--channels", "0.5", "--multiple", "8"],
    "gptq": ["quantize", "--method", "gptq", "--group", "32"], "gguf": ["quantize", "--format", "gguf-q8_0"],
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), LYING)
@pytest.mark.parametrize("how", MAKING)
def test_entries_that_are_no_numbers_end_in_a_sentence(how: str, key: str, value: Any, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    verb, *options = MAKING[how]
    done = CliRunner().invoke(app, [verb, str(folder), str(tmp_path / "new.gguf"), *options])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.exception
    assert not (tmp_path / "new.gguf").exists()


OF_GGUF: tuple[tuple[str, Any], ...] = (
    ("architectures", 3), ("architectures", True), ("sliding_window", "x"), ("sliding_window", float("inf")),
    ("max_position_embeddings", {"a": 1}),
)  # fmt: skip


@pytest.mark.parametrize(("key", "value"), OF_GGUF)
def test_gguf_of_entries_of_another_type(key: str, value: Any, tmp_path: Path) -> None:
    test_entries_that_are_no_numbers_end_in_a_sentence("gguf", key, value, tmp_path)
