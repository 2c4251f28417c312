"""Prompts with a gap: every form's order, texts that stay text, and SentencePiece's space."""

from __future__ import annotations

import random
import re

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tokenmill.testing.fake_generator import byte_tokenizer
from tokenmill.text import fill
from tokenmill.text.codec import Tokenizer as Codec
from tokenmill.text.fill import FORMS, FillForm, fill_ends, fill_ids, find_fill, snippet_ids


def words(form: FillForm) -> list[str]:
    return [form.prefix, form.suffix, *([] if form.middle is None else [form.middle]), *form.ends]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.prefix)
def test_every_form_stands_in_its_order(form: FillForm) -> None:
    tokenizer = byte_tokenizer([word for word in words(form) if word != "<|endoftext|>"])
    assert find_fill(tokenizer) == form
    text = tokenizer.decode(fill_ids(tokenizer, form, ("a(", ")b"), "c"), skip_special_tokens=False)
    first, second = f"{form.prefix}a(", f"{form.suffix})b"
    pair = second + first if form.suffix_first else first + second
    assert text == f"{pair}{form.middle or ''}c"
    ends = fill_ends(tokenizer, form)
    assert {tokenizer.token_to_id(word) for word in words(form)} == set(ends) and len(ends) == len(set(ends))
    spelled = fill_ids(tokenizer, form, (form.suffix, form.prefix), form.suffix)
    assert spelled.count(tokenizer.token_to_id(form.suffix)) == 1, "what is typed is no mark"
    assert fill_ids(tokenizer, form, ("", ""))


def test_no_marks_no_form() -> None:
    assert find_fill(None) is None and find_fill(byte_tokenizer()) is None
    assert find_fill(byte_tokenizer(["<|fim_prefix|>", "<|fim_suffix|>"])) is None


def test_a_suffix_gets_no_space_of_its_own() -> None:
    pieces = ["<unk>", "▁", *"abc()", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Replace("▁", " ")
    inner.add_tokens([AddedToken(piece, normalized=False) for piece in pieces[7:]])
    tokenizer = Codec(inner)
    form = find_fill(tokenizer)
    assert form is not None and form.prefix == "▁<PRE>"
    ids = fill_ids(tokenizer, form, ("a(", ")b"))
    assert [pieces[i] for i in ids] == ["▁<PRE>", "▁", "a", "(", "▁<SUF>", ")", "b", "▁<MID>"]


def test_other_files_stand_before() -> None:
    marked, bare = byte_tokenizer(["<|file_sep|>"]), byte_tokenizer()
    files = [("a.py", "x"), ("b.py", "y")]
    assert marked.decode(snippet_ids(marked, files), skip_special_tokens=False) == (
        "<|file_sep|>a.py\nx\n<|file_sep|>b.py\ny\n"
    )
    assert "a.py" not in bare.decode(snippet_ids(bare, files)) and snippet_ids(bare, []) == []


def test_a_cut_is_after_the_first_character_of_every_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "_SLICE", 16)  # most marks lie across slices
    marks = sorted({name for form in FORMS for name in (*form.names, *form.ends)})
    places = "|".join(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in marks)
    dice = random.Random(0)
    for _ in range(300):
        parts = [
            mark[: dice.randint(1, len(mark))] if dice.random() < 0.3 else mark for mark in dice.choices(marks, k=8)
        ]
        text = "".join(part + "a<" * dice.randint(0, 3) for part in parts)
        assert list(fill._cut(text)) == re.split(places, text)
