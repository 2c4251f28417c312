"""Files at which the tokenizers library panics: a sentence with the file's name, and nothing on standard error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tokenmill.core.errors import ModelError
from tokenmill.text.tokenizer import load_tokenizer

LACKING = {
    "type": "TemplateProcessing",
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {},
}  # fmt: skip
MADE = {**LACKING, "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}


def folder_with(state: dict[str, Any], folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


@pytest.fixture
def state(byte_level: Tokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(byte_level.to_str())
    return found


@pytest.mark.parametrize("prefix", ["##", "é", "\U0001f600", "x" * 1000])
@pytest.mark.parametrize("joined", [False, True], ids=["pairs", "texts"])
def test_a_prefix_longer_than_what_is_joined(
    prefix: str, joined: bool, state: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = state["model"]
    model["continuing_subword_prefix"] = prefix
    if joined:
        model["merges"] = [" ".join(merge) for merge in model["merges"]]
    with pytest.raises(ModelError, match=r"tokenizer\.json: continuing_subword_prefix .* is longer than") as caught:
        load_tokenizer(folder_with(state, tmp_path))
    assert capfd.readouterr().err == "" and len(str(caught.value)) < 500


def test_a_prefix_that_fits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    vocab = {"a": 0, "##b": 1, "ab": 2}
    model = {"type": "BPE", "continuing_subword_prefix": "##", "vocab": vocab, "merges": [["a", "##b"]]}
    made = load_tokenizer(folder_with({"version": "1.0", "added_tokens": [], "model": model}, tmp_path))
    assert made.encode("ab") == [2] and capfd.readouterr().err == ""


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a sequence"])
def test_a_frame_whose_token_has_no_number(
    inside: bool, state: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state["post_processor"] = {"type": "Sequence", "processors": [LACKING]} if inside else LACKING
    with pytest.raises(ModelError, match="post_processor names the token '<s>', which is not among its special_tokens"):
        load_tokenizer(folder_with(state, tmp_path))
    assert capfd.readouterr().err == ""
    state["post_processor"] = {"type": "Sequence", "processors": [MADE]} if inside else MADE
    assert load_tokenizer(folder_with(state, tmp_path)).encode("a", add_special_tokens=True)[0] == 1
