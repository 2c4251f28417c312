"""Tokenizers from every kind of file give the ids and texts that their own libraries give."""

from __future__ import annotations

import base64
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.core.errors import ModelError
from tokenmill.text.codec import Tokenizer, TokenizerSettings
from tokenmill.text.tokenizer import load_tokenizer

TEXTS = [
    "The mill turns.",
    " two  spaces   and more ",
    "風車 😀 naïve café\n\n\ttab",
    "",
    " ",
    "x",
    "1234567 it's IT'S we'll",
    "<tool>bread<tool> flour",
]


def test_json_file_round_trip(byte_level: tokenizers.Tokenizer, tmp_path: Path) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|start|>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == byte_level.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.eos_ids == (byte_level.token_to_id("<|end|>"),)
    assert ours.bos_id == byte_level.token_to_id("<|start|>")
    assert ours.special_ids == {ours.token_to_id("<|end|>"), ours.token_to_id("<|start|>")}
    assert ours.vocab_size == byte_level.get_vocab_size()
    assert ours.chat_template == "{{ messages }}"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_file_matches_the_library(kind: str, sentencepiece_files: dict[str, Path]) -> None:
    folder = sentencepiece_files[kind]
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    ours = load_tokenizer(folder)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in TEXTS[:-1]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_id(), (theirs.eos_id(),))
    assert ours.encode("a<tool>")[-1] == theirs.piece_to_id("<tool>")


def test_sentencepiece_bos_follows_the_settings(sentencepiece_files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_files["bpe"] / "tokenizer.model").read_bytes())
    assert load_tokenizer(tmp_path).encode("x")[0] == load_tokenizer(tmp_path).bos_id
    assert load_tokenizer(tmp_path).encode("x", add_special_tokens=False)[0] != load_tokenizer(tmp_path).bos_id
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_eos_token": True}))
    ours = load_tokenizer(tmp_path)
    assert ours.encode("x")[0] != ours.bos_id
    assert ours.encode("x")[-1] == ours.eos_ids[0]


def test_vocab_and_merges(byte_level: tokenizers.Tokenizer, tmp_path: Path) -> None:
    byte_level.model.save(str(tmp_path))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|start|>": byte_level.token_to_id("<|start|>")}))
    ours = load_tokenizer(tmp_path)
    assert ours.encode("<|start|>The mill's 風車") == byte_level.encode("<|start|>The mill's 風車").ids


@pytest.mark.parametrize("name", ["tokenizer.model", "words.tiktoken"])
def test_rank_file(name: str, byte_level: tokenizers.Tokenizer, tmp_path: Path) -> None:
    # Ranks in merge order: the single bytes first, then each merged token.
    byte_side = Tokenizer(byte_level)
    words = [bytes([byte]) for byte in range(256)]
    words += [byte_side.token_bytes(index) for index in range(256, byte_level.get_vocab_size() - 4)]
    lines = [base64.b64encode(word) + b" " + str(rank).encode() for rank, word in enumerate(words)]
    (tmp_path / name).write_bytes(b"\n".join(lines) + b"\n")
    added = {str(len(words)): {"content": "<|end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "eos_token": "<|end|>"}))
    ours = load_tokenizer(tmp_path)
    for text in ["The mill turns", "Der Müller mahlt 風車", "a<|end|>"]:
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
        want = byte_level.encode(text)
        assert [ours.token_bytes(i) for i in ids] == [byte_side.token_bytes(i) for i in want.ids]
    assert ours.eos_ids == (len(words),)


def rank_lines(words: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(word) + b" " + str(rank).encode() + b"\n" for rank, word in enumerate(words))


WORDS = [bytes([byte]) for byte in range(256)] + [b"12", b"th", "風".encode()[:2], "風".encode(), "風車".encode()]
KIMI = r"""[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""  # noqa: E501


def test_rank_files_of_classes_with_code(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(rank_lines(WORDS))
    listed = {str(len(WORDS) + 2): {"content": "<|im_end|>", "special": True}}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": listed, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    assert ours.eos_ids == (len(WORDS) + 2,) and ours.vocab_size == len(WORDS) + 256
    assert ours.encode("<|reserved_token_261|>") == [261]
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(KIMI), "isolated").pre_tokenize_str
    for text in ("風車x12345 th", "Naïve風Words don't 漢字かな", "a\n\n b"):
        words = [word for word, _ in split(text)]
        assert [i for word in words for i in ours.encode(word)] == ours.encode(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OddTokenizer"}))
    with pytest.raises(ModelError, match="a pattern in the code of 'OddTokenizer', which is not known"):
        load_tokenizer(tmp_path)


TEKKEN: dict[str, Any] = {
    "config": {"pattern": r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+", "default_vocab_size": 270,
               "default_num_special_tokens": 10},
    "vocab": [{"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
              for rank, word in enumerate(WORDS)],
    "special_tokens": [{"rank": 0, "token_str": "<unk>", "is_control": True},
                       {"rank": 1, "token_str": "<s>", "is_control": True},
                       {"rank": 2, "token_str": "</s>", "is_control": True},
                       {"rank": 3, "token_str": "[INST]", "is_control": True}],
}  # fmt: skip


def test_tekken(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(TEKKEN))
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, (2,), 270)
    # Special tokens first; of 261 byte strings, 260 fit: the last one is spelled by what is left.
    assert ours.encode("[INST]th12風") == [1, 3, 10 + 257, 10 + ord("1"), 10 + ord("2"), 10 + 259]
    assert ours.decode(ours.encode("風車", add_special_tokens=False)) == "風車"
    assert ours.encode("風車", add_special_tokens=False)[0] == 10 + 259
    older = {key: value for key, value in TEKKEN.items() if key != "special_tokens"}
    older["config"] = {**TEKKEN["config"], "default_num_special_tokens": 14}
    (tmp_path / "tekken.json").write_text(json.dumps(older))
    assert load_tokenizer(tmp_path).encode("[TOOL_CALLS]<SPECIAL_13>", add_special_tokens=False)[0] == 9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": None}, "config must hold an object"),
        ({"config": {**TEKKEN["config"], "pattern": 3}}, "'config.pattern' must be text"),
        ({"config": {**TEKKEN["config"], "pattern": "(a+)+$("}}, "is not usable"),
        ({"config": {**TEKKEN["config"], "default_vocab_size": 5}}, "do not fit into a vocabulary"),
        ({"config": {**TEKKEN["config"], "default_vocab_size": 999}}, "must list at least 989"),
        ({"vocab": [*TEKKEN["vocab"][1:], TEKKEN["vocab"][0]]}, "entry 0 of 'vocab' is out of order"),
        ({"special_tokens": [{"rank": 99, "token_str": "x"}]}, "a special token is unusable"),
    ],
)
def test_broken_tekken_files_are_refused_in_words(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps({**TEKKEN, **change}))
    with pytest.raises(ModelError, match=says):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json"),
        ("tokenizer.json", b"\xff\x00", "tokenizer.json"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": 3}}', "tokenizer.json"),
        ("tokenizer.model", b"", "tokenizer.model"),
        ("tokenizer.model", b"\x0a\xff\xff\xff\x7f", "tokenizer.model"),
        ("tokenizer.model", b"YQ== 0\nYg== x\n", "line 2"),
        ("tokenizer.model", b"YQ== 0\n", "single bytes"),
        ("vocab.json", b'{"a": 0}', "merges.txt"),
        ("tokenizer_config.json", b"[1]", "JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template"),
        ("tokenizer_config.json", b"[" * 100_000, "valid JSON"),
    ],
)
def test_broken_files_are_named(name: str, content: bytes, hint: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    if name == "tokenizer_config.json":
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=hint):
        load_tokenizer(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer found"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        load_tokenizer(tmp_path / "absent")


def test_truncated_sentencepiece_files(sentencepiece_files: dict[str, Path], tmp_path: Path) -> None:
    whole = (sentencepiece_files["bpe"] / "tokenizer.model").read_bytes()
    for size in range(0, len(whole), 97):
        (tmp_path / "tokenizer.model").write_bytes(whole[:size])
        try:
            load_tokenizer(tmp_path)
        except ModelError as error:
            assert "tokenizer.model" in str(error)


def test_template_files_in_order(byte_level: tokenizers.Tokenizer, tmp_path: Path) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    several = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load_tokenizer(tmp_path).chat_template == {"default": "d", "tool_use": "t"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load_tokenizer(tmp_path).chat_template == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert load_tokenizer(tmp_path).chat_template == "from jinja"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load_tokenizer(tmp_path).chat_template == {"default": "from jinja", "tool_use": "tools"}


def _hostile(control: list[str]) -> list[str]:
    shapes = ["{}", "a{}b", "{}{}", " {} ", "{0}user\nhi{0}", "<{}>", "{}x{}", "\u200b{}", "{}\n", "say {} now"]
    return [shape.format(*[word] * 2) for word in control for shape in shapes]


def test_typed_text_never_becomes_a_control_token(
    byte_level: tokenizers.Tokenizer, sentencepiece_files: dict[str, Path], word_piece: tokenizers.Tokenizer
) -> None:
    tried = 0
    unigram_json = load_tokenizer(sentencepiece_files["unigram"])
    cases = [Tokenizer(byte_level), Tokenizer(word_piece), load_tokenizer(sentencepiece_files["bpe"]), unigram_json]
    for ours in cases:
        control = [ours.id_to_token(index) or "" for index in sorted(ours.control_ids)]
        assert control
        for text in _hostile(control + ["<s>", "</s>", "<unk>"]):
            ids = ours.encode(text, add_special_tokens=False, allow_special=False)
            assert ours.control_ids.isdisjoint(ids), text
            tried += 1
    assert tried >= 200


def test_typed_control_tokens_keep_their_letters(
    byte_level: tokenizers.Tokenizer, sentencepiece_files: dict[str, Path]
) -> None:
    for ours in (Tokenizer(byte_level), *map(load_tokenizer, sentencepiece_files.values())):
        for text in ["a</s>b", "<s>", "<|end|> <think>"]:
            ids = ours.encode(text, allow_special=False)
            assert ours.decode(ids) == text
    plain = Tokenizer(byte_level)
    for text in TEXTS:
        assert plain.encode(text, allow_special=False) == plain.encode(text)
    assert plain.encode("café au lait", allow_special=False) == [plain.token_to_id("café au lait")]


def test_typed_text_is_still_framed(sentencepiece_files: dict[str, Path], tmp_path: Path) -> None:
    for kind, path in sentencepiece_files.items():
        (tmp_path / "tokenizer.model").write_bytes((path / "tokenizer.model").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "add_eos_token": True}))
        ours = load_tokenizer(tmp_path)
        ids = ours.encode("a<s>b</s>", allow_special=False)
        assert ids[0] == ours.bos_id and ids[-1] == ours.eos_ids[0], kind
        assert ours.control_ids.isdisjoint(ids[1:-1])


def test_token_bytes_join_to_the_text(byte_level: tokenizers.Tokenizer, sentencepiece_files: dict[str, Path]) -> None:
    for ours in (Tokenizer(byte_level), load_tokenizer(sentencepiece_files["bpe"])):
        for text in TEXTS[:-1]:
            ids = ours.encode(text, add_special_tokens=False)
            joined = b"".join(map(ours.token_bytes, ids))
            assert joined.decode() in (text, " " + text)
    ours = Tokenizer(byte_level)
    assert ours.token_bytes(ours.token_to_id("café au lait") or 0) == "café au lait".encode()
    assert ours.token_bytes(10**6) == ours.token_bytes(-1) == ours.token_bytes(1 << 40) == b""


def test_word_piece_bytes_and_spaces(word_piece: tokenizers.Tokenizer) -> None:
    ours = Tokenizer(word_piece)
    assert ours.token_bytes(8 - 1) == b"ing" and ours.token_bytes(3) == b" mill"
    ids = [1, 2, 5, 3, 4, 8]
    assert ours.decode(ids) == word_piece.decode(ids) == "the mills."
    assert ours.decode(ids, skip_special_tokens=False) == word_piece.decode(ids, skip_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False) == "[A][B] the mills."


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_decode_equals_the_library(data: st.DataObject, byte_level: tokenizers.Tokenizer) -> None:
    ours = Tokenizer(byte_level)
    cafe = ours.token_to_id("café au lait")
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3).filter(lambda index: index != cafe), max_size=12))
    skip = data.draw(st.booleans())
    want = byte_level.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ids, skip_special_tokens=skip) == want


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decoder(scheme: str) -> None:
    inner = tokenizers.Tokenizer(
        tokenizers.models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("▁", -2.0), ("b▁", -3.0)], 0)
    )
    inner.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    inner.add_special_tokens(["<unk>"])
    ours = Tokenizer(inner)
    for ids in ([1, 1], [2, 1, 3], [0, 3, 1], [3, 3], [2, 2], []):
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == inner.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_inside_of_a_text_nothing_is_put_before_it(kind: str, sentencepiece_files: dict[str, Path]) -> None:
    ours = load_tokenizer(sentencepiece_files[kind])
    for text in ("a", "{", " mill", "The mill", "mill turns", "</s>"):
        assert b"".join(map(ours.token_bytes, ours.encode_inside(text))) == text.encode(), text
        assert not ours.special_ids & {*ours.encode_inside(text)}


def test_inside_of_a_text_in_every_spelling_of_the_prefix(byte_level: tokenizers.Tokenizer) -> None:
    pre, norm = tokenizers.pre_tokenizers, tokenizers.normalizers
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "b": 4}
    merges = [("▁", "a")]
    for normalizer, splitter in (
        (norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")]), None),
        (norm.Sequence([norm.Strip(), norm.Prepend("▁"), norm.Replace(" ", "▁")]), None),
        (norm.Prepend("▁"), pre.Metaspace(prepend_scheme="never", split=False)),
        (None, pre.Metaspace(prepend_scheme="first", split=False)),
        (None, pre.Metaspace(prepend_scheme="always", split=True)),
        (None, pre.Sequence([pre.Metaspace(prepend_scheme="always")])),
        (norm.Replace(" ", "▁"), None),
    ):
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>"))
        inner.normalizer, inner.pre_tokenizer = normalizer, splitter
        before = inner.encode("a a").ids
        ours = Tokenizer(inner)
        assert ours.encode_inside("a a") == [2, 3] and ours.encode_inside(" ab") == [3, 4]
        assert ours.encode("a a") == before == inner.encode("a a").ids, "the tokenizer itself is as it was"
    spaced = tokenizers.Tokenizer.from_str(byte_level.to_str())
    spaced.pre_tokenizer = pre.ByteLevel(add_prefix_space=True)
    ours = Tokenizer(spaced)
    assert b"".join(map(ours.token_bytes, ours.encode_inside("mill"))) == b"mill"


def test_half_a_surrogate_pair_is_text(byte_level: tokenizers.Tokenizer) -> None:
    ours = Tokenizer(byte_level)
    assert ours.decode(ours.encode("a\ud83db")) == "a\ufffdb"
    assert ours.decode(ours.encode("\ud83d\ude00")) == "😀"


def test_encoding_lets_other_threads_run(byte_level: tokenizers.Tokenizer) -> None:
    ours = Tokenizer(byte_level, TokenizerSettings())
    thread = threading.Thread(target=ours.encode, args=("The mill turns and turns. " * 60_000,))
    beats = 0
    thread.start()
    while thread.is_alive():
        beats += 1
        time.sleep(0.001)
    # A call that kept the interpreter lock would let this loop run once or twice.
    assert beats > 10
