"""generation_config.json: every field is done, harmless or named; bad values are refused at load."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import tokenizers
from tests.cpu.engine.engines import open_llm, run
from transformers import GenerationConfig

from tokenmill import SamplingParams
from tokenmill.core.errors import ModelError
from tokenmill.engine.options.generation import (
    DONE,
    HARMLESS,
    IN_CONFIG,
    NAMED,
    banned,
    check_generation,
    default_params,
)
from tokenmill.engine.steps.text import eos_ids_of
from tokenmill.text.codec import Tokenizer, TokenizerSettings

FIELDS = sorted(vars(GenerationConfig()))
OTHERS = {"stop_strings": ["x"], "forced_bos_token_id": 3, "forced_eos_token_id": 3, "begin_suppress_tokens": [1],
          "exponential_decay_length_penalty": [1, 1.1], "sequence_bias": [[[1], 2.0]], "watermarking_config": {"a": 1},
          "dola_layers": "high", "constraints": [{}], "force_words_ids": [[1]]}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_transformers_is_on_exactly_one_list(name):
    assert [name in one for one in (DONE, HARMLESS, NAMED)].count(True) == 1


@pytest.mark.parametrize("name", NAMED)
def test_a_field_that_is_not_applied_is_named_unless_it_asks_for_nothing(name):
    value = OTHERS.get(name, 0.5)
    (said,) = check_generation({name: value}, "here.json")
    assert said.startswith(f"here.json: '{name}' = ")
    for neutral in (*NAMED[name], None):
        assert check_generation({name: neutral}, "here.json") == []


def test_unknown_fields_are_named_and_harmless_ones_are_not():
    assert check_generation(dict.fromkeys(HARMLESS, 7), "x") == []
    assert check_generation({"temperatur": 1}, "x") == ["x: 'temperatur' is not known here, and ignored."]


BAD = [
    *[(name, value) for name in ("temperature", "top_p", "min_p", "repetition_penalty")
      for value in ("1", True, [], -3.0, float("nan"), float("inf"), 1e9)],
    *[("top_k", value) for value in (1.5, "50", -7, True, 2**40)],
    *[("max_new_tokens", value) for value in (0, -1, 1.5, "9", True)],
    *[("do_sample", value) for value in ("false", 0, 1, [], 2.5)],
    *[("eos_token_id", value) for value in (-1, "2", 1.5, True, [1, "x"], [[1]], {"a": 1}, 2**40)],
    *[("suppress_tokens", value) for value in ("1", [-1], [1.5], [True], {"a": 1}, list(range(5000)), 7)],
    *[("bad_words_ids", value) for value in ([1], [[]], [["a"]], [[-1]], "x", [[1]] * 5000, [[1] * 300], 7)],
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: repr(v)[:20])
def test_unusable_values_are_refused_with_file_and_field(name, value):
    with pytest.raises(ModelError, match=f"^a/generation_config.json: '{name}' = ") as caught:
        check_generation({name: value}, "a/generation_config.json")
    assert len(str(caught.value)) < 300


def test_defaults():
    assert default_params({}) == SamplingParams()
    full = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
    assert default_params(full) == SamplingParams(**full)
    assert default_params({**full, "do_sample": False}) == SamplingParams(temperature=0.0, repetition_penalty=1.05)
    assert default_params({"max_new_tokens": 77}).max_tokens == 77
    assert default_params(dict.fromkeys(full)) == SamplingParams()
    assert banned({"suppress_tokens": [4, 5], "bad_words_ids": [[1, 2], [9]], "eos_token_id": [9]}) == [
        [4],
        [5],
        [1, 2],
    ]


def test_defaults_that_stored_models_state():
    any_way = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repeat_last_n": 64, "stop": ["x"], "seed": 3}
    said = {**any_way, "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "temperature": 0.5}
    assert default_params(said) == SamplingParams(**said)
    assert default_params({**said, "do_sample": False}) == SamplingParams(temperature=0.0, **any_way)


def test_the_docs_hold_these_lists():
    page = (Path(__file__).parents[3] / "docs/model-folders.md").read_text()
    done, rest = page.split("## generation_config.json")[1].split("Not applied, and named")
    named, harmless = rest.split("##")[0].split("Of no effect here")
    assert re.findall(r"^\| `(\w+)` \| (.+) \|$", done, re.MULTILINE) == list(DONE.items())
    assert re.findall(r"`(\w+)`", named) == sorted(NAMED)
    assert re.findall(r"`(\w+)`", harmless) == sorted(HARMLESS)


@pytest.fixture
def folder(tiny, tmp_path):
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def test_suppressed_tokens_and_bad_words_are_never_said(folder, caplog):
    file = folder / "generation_config.json"
    said = json.loads(file.read_text())
    prompts, params = [[5, 6, 7], [9, 8]], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with open_llm(folder) as llm:
        free = [out.outputs[0].token_ids for out in run(llm, prompts, params)]
    more = {"suppress_tokens": free[0][:1], "bad_words_ids": [free[1][1:3]], "penalty_alpha": 0.9, "max_new_tokens": 5}
    file.write_text(json.dumps({**said, **more, "repetition_penalty": 1.5}))
    with caplog.at_level(logging.WARNING), open_llm(folder) as llm:
        bound = [out.outputs[0].token_ids for out in run(llm, prompts, params)]
        defaults = llm.get_default_sampling_params()
        assert len(llm.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids) <= 5
    assert all(free[0][0] not in row for row in bound)
    pair = free[1][1:3]
    assert all(row[i : i + 2] != pair for row in bound for i in range(len(row)))
    assert defaults == SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=5)
    named = [text for text in caplog.messages if "generation_config.json" in text]
    assert len(named) == 1 and "'penalty_alpha' = 0.9 is not applied here" in named[0]


def test_samplers_of_the_file_are_the_defaults():
    said = {"typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 2e-3, "no_repeat_ngram_size": 4, "top_p": 0.5}
    found = default_params(said)
    assert (found.typical_p, found.no_repeat_ngram_size, found.top_p) == (0.9, 4, 0.5)
    assert (found.epsilon_cutoff, found.eta_cutoff) == pytest.approx((3.0, 20.0))
    greedy = default_params({**said, "do_sample": False})
    assert greedy == SamplingParams(temperature=0.0, no_repeat_ngram_size=4)
    assert check_generation(said, "file") == []
    for name, value in (
        ("typical_p", 0.0),
        ("epsilon_cutoff", 2.0),
        ("eta_cutoff", -1.0),
        ("no_repeat_ngram_size", -1),
    ):
        with pytest.raises(ModelError, match=name):
            check_generation({name: value}, "file")


def test_loading_refuses_what_cannot_be_meant(folder):
    file = folder / "generation_config.json"
    for value, words in (
        ({"temperature": -1.0}, "'temperature' = -1.0"),
        ({"suppress_tokens": [999]}, "vocabulary of 320"),
    ):
        file.write_text(json.dumps(value))
        with pytest.raises(ModelError, match=f"generation_config.json: .*{words}"):
            open_llm(folder)


def test_a_word_does_not_end_answers_where_generation_config_names_what_does():
    """Configs keep the end token of the class that they were made with, which is a word of another vocabulary."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "#": 2}, merges=[]))
    inner.add_special_tokens(["<end>", "<turn>", "<stop>"])
    tokenizer = Tokenizer(inner, TokenizerSettings({"eos_token": "<stop>"}))
    word, end, turn, stop = 2, 3, 4, 5
    assert eos_ids_of({"eos_token_id": word}, {"eos_token_id": [end, turn]}, tokenizer) == {end, turn, stop}
    assert eos_ids_of({"eos_token_id": [word, turn]}, {"eos_token_id": end}, tokenizer) == {end, turn, stop}
    assert eos_ids_of({"eos_token_id": word}, {}, tokenizer) == {word, stop}
    assert eos_ids_of({"text_config": {"eos_token_id": word}}, {"eos_token_id": end}, None) == {word, end}
    omni = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"],
            "thinker_config": {"eos_token_id": turn, "text_config": {"eos_token_id": word}}}  # fmt: skip
    assert eos_ids_of(omni, {}, None) == {turn, word} and eos_ids_of(omni, {}, tokenizer) == {turn, word, stop}
    for given in ({"eos_token_id": word}, {"text_config": {"eos_token_id": word}}):
        assert eos_ids_of({"text_config": {}}, {"eos_token_id": end}, tokenizer, given) == {word, end, stop}


@pytest.mark.parametrize("end", [99999, "2", 2.5, True, -7, [2, 99999]])
def test_an_end_that_can_end_nothing_is_told(end, folder, caplog):
    """Dropped silently, it would leave answers that go on to their last token."""
    changes = [("config.json", end)]
    if isinstance(end, int) and end > 320:  # generation_config.json refuses the other ones
        changes.append(("generation_config.json", end))
    for name, value in changes:
        file = folder / name
        before = file.read_text()
        file.write_text(json.dumps({**json.loads(before), "eos_token_id": value}))
        caplog.clear()
        with caplog.at_level(logging.WARNING), open_llm(folder):
            pass
        file.write_text(before)
        bad = value[-1] if isinstance(value, list) else value
        assert [text for text in caplog.messages if "eos_token_id" in text] == [
            f"{name}: 'eos_token_id' = {bad!r} is none of the model's 320 tokens: no answer ends with it."
        ]


def test_a_file_that_has_no_end_says_so_with_a_minus(folder, caplog):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": -1}))
    with caplog.at_level(logging.WARNING), open_llm(folder):
        assert not [text for text in caplog.messages if "eos_token_id" in text]


def test_settings_of_answers_in_config_json_are_told_where_no_other_file_has_them(folder, caplog):
    """Transformers and vLLM apply them if there is no generation_config.json."""
    asked = {**dict.fromkeys(IN_CONFIG, 7), "suppress_tokens": [5], "bad_words_ids": [[5]]}
    neutral = {name: values[0] for name, values in IN_CONFIG.items() if values}
    file, beside = folder / "config.json", folder / "generation_config.json"
    config, kept = json.loads(file.read_text()), beside.read_text()

    def told(settings, **options):
        file.write_text(json.dumps({**config, **settings}))
        caplog.clear()
        with caplog.at_level(logging.WARNING), open_llm(folder, **options):
            return [text.split("'")[1] for text in caplog.messages if "settings of answers" in text]

    assert told(asked) == []
    beside.unlink()
    assert told(asked) == list(IN_CONFIG)
    assert told({"text_config": {"temperature": 0.3}}) == ["temperature"]
    assert told(neutral) == []
    assert told(asked, generation_config="vllm") == []
    given = told(asked, override_generation_config={"temperature": 0.5})
    assert given == [name for name in IN_CONFIG if name != "temperature"]
    beside.write_text(kept)
