"""Drafters that are made load, are right more often the longer they learn, and go on where they were stopped."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.folder import open_checkpoint
from tokenmill.cli.verbs import app
from tokenmill.core.config import make_config
from tokenmill.core.drafting import AllOfThem
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.distill.repair import _replace
from tokenmill.distill.students import MedusaStudent
from tokenmill.distill.teacher import Teacher
from tokenmill.distill.texts import cut, read_texts
from tokenmill.measure.conversations import Reader
from tokenmill.measure.quality import read_tasks
from tokenmill.testing.tiny import make_tiny

SETTINGS = ["--batch", "8", "--length", "32", "--device", "cpu", "--checkpoint-every", "20", "--rate", "0.02"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model with few layers, and text of few words, so that something can be learnt in seconds."""
    root, rng = tmp_path_factory.mktemp("distill"), random.Random(0)
    make_tiny(root / "teacher", layers=3)
    words = ["mill ", "flour ", "bread ", "grain ", "sails "]
    (root / "text.txt").write_text("".join(rng.choice(words) + "grinds " for _ in range(1500)))
    return root


def distill(root, name, kind, *more):
    """The verb, which must succeed."""
    arguments = ["distill", str(root / "teacher"), str(root / name), "--data", str(root / "text.txt"), "--kind", kind]
    done = CliRunner().invoke(app, [*arguments, *SETTINGS, *more])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("kind", ["draft", "medusa", "eagle3"])
def test_what_is_made_loads_and_guesses(kind, teacher):
    said = distill(teacher, kind, kind, "--steps", "40")
    spec = json.loads(said[said.index("'{") + 1 : said.rindex("'")])
    assert f"--speculative-config '{json.dumps(spec)}'" in said
    options = {"max_num_seqs": 4, "max_model_len": 256, "num_blocks": 64, "dtype": "float32", "device": "cpu"}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    text = (teacher / "text.txt").read_text()
    prompts = [text[n : n + 60] for n in range(0, 1600, 100)]  # what was learnt from: the answers soon leave it
    with LLM(str(teacher / "teacher"), **options) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(str(teacher / "teacher"), **options, speculative_config={**spec, "num_speculative_tokens": 2}) as llm:
        llm.engine.scheduler.ahead.control = AllOfThem(2)
        found = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        counters = llm.engine.scheduler.counters
    assert found == wanted
    assert counters.drafted > 20 and (kind != "eagle3" or counters.accepted > 0)
    losses = [float(line.split("loss")[1].split()[0]) for line in said.splitlines() if "loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("kind", "more"), [("draft", []), ("draft", ["--hidden", "32"]), ("medusa", []), ("eagle3", [])]
)
def test_the_same_seed_makes_the_same_bytes(kind, more, teacher, tmp_path):
    """First weights follow from it, too."""
    made = []
    for n, seed in enumerate(("5", "5", "6")):
        torch.rand(n + 1)  # what else the process draws does not count
        folder = tmp_path / str(n)
        distill(teacher, folder, kind, "--steps", "2", "--seed", seed, *more)
        made.append((folder / "model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]


def test_no_more_time_is_left_than_was_given(teacher):
    said = distill(teacher, "timed", "draft", "--steps", "1000000", "--minutes", "0.02")
    left = [float(line.split("  ")[-1].split()[0]) for line in said.splitlines() if "min left" in line]
    assert left and max(left) <= 0.1


def test_learning_that_was_stopped_goes_on_as_if_it_had_not_been(teacher):
    distill(teacher, "whole", "medusa", "--steps", "40")
    distill(teacher, "parts", "medusa", "--steps", "40", "--minutes", "0.000001")
    assert torch.load(teacher / "parts" / "training.pt", weights_only=True)["step"] == 1
    distill(teacher, "parts", "medusa", "--steps", "40", "--resume")
    whole, parts = (load_file(teacher / name / "model.safetensors") for name in ("whole", "parts"))
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("broken", ["model.safetensors", "config.json", "training.pt"])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(teacher, monkeypatch, broken):
    name = f"full-{broken}"
    settings = ["--steps", "2", "--checkpoint-every", "1"]
    distill(teacher, name, "medusa", "--steps", "1", "--checkpoint-every", "1")
    before = {file.name: file.read_bytes() for file in (teacher / name).iterdir()}
    place = Path.replace

    def full(self, target):
        if Path(target).name == broken:
            raise OSError(28, "No space left on device")
        return place(self, target)

    monkeypatch.setattr(Path, "replace", full)
    arguments = ["distill", str(teacher / "teacher"), str(teacher / name), "--data", str(teacher / "text.txt")]
    done = CliRunner().invoke(app, [*arguments, "--kind", "medusa", *SETTINGS, *settings, "--resume"])
    assert done.exit_code == 2 and "No space left" in done.output and "Traceback" not in done.output
    after = {file.name: file.read_bytes() for file in (teacher / name).iterdir()}
    assert after.keys() == before.keys() and after[broken] == before[broken]
    monkeypatch.undo()
    distill(teacher, name, "medusa", *settings, "--resume")


@pytest.mark.parametrize("kind", ["draft", "medusa"])
@pytest.mark.parametrize("broken", ["model.safetensors", "config.json", "training.pt", "the first step"])
def test_without_a_whole_checkpoint_nothing_is_left(teacher, monkeypatch, kind, broken):
    from tokenmill.distill import train

    name, place = f"none-{kind}-{broken}", Path.replace

    def full(self, target):
        if Path(target).name == broken:
            raise OSError(28, "No space left on device")
        return place(self, target)

    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", full)
    if broken == "the first step":
        monkeypatch.setattr(train, "_learn", stop)
    arguments = ["distill", str(teacher / "teacher"), str(teacher / name), "--data", str(teacher / "text.txt")]
    done = CliRunner().invoke(app, [*arguments, "--kind", kind, *SETTINGS, "--steps", "1"])
    assert done.exit_code == (130 if broken == "the first step" else 2) and "Traceback" not in done.output
    assert not (teacher / name).exists()
    monkeypatch.undo()
    distill(teacher, name, kind, "--steps", "1")


def test_answers_are_the_models_own(teacher):
    prompts = teacher / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ["mill", "flour", "bread"]))
    arguments = ["distill", str(teacher / "teacher"), str(teacher / "own"), "--data", str(prompts), "--kind", "medusa"]
    done = CliRunner().invoke(app, [*arguments, *SETTINGS, "--steps", "2", "--answers", "40"])
    assert done.exit_code == 0, done.output
    kept = teacher / "own" / "answers.jsonl"
    asked, *lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert asked["answers"] == 40
    assert len(lines) == 3 and all(len(line["tokens"]) > 20 > line["prompt"] > 0 for line in lines)
    arguments += [*SETTINGS, "--steps", "3", "--resume"]
    assert CliRunner().invoke(app, [*arguments, "--answers", "40"]).exit_code == 0
    whole = kept.read_text()
    kept.write_text(whole.removesuffix(f"{whole.splitlines()[-1][9:]}\n"))  # as if it had been killed while it wrote
    assert CliRunner().invoke(app, [*arguments, "--answers", "40"]).exit_code == 0
    assert kept.read_text() == whole, "what was missing is made, and nothing else"
    early = teacher / "early"
    early.mkdir()
    (early / kept.name).write_text("".join(whole.splitlines(keepends=True)[:3]))  # before there was any checkpoint
    again = [str(early) if each == str(teacher / "own") else each for each in arguments]
    assert CliRunner().invoke(app, [*again, "--answers", "40"]).exit_code == 0
    assert sorted((early / kept.name).read_text().splitlines()) == sorted(whole.splitlines())
    assert "answers of another --answers" in CliRunner().invoke(app, [*arguments, "--answers", "41"]).output
    prompts.write_text(prompts.read_text() + '"grain"\n')
    assert "answers of another --data" in CliRunner().invoke(app, [*arguments, "--answers", "40"]).output
    (teacher / "long.jsonl").write_text(json.dumps({"prompt": "mill " * 3000}) + "\n")
    more = ["distill", str(teacher / "teacher"), str(teacher / "long"), "--data", str(teacher / "long.jsonl")]
    done = CliRunner().invoke(app, [*more, *SETTINGS, "--answers", "40"])
    assert done.exit_code == 2 and "--data: a text of " in done.output and "--max-model-len" not in done.output
    assert not (teacher / "long").exists(), "the same folder may be named again"
    kept.write_text(kept.read_text().replace("tokens", "token"))
    assert "cannot be read" in CliRunner().invoke(app, [*arguments, "--answers", "40"]).output


@pytest.mark.parametrize(
    "more", [["--batch", "4"], ["--seed", "1"], ["--length", "16"], ["--heads", "2"], ["--kind", "eagle3"]]
)
def test_who_goes_on_sees_the_same_lines(more, teacher):
    if not (teacher / "same").exists():
        distill(teacher, "same", "medusa", "--steps", "2")
    arguments = ["distill", str(teacher / "teacher"), str(teacher / "same"), "--data", str(teacher / "text.txt")]
    arguments += ["--kind", "medusa", *SETTINGS, "--steps", "3", "--resume", *more]
    said = CliRunner().invoke(app, arguments).output
    assert f"was learnt with another {more[0]}" in said or (more[0] == "--length" and more[0] in said), said


def test_who_goes_on_with_another_model_is_told(teacher, tmp_path):
    """The same model may have been moved."""
    if not (teacher / "same").exists():
        distill(teacher, "same", "medusa", "--steps", "2")
    shutil.copytree(teacher / "teacher", tmp_path / "moved")
    shutil.copytree(teacher / "same", tmp_path / "same")
    arguments = [str(tmp_path / "same"), "--data", str(teacher / "text.txt"), "--kind", "medusa", *SETTINGS, "--resume"]
    done = CliRunner().invoke(app, ["distill", str(tmp_path / "moved"), *arguments, "--steps", "3"])
    assert done.exit_code == 0, done.output
    make_tiny(tmp_path / "other", layers=3, seed=9)
    done = CliRunner().invoke(app, ["distill", str(tmp_path / "other"), *arguments, "--steps", "4"])
    assert done.exit_code == 2 and "was learnt with another MODEL" in done.output, done.output


def test_wrong_input_is_told(teacher, tmp_path):
    for text, said in (("", "no text"), ("{", "not JSON"), ('{"word": 1}', "text")):
        file = tmp_path / "data.jsonl"
        file.write_text(text)
        with pytest.raises(ParameterError, match=said):
            read_texts(file)
    with pytest.raises(ParameterError, match="cannot be read"):
        read_texts(tmp_path / "nothing")
    with pytest.raises(ParameterError, match="too few"):
        cut([[1, 2, 3]], 16)
    learnt, judged = cut([list(range(100))], 10)
    assert learnt.tokens.shape == (9, 10) == learnt.own.shape and judged.tokens.shape == (1, 10)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("x")
    arguments = ["distill", "demo", str(full), "--data", str(teacher / "text.txt")]
    assert "not empty" in CliRunner().invoke(app, arguments).output
    arguments = ["distill", str(teacher / "teacher"), str(tmp_path / "long"), "--data", str(teacher / "text.txt")]
    assert "context of" in " ".join(CliRunner().invoke(app, [*arguments, "--length", "2049"]).output.split())
    assert not (tmp_path / "long").exists()


@pytest.mark.parametrize("whose", ["its own", "another"])
def test_no_model_is_lost_by_going_on_in_its_folder(whose, teacher, tmp_path):
    shutil.copytree(teacher / "teacher", tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    model = str(tmp_path / "model") if whose == "its own" else str(teacher / "teacher")
    arguments = ["distill", model, str(tmp_path / "model"), "--data", str(teacher / "text.txt"), "--kind", "medusa"]
    done = CliRunner().invoke(app, [*arguments, *SETTINGS, "--steps", "1", "--resume"])
    assert ("is the model itself" if whose == "its own" else "no training.pt to go on from") in done.output
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_more_layers_than_there_are_cannot_be_cut_out(teacher, tmp_path):
    arguments = ["distill", str(teacher / "teacher"), str(tmp_path / "x"), "--data", str(teacher / "text.txt")]
    done = CliRunner().invoke(app, [*arguments, *SETTINGS, "--steps", "1", "--layers", "4"])
    assert "--layers 4: " in done.output and "has no more than 3" in done.output


def test_every_head_has_something_to_learn(teacher, tmp_path):
    arguments = ["distill", str(teacher / "teacher"), str(tmp_path / "x"), "--data", str(teacher / "text.txt")]
    done = CliRunner().invoke(app, [*arguments, "--kind", "medusa", "--heads", "15", "--length", "16"])
    assert done.exit_code == 2 and "--heads 15: " in done.output and "from --length 17 on" in done.output


def test_the_largest_seed(teacher, tmp_path):
    distill(teacher, tmp_path / "x", "medusa", "--steps", "1", "--seed", str((1 << 63) - 1))


def test_lines_end_at_line_feeds_alone(tmp_path):
    """JSON may hold what Unicode calls a line's end, too."""
    said = "one\u2028two\u2029three\x85four"
    texts, tasks, talks = (tmp_path / f"{name}.jsonl" for name in ("texts", "tasks", "talks"))
    tasked = [{"prompt": said, "max_tokens": 3}] * 2
    lines = [{"text": said}, {"prompt": said}], [{"prompt": said, "answer": said}], tasked
    for path, entries in zip((texts, tasks, talks), lines, strict=True):
        path.write_text("\n\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries))
    assert read_texts(texts) == [said, said]
    assert [task.prompt for task in read_tasks(tasks)] == [said]
    assert len(Reader(talks, vocab=300).read()) == 2
    texts.write_text('{"text": "one"}\n\n{"text": 2}\n')
    with pytest.raises(ParameterError, match="line 3: needs a string"):
        read_texts(texts)


def test_a_teacher_whose_layers_see_windows(tmp_path, teacher):
    """Layers with windows and others keep their K/V in tables of their own, on pages of one pool."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=320, hidden_size=96, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=32,
        intermediate_size=112, sliding_window=16, max_position_embeddings=128,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    shutil.copy(teacher / "teacher" / "tokenizer.json", tmp_path)
    ours = Teacher(make_config(model=str(tmp_path), device="cpu", dtype="float32"), 2, 48)
    tokens = torch.randint(0, 320, (2, 48), generator=torch.Generator().manual_seed(1))
    found = ours.states(tokens, torch.ones_like(tokens, dtype=torch.bool), logits=True)
    with torch.no_grad():
        assert torch.allclose(found.logits, theirs(tokens).logits, atol=2e-3)


def test_a_copy_that_cannot_learn_is_as_it_was_cut(tmp_path, teacher, monkeypatch):
    def fails(*_, **__):
        raise UserError("The loss is not finite any more: try a smaller --rate.")

    monkeypatch.setattr("tokenmill.distill.repair.train", fails)
    words = ["prune", str(teacher / "teacher"), str(tmp_path / "out"), "--layers", "1", "--samples", "2"]
    words += ["--length", "32", "--repair", str(teacher / "text.txt"), "--steps", "1", "--line", "16"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "out is as it was cut" in " ".join(done.output.split()), done.output
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["gptj", "cohere"])
def test_heads_learn_what_the_model_makes_of_their_states(name, tmp_path, teacher):
    """Its head may have a bias, a scale or a soft cap."""
    from transformers import AutoModelForCausalLM, CohereConfig, GPTJConfig

    torch.manual_seed(0)
    config = (
        GPTJConfig(vocab_size=320, n_embd=64, n_layer=2, n_head=2, n_positions=128, rotary_dim=8)
        if name == "gptj"
        else CohereConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, logit_scale=0.25)
    )
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if name == "gptj":
        theirs.lm_head.bias.data.normal_()
    theirs.save_pretrained(tmp_path)
    shutil.copy(teacher / "teacher" / "tokenizer.json", tmp_path)
    ours = Teacher(make_config(model=str(tmp_path), device="cpu", dtype="float32"), 2, 32)
    tokens = torch.randint(0, 320, (2, 32), generator=torch.Generator().manual_seed(1))
    states = ours.states(tokens, torch.ones_like(tokens, dtype=torch.bool), logits=True)
    heads = MedusaStudent(ours, heads=1)  # which begins as the model's own head
    with torch.no_grad():
        found = heads.logits(states.hidden, heads.words)
        assert torch.allclose(found, states.logits, atol=1e-4)
        assert torch.allclose(found, theirs(tokens).logits, atol=2e-3)


@pytest.mark.parametrize("stop", range(4))
def test_a_copy_can_be_read_wherever_putting_learnt_layers_in_place_stops(stop, tmp_path, monkeypatch):
    for part in (1, 2):
        save_file({f"layer.{part}": torch.zeros(2)}, tmp_path / f"model-{part:05}-of-00002.safetensors")
    named = {f"layer.{part}": f"model-{part:05}-of-00002.safetensors" for part in (1, 2)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    learnt, unlink, calls = tmp_path / "learnt", Path.unlink, []
    save_file({f"layer.{part}": torch.ones(2) for part in (1, 2)}, learnt)

    def killed(path, **more):
        calls.append(path)
        if len(calls) > stop:
            raise KeyboardInterrupt
        unlink(path, **more)

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(Path, "unlink", killed)
        _replace(tmp_path, learnt)
    found = open_checkpoint(tmp_path)
    assert all(torch.equal(found.tensor(name), torch.full((2,), min(stop, 1.0))) for name in named)
