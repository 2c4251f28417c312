"""Streamed text is the decoded text, whatever the ids and however they are cut."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from tokenmill.text.codec import Tokenizer
from tokenmill.text.stream_decoder import StreamDecoder
from tokenmill.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def family(
    byte_level: tokenizers.Tokenizer, sentencepiece_files: dict[str, Path], word_piece: tokenizers.Tokenizer
) -> dict[str, Tokenizer]:
    metaspace = tokenizers.Tokenizer.from_str(load_tokenizer(sentencepiece_files["bpe"])._inner.to_str())
    metaspace.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Metaspace(), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    return {
        "byte level": Tokenizer(byte_level),
        "bpe": load_tokenizer(sentencepiece_files["bpe"]),
        "unigram": load_tokenizer(sentencepiece_files["unigram"]),
        "metaspace": Tokenizer(metaspace),
        "word piece": Tokenizer(word_piece),
    }


NAMES = ["byte level", "bpe", "unigram", "metaspace", "word piece"]


def stream(ours: Tokenizer, prompt: list[int], rows: list[list[int]], skip: bool, spaces: bool = True) -> list[str]:
    decoder = StreamDecoder(ours, prompt, skip, spaces)
    return [*map(decoder.push, rows), decoder.flush()]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_streamed_is_decoded(data: st.DataObject, name: str, family: dict[str, Tokenizer]) -> None:
    ours = family[name]
    # Half of the ids are bytes, so that broken and split characters are common.
    ids = st.one_of(st.integers(0, ours.vocab_size + 2), st.integers(0, min(270, ours.vocab_size)))
    prompt = data.draw(st.lists(ids, max_size=6))
    rows = data.draw(st.lists(st.lists(ids, max_size=4), max_size=8))
    skip, spaces = data.draw(st.booleans()), data.draw(st.booleans())
    options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    before = ours.decode(prompt, **options)
    whole = ours.decode([*prompt, *chain.from_iterable(rows)], **options)
    got = "".join(stream(ours, prompt, rows, skip, spaces))
    if whole != before + got:
        # Only a prompt that ends inside a character may differ: the output completes it. Some decoders show up to three
        # bytes of such a character one by one.
        assert whole in [before[:-n] + got for n in (1, 2, 3) if before.endswith("\ufffd" * n)]


@pytest.mark.parametrize("name", ["byte level", "bpe", "unigram", "metaspace"])
@settings(max_examples=60, deadline=None)
@given(text=st.text("ab 😀風é\n'", max_size=20))
def test_valid_text_never_shows_a_broken_character(text: str, name: str, family: dict[str, Tokenizer]) -> None:
    ours = family[name]
    ids = ours.encode(text)
    parts = stream(ours, [], [[index] for index in ids], True)
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == ours.decode(ids)


def test_each_character_comes_with_its_last_byte(family: dict[str, Tokenizer]) -> None:
    ours = family["bpe"]
    ids = [ours.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "é😀".encode()]
    assert stream(ours, [], [[index] for index in ids], True) == ["", "é", "", "", "", "😀", ""]


def test_invalid_bytes_show_as_soon_as_they_are_certain(family: dict[str, Tokenizer]) -> None:
    ours = family["bpe"]
    lead, tail = ours.token_to_id("<0xF0>") or 0, ours.token_to_id("<0x9F>") or 0
    assert stream(ours, [], [[lead], [lead], [tail], []], True) == ["", "\ufffd", "", "", "\ufffd"]


def test_only_the_first_space_is_stripped(family: dict[str, Tokenizer]) -> None:
    ours = family["bpe"]
    the, bos = ours.encode("The", add_special_tokens=False), ours.bos_id or 0
    assert "".join(stream(ours, [], [the, the], True)) == "The The"
    assert "".join(stream(ours, [bos], [the], True)) == "The"
    assert "".join(stream(ours, the, [the], True)) == " The"


def test_a_prompt_that_ends_inside_a_character(family: dict[str, Tokenizer]) -> None:
    ours = family["byte level"]
    ids = [index for byte in "😀".encode() for index in range(256) if ours.token_bytes(index) == bytes([byte])]
    assert stream(ours, ids[:2], [ids[2:]], True) == ["😀", ""]


def without_table() -> Tokenizer:
    """A vocabulary of bytes, letters and U+FFFD itself, with a decoder whose tokens have no fixed bytes."""
    words = [f"<0x{value:02X}>" for value in range(256)] + ["a", "é", "\ufffd", "zz"]
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("zz", "y")])
    made = Tokenizer(inner)
    assert made.piece_table(True) is None
    return made


def test_replacement_characters_that_a_model_says_are_not_held_back() -> None:
    made, draw = without_table(), random.Random(6)
    kinds = [[*"\U0001f600é中".encode(), 256], [256], [257], [258], [258] * 5, [259], [0xF0, 0x9F, 256], [0x80, 256]]
    for _ in range(300):
        prompt = [token for _ in range(draw.randint(0, 3)) for token in draw.choice(kinds[1:3])]
        ids = [token for _ in range(draw.randint(1, 12)) for token in draw.choice(kinds)]
        stream = StreamDecoder(made, prompt)
        said = "".join(stream.push([token]) for token in ids) + stream.flush()
        assert made.decode(prompt) + said == made.decode(prompt + ids)
    stream = StreamDecoder(made, [256])
    shown = "".join(stream.push([258]) for _ in range(100))
    assert shown == "\ufffd" * 97, "at most three tokens may be an unfinished character"
