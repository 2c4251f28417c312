"""`tokenmill quality`: figures that follow from the two models' probabilities, tasks, a table and a picture."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM
from typer.testing import CliRunner

from tokenmill import LLM, SamplingParams
from tokenmill.cli.verbs import app
from tokenmill.core.config import CacheOptions
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.engine.load.model_source import find_source
from tokenmill.measure.perplexity import perplexity
from tokenmill.measure.quality import Quality, Questions, _windows, compare, read_tasks
from tokenmill.measure.quality_picture import draw, short_names
from tokenmill.quantize import calibration_text
from tokenmill.quantize.quantize_model import QuantizeJob, quantize_model
from tokenmill.quantize.recipes import Recipe, complete_recipe
from tokenmill.testing.tiny import make_tiny

TEXT = "The river was quiet, and nobody spoke for a while. " * 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    tmp = tmp_path_factory.mktemp("quality")
    base = make_tiny(tmp / "base", hidden=64)
    quantize_model(QuantizeJob(base, tmp / "few", complete_recipe(Recipe(method="rtn", bits=2, group=32))))
    return base, tmp / "few"


def test_figures_are_what_the_engine_says(folders: tuple[Path, Path]) -> None:
    base, few = (str(folder) for folder in folders)
    first, second, same = compare(base, [few, base], Questions(TEXT, speed=False))
    assert first.kl is None and same.kl == 0.0 and same.agreement == 1.0 and same.perplexity == first.perplexity
    assert second.kl is not None and second.kl > 0.001 and second.agreement is not None and second.agreement < 1.0
    assert second.weight_bytes < first.weight_bytes
    with LLM(model=few, max_num_seqs=2, kv_cache_memory_bytes=8 << 20) as llm:
        ids = llm.get_tokenizer().encode(TEXT)
        width = len(ids) // -(-len(ids) // 256)
        lost = []
        for at in range(0, len(ids) - width + 1, width):
            window = ids[at : at + width]
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            (out,) = llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)
            rows = zip(window, out.prompt_logprobs or [], strict=True)
            lost += [-row[i].logprob for i, row in rows if row is not None]
    assert abs(second.perplexity / float(torch.tensor(lost).mean().exp()) - 1) < 0.02


def test_stored_keys_and_values_are_judged_too(folders: tuple[Path, Path]) -> None:
    base, lost = str(folders[0]), {}
    for kind in ("float32", "int8", "int4-fp8k", "int4"):
        cache = CacheOptions(kv_cache_dtype=kind)
        _, found = compare(base, [base], Questions(TEXT, speed=False, cache=cache))
        lost[kind] = found.kl or 0.0
    assert lost["float32"] == 0.0 < 5 * lost["int8"] < lost["int4"] and lost["int4-fp8k"] < lost["int4"]
    refused = CliRunner().invoke(app, ["quality", base, "--against", base, "--kv-cache-dtype", "int3"])
    assert refused.exit_code == 2 and "int4-fp8k" in refused.output


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a table of 48 positions."""
    folder = make_tiny(tmp_path_factory.mktemp("short"), hidden=64)
    (folder / "model.safetensors").unlink()
    config = OPTConfig(vocab_size=320, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
                       max_position_embeddings=48, word_embed_proj_dim=64, bos_token_id=None, eos_token_id=0,
                       pad_token_id=None)  # fmt: skip
    torch.manual_seed(0)
    OPTForCausalLM(config).save_pretrained(folder)
    return folder


def test_texts_are_cut_as_short_as_the_context(short: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["quantize", str(short), str(tmp_path / "q"), "--method", "gptq", "--samples", "4"])
    assert told.exit_code == 0, told.output
    assert json.loads((tmp_path / "q" / "quantization_report.json").read_text())["recipe"]["length"] == 48
    base, copy = compare(str(short), [str(tmp_path / "q")], Questions(TEXT))
    assert copy.kl is not None and 0 < copy.kl < 0.1 and base.tokens_per_s
    assert _windows(find_source(str(short)), TEXT, 48)[0].shape[1] <= 48
    for verb in (
        ["quantize", "--method", "gptq"],
        ["quantize", "--method", "rtn", "--kv-scales"],
        ["prune", "--channels", "0.5"],
    ):
        refused = CliRunner().invoke(app, [*verb, str(short), str(tmp_path / "no"), "--length", "49"])
        assert refused.exit_code == 2 and "--length 49 is more than the 48 tokens" in refused.output


def test_nearly_all_of_a_text_is_judged(folders: tuple[Path, Path]) -> None:
    source = find_source(str(folders[0]))
    ids = source.tokenizer().encode(TEXT)
    windows, _ = _windows(source, TEXT, len(ids) - 1)
    assert len(windows) > 1 and len(ids) - windows.numel() < len(windows) and windows.shape[1] <= 256


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"prompt": "", "choices": ["a", "b"], "answer": 1}, "the prompt of the task '' has no tokens"),
        ({"prompt": "word " * 40, "answer": "x"}, "the models' shortest context has 48"),
        ({"prompt": "word", "choices": ["a", "xyz " * 40], "answer": 0}, "the models' shortest context has 48"),
    ],
)
def test_tasks_that_cannot_be_scored(entry: dict[str, Any], said: str, short: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").write_text(json.dumps(entry))
    with pytest.raises(UserError, match=said):
        compare(str(short), [], Questions(TEXT, read_tasks(tmp_path / "tasks"), speed=False))


def test_models_that_cannot_be_compared(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Another number of tokens, and weights that are not finite."""
    base = str(folders[0])

    def changed(name: str, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> Path:
        folder = tmp_path / name
        shutil.copytree(base, folder)
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        change(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def widen(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.shape[0] == config["vocab_size"]:
                tensors[name] = torch.cat([tensor, tensor[:32]])
        config["vocab_size"] += 32

    def damage(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][3] = float("nan")

    wider, damaged = changed("wider", widen), changed("damaged", damage)
    for other, said in ((wider, "352 tokens apart"), (damaged, "NaN on the text")):
        with pytest.raises(UserError, match=said):
            compare(base, [str(other)], Questions(TEXT, speed=False))


def test_each_window_begins_as_texts_do(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Models whose tokenizer puts a token before every text compute something else without it."""
    led = tmp_path / "led"
    shutil.copytree(folders[0], led)
    said = json.loads((led / "tokenizer.json").read_text())
    name, number = said["added_tokens"][0]["content"], said["added_tokens"][0]["id"]
    first, text = {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    said["post_processor"] = {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text, text],
                              "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}}}  # fmt: skip
    (led / "tokenizer.json").write_text(json.dumps(said))
    source, plain = find_source(str(led)), find_source(str(folders[0])).tokenizer().encode(TEXT)
    assert calibration_text.lead_and_rest(TEXT, source.tokenizer().encode) == ([number], plain)
    assert calibration_text.lead_and_rest(TEXT, find_source(str(folders[0])).tokenizer().encode) == ([], plain)
    for cut in (_windows(source, TEXT, 256)[0], calibration_text.sequences(TEXT, source.tokenizer().encode, 4, 65)):
        assert cut[:, 0].tolist() == [number] * len(cut) and len(cut) > 1
        assert cut[0, 1:].tolist() == plain[: cut.shape[1] - 1]
    (found,) = compare(str(led), [], Questions(TEXT, speed=False))
    with LLM(model=str(led), max_num_seqs=2, kv_cache_memory_bytes=8 << 20) as llm:
        lost = []
        for window in _windows(source, TEXT, 256)[0].tolist():
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            (out,) = llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)
            lost += [-row[i].logprob for i, row in zip(window, out.prompt_logprobs or [], strict=True) if row]
    wanted = float(torch.tensor(lost).mean().exp())
    assert abs(found.perplexity / wanted - 1) < 0.02
    told = perplexity({"model": str(led), "max_num_seqs": 2, "kv_cache_memory_bytes": 8 << 20}, TEXT, 256)
    assert told.tokens == len(plain) and abs(told.value / wanted - 1) < 0.05


def test_command(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, few = (str(folder) for folder in folders)
    tasks, text, picture = tmp_path / "tasks.jsonl", tmp_path / "text.txt", tmp_path / "picture.svg"
    lines = [{"prompt": "A", "choices": ["b", "c d"], "answer": 1}, {"prompt": "Say", "answer": "never, I think"}]
    tasks.write_text("\n".join(map(json.dumps, lines)) + "\n")
    text.write_text(TEXT)
    options = ["--against", base, "--tasks", str(tasks), "--text", str(text), "--picture", str(picture)]
    result = CliRunner().invoke(app, ["quality", few, *options, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("[") :])
    assert [one["tasks"] for one in found] == pytest.approx([found[0]["tasks"], found[1]["tasks"]])
    assert all(one["tasks"] in (0.0, 0.5, 1.0) and one["tokens_per_s"] > 0 for one in found)
    root = ElementTree.fromstring(picture.read_text())
    assert any("few" in (text.text or "") for text in root.iter() if text.tag.endswith("text"))
    result = CliRunner().invoke(app, ["quality", few, "--against", base, "--text", str(text), "--no-speed"])
    assert result.exit_code == 0 and "perplexity" in result.output and "few" in result.output


def test_names_tell_models_apart() -> None:
    """Folders of one name show what lies above them, and others only their own."""
    names = [
        "demo",
        "/a/run/one/best",
        "/a/run/two/best",
        "org/model.gguf",
        ".",
        "b/c/",
        "x/two/best",
        "/a/run/two/best",
    ]
    shown = ["demo", "one/best", "run/two/best", "model.gguf", ".", "c", "x/two/best", "run/two/best"]
    assert short_names(names) == shown
    found = [Quality(name, 9, 2.0, None if not n else 0.1, 1.0, None, None) for n, name in enumerate(names[:3])]
    assert all(f">{name}<" in draw(found) for name in ("demo", "one/best", "two/best"))


@pytest.mark.parametrize("line", ["[]", "{", '{"prompt": "a"}', '{"prompt": "a", "choices": ["x"], "answer": 0}',
                                  '{"prompt": "a", "choices": ["x", "y"], "answer": 2}'])  # fmt: skip
def test_bad_tasks(line: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"\n\n{line}\n")
    with pytest.raises(ParameterError, match="line 3"):
        read_tasks(path)
    path.write_text('{"prompt": "a", "choises": ["x", "y"], "answer": "x"}')
    with pytest.raises(ParameterError, match="line 1: 'choises' is no field"):
        read_tasks(path)


def test_bad_questions(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 16 are needed"):
        compare(str(folders[0]), [], Questions("a", speed=False))
    result = CliRunner().invoke(app, ["quality", "a", "--against", "b", "--picture", str(tmp_path / "x.png")])
    assert result.exit_code == 2 and "name a .svg" in result.output


def test_a_picture_that_nobody_can_write_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *given: False)
    result = CliRunner().invoke(app, ["quality", "demo", "--against", "demo", "--picture", str(tmp_path / "x.svg")])
    assert result.exit_code == 2 and "nothing can be made in" in " ".join(result.output.split())
    assert "perplexity" not in result.output
