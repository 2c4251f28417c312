"""What the settings files beside a vocabulary say of its tokens, and normalisers that SentencePiece models choose."""

from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, models, pre_tokenizers

from tokenmill.core.errors import ModelError
from tokenmill.text import build
from tokenmill.text.charsmap import CharsMap
from tokenmill.text.codec import Tokenizer, _any_of
from tokenmill.text.guard import ControlGuard
from tokenmill.text.tokenizer import load_tokenizer

END, X, NEW = 256, 257, 258
BYTES = dict(build.byte_alphabet())


def folder_of(tmp_path: Path, added: list[AddedToken], files: dict[str, Any]) -> Tokenizer:
    """A byte-level tokenizer.json whose vocabulary has <end> and <x>, and the settings beside it."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={**BYTES, "<end>": END, "<x>": X}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_tokens(added)
    inner.save(str(tmp_path / "tokenizer.json"))
    for name, said in files.items():
        (tmp_path / name).write_text(json.dumps(said))
    return load_tokenizer(tmp_path)


def listed(index: int, name: str, **flags: bool) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(index): {"content": name, **flags}}}


@pytest.mark.parametrize(
    ("added", "files", "ids", "special"),
    [
        ([], {"tokenizer_config.json": {"eos_token": "<end>"}}, [END], {END}),
        ([AddedToken("<end>", special=False)], {"tokenizer_config.json": {"eos_token": "<end>"}}, [END], {END}),
        ([], {"tokenizer_config.json": {"additional_special_tokens": ["<x>", "<end>"]}}, [END, X], {END, X}),
        ([], {"tokenizer_config.json": {"extra_special_tokens": {"image": "<x>"}}}, [X], {X}),
        ([], {"special_tokens_map.json": {"additional_special_tokens": [{"content": "<x>"}]}}, [X], {X}),
        ([], {"tokenizer_config.json": listed(X, "<x>", special=True)}, [X], {X}),
        ([], {"tokenizer_config.json": listed(900, "<x>", special=True)}, [X], {X}),
        ([], {"tokenizer_config.json": listed(NEW, "<new>")}, [NEW], set()),
        ([], {"added_tokens.json": {"<new>": NEW}}, [NEW], set()),
        ([AddedToken("<x>", special=True)], {"added_tokens.json": {"<x>": X}}, [X], {X}),
        ([], {"tokenizer_config.json": {"pad_token": "<absent>"}}, [NEW], {NEW}),
        (
            [],
            {"tokenizer_config.json": {"additional_special_tokens": ["<new>"], "pad_token": {"content": "<absent>"}}},
            [NEW + 1, NEW],
            {NEW, NEW + 1},
        ),
        (
            [],
            {
                "tokenizer_config.json": {"extra_special_tokens": ["<absent>"], **listed(NEW, "<new>")},
                "special_tokens_map.json": {"additional_special_tokens": ["<x>"]},
            },
            [NEW, NEW + 1],
            {NEW + 1},
        ),
    ],
)
def test_settings_say_which_tokens_are_special(
    added: list[AddedToken], files: dict[str, Any], ids: list[int], special: set[int], tmp_path: Path
) -> None:
    ours = folder_of(tmp_path, added, files)
    found = ours.encode("<end><x><new><absent>")
    assert [index for index in found if index >= END] == ids and ours.special_ids == special
    assert ours.decode(found, skip_special_tokens=False) == "<end><x><new><absent>"
    assert not special & {*ours.encode("<end><x>", allow_special=False)}


MARKED = [
    *("e\u0301", "A\u0300\u0301", "\uff21\u0308", "\u1112\u1161\u11ab", "\u304b\u3099", "\u0915\u094d\u200d\u0937"),
    *(
        "\u0928\u092e\u200c\u0938",
        "\U0001f469\u200d\U0001f467",
        "\r\n",
        "\u200b",
        "\ufb01",
        "\u2167",
        "\u3000",
        "\u00bd",
    ),
]
"""Marks that belong to a letter and marks that do not, joiners, and what becomes several characters, or none."""


@pytest.mark.parametrize("norm", ["nmt_nfkc", "nfkc", "nfkc_cf", "nmt_nfkc_cf"])
def test_characters_are_replaced_as_in_sentencepiece(norm: str) -> None:
    made = trained(normalization_rule_name=norm, add_dummy_prefix=False, remove_extra_whitespaces=False)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=made)
    table = CharsMap(sentencepiece_model_pb2.ModelProto.FromString(made).normalizer_spec.precompiled_charsmap)
    dice = random.Random(5)
    for _ in range(3000):
        parts = [dice.choice(MARKED) if dice.random() < 0.5 else chr(dice.randrange(0x20, 0x3400)) for _ in range(6)]
        text = "".join([*parts, dice.choice(["", "a", "Zebra "])])
        assert table.apply(text).replace(" ", "▁") == theirs.normalize(text).replace(" ", "▁"), ascii(text)
    for text in map(chr, [*range(0x250), *range(0x300, 0x340), *range(0xD7A0, 0xE010), *range(0x1D100, 0x1D200)]):
        if text not in " \0" and not "\ud800" <= text <= "\udfff":
            assert table.apply(text).replace(" ", "▁") == theirs.normalize(text).replace(" ", "▁"), ascii(text)
    for damaged in (b"", b"abc", b"\0\0\0\0abcd", b"\xff\xff\xff\xff", table.data[:9]):
        with pytest.raises(ModelError, match="damaged"):
            CharsMap(damaged)


@pytest.mark.parametrize("norm", ["nmt_nfkc", "nfkc_cf", "identity"])
@pytest.mark.parametrize("prefix", [True, False])
def test_marks_and_pieces_that_overlap_are_read_as_in_sentencepiece(norm: str, prefix: bool, tmp_path: Path) -> None:
    """A piece of the model's maker stays as it is, even if its characters would be replaced; the longest counts."""
    own = ["ab", "abc", "bcd", "b", "\u2167", "\ufb01", "x\u200dy", "q", "qq"]
    made = trained(model_type="bpe", normalization_rule_name=norm, add_dummy_prefix=prefix, user_defined_symbols=own)
    (tmp_path / "tokenizer.model").write_bytes(made)
    ours, theirs = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=made)
    again, dice = Tokenizer.from_state(ours.state()), random.Random(7)
    for _ in range(400):
        text = "".join(dice.choice([*MARKED, *own, "d", " ", "the ", "<s>"]) for _ in range(dice.randint(1, 5)))
        wanted = theirs.encode(text)
        for tokenizer in (ours, again):
            assert tokenizer.encode(text, add_special_tokens=False, allow_special=False) == wanted, ascii(text)
    assert ours.encode("\uff21<s>\u2167", add_special_tokens=False).count(1) == 1
    assert ours.encode_inside("e\u0301") == ours.encode_inside("\u00e9") or norm == "identity"


def test_the_longest_of_many_names_is_found_at_each_place() -> None:
    """However many begin alike, also more than a pattern can nest."""
    dice = random.Random(2)
    for _ in range(300):
        names = ["".join(dice.choice("ab<(.") for _ in range(dice.randint(1, 4))) for _ in range(dice.randint(1, 12))]
        plain = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
        text, found = "".join(dice.choice("ab<(.x") for _ in range(40)), _any_of(names)
        assert found is not None and found.findall(text) == plain.findall(text), names
    for most in (31, 500):
        found = _any_of(["a" * i for i in range(1, most + 1)])
        assert found is not None and found.findall(f"b{'a' * (most + 2)}") == ["a" * most, "aa"]
    assert _any_of(["", ""]) is None


def test_tokens_that_only_settings_name_get_transformers_ids(tmp_path: Path) -> None:
    said = {"eos_token": "<c>", "pad_token": "<b>", "bos_token": "<end>", "additional_special_tokens": ["<e>", "<a>"]}
    mapped = {"cls_token": {"content": "<d>"}, "additional_special_tokens": ["<a>"]}
    files = {"tokenizer_config.json": said, "special_tokens_map.json": mapped}
    ours = folder_of(tmp_path, [], files)
    named = [ours.token_to_id(f"<{name}>") for name in "cbdea"]
    assert named == [*range(NEW, NEW + 5)]
    assert not set(named) & {*ours.encode("<a><b><c>", allow_special=False)}


@pytest.mark.parametrize("lists", [False, True])
def test_where_two_files_name_a_role_the_older_way_counts_only_in_older_folders(lists: bool, tmp_path: Path) -> None:
    """As in Transformers: settings that list their added tokens are whole."""
    said = {"eos_token": "<end>", **(listed(X, "<x>") if lists else {})}
    ours = folder_of(tmp_path, [], {"tokenizer_config.json": said, "special_tokens_map.json": {"eos_token": "<x>"}})
    assert ours.special_strings["eos_token"] == ("<end>" if lists else "<x>")


def test_files_of_older_folders_do_not_count_beside_settings_that_list_their_tokens(tmp_path: Path) -> None:
    """As in Transformers: a role or token that only they name is none."""
    older = {"bos_token": "<end>", "additional_special_tokens": ["<end>"]}
    files = {"tokenizer_config.json": listed(X, "<x>"), "special_tokens_map.json": older}
    ours = folder_of(tmp_path, [], {**files, "added_tokens.json": {"<new>": NEW}})
    assert not ours.special_strings and ours.encode("<end><new>") == [*b"<end><new>"]


def test_a_named_token_keeps_its_sides(tmp_path: Path) -> None:
    said = {"additional_special_tokens": [{"content": "<new>", "lstrip": True, "rstrip": False}]}
    assert folder_of(tmp_path, [], {"tokenizer_config.json": said}).encode("a <new> b") == [*b"a", NEW, *b" b"]


OLD, EXTRA = "additional_special_tokens", "extra_special_tokens"


@pytest.mark.parametrize(
    ("said", "mapped", "order"),
    [
        ({EXTRA: ["<a>"], OLD: ["<b>"]}, {}, "a"),
        ({EXTRA: {"k": "<a>"}, OLD: ["<b>"]}, {}, "ab"),
        ({"model_specific_special_tokens": {"k": "<a>"}, "pad_token": "<b>"}, {}, "ba"),
        ({EXTRA: [], OLD: ["<b>"]}, {OLD: ["<c>"]}, "b"),
        ({EXTRA: ["<b>"]}, {EXTRA: ["<c>"], OLD: ["<d>"]}, "bc"),
        ({}, {OLD: ["<c>"]}, "c"),
        ({"image_token": "<a>", "pad_token": "<b>", OLD: ["<c>"]}, {"eot_token": {"content": "<d>"}}, "badc"),
    ],
)
def test_which_of_several_lists_counts(
    said: dict[str, Any], mapped: dict[str, Any], order: str, tmp_path: Path
) -> None:
    """As in Transformers, where a list that does not count gives none of the ids either."""
    ours = folder_of(tmp_path, [], {"tokenizer_config.json": said, "special_tokens_map.json": mapped})
    found = [ours.token_to_id(f"<{name}>") for name in "abcd"]
    assert found == [NEW + order.index(name) if name in order else None for name in "abcd"]
    assert {*range(NEW, NEW + len(order))} == ours.special_ids


@pytest.mark.parametrize("listed_in", ["added_tokens_decoder", "added_tokens.json", "pad_token"])
@pytest.mark.parametrize("whole", [True, False])
def test_what_a_vocabulary_file_leaves_open_is_found_as_it_is_typed(
    listed_in: str, whole: bool, tmp_path: Path
) -> None:
    """A token that is looked for in the normalised text belongs to it: the text behind it gets no space of its own."""
    model_bytes = trained(model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False)
    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    if whole:
        load_tokenizer(tmp_path)._inner.save(str(tmp_path / "tokenizer.json"))
    index = load_tokenizer(tmp_path).vocab_size
    entry: dict[str, Any] = {"content": "<new>", "normalized": True}
    said: dict[str, Any] = {"add_bos_token": False}
    if listed_in == "added_tokens.json":
        (tmp_path / listed_in).write_text(json.dumps({"<new>": index}))
    else:
        said[listed_in] = entry if listed_in == "pad_token" else {str(index): entry}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    judge = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    behind = judge.encode("\nhello")[2:] if whole else judge.encode("hello")
    found = load_tokenizer(tmp_path).encode("<new>hello")
    assert found[found.index(index) :] == [index, *behind]


def test_settings_win_where_they_contradict_the_flags_of_a_token(tmp_path: Path) -> None:
    greedy = AddedToken("<end>", special=True, lstrip=True, rstrip=True)
    files = {"tokenizer_config.json": listed(END, "<end>", special=True)}
    assert folder_of(tmp_path, [greedy], files).encode("a <end> b") == [*b"a ", END, *b" b"]


def test_a_new_token_keeps_the_id_that_the_settings_state(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'<new>' is listed with id 900"):
        folder_of(tmp_path, [], {"tokenizer_config.json": listed(900, "<new>")})


def test_many_listed_tokens_take_no_time_of_their_own(tmp_path: Path) -> None:
    """One by one they would take minutes: each rebuilds the search for all."""
    names = [f"<unused{i}>" for i in range(5000)]
    said = {str(END + 2 + i): {"content": name, "special": bool(i % 2)} for i, name in enumerate(names)}
    ours = folder_of(tmp_path, [AddedToken(name) for name in names], {
        "tokenizer_config.json": {"added_tokens_decoder": said}})  # fmt: skip
    assert len(ours.special_ids) == 2500


def test_a_word_with_a_rank_is_one_token() -> None:
    """Whatever its lower ranks merge to, as tiktoken has it."""
    words = [bytes([byte]) for byte in range(256)] + [b"ab", b"abcd", b" hello"]
    ours = Tokenizer(build.from_ranks({word: rank for rank, word in enumerate(words)}))
    assert ours.encode("abcd hello abcdx") == [257, 258, *b" ", 256, *b"cdx"]


def test_control_tokens_in_a_text_may_be_ordinary_text(tmp_path: Path) -> None:
    said = {"eos_token": "<end>", "split_special_tokens": True}
    ours = folder_of(tmp_path, [AddedToken("<end>", special=True)], {"tokenizer_config.json": said})
    for made in (ours, Tokenizer.from_state(ours.state())):
        assert made.encode("a<end>") == [*b"a<end>"] and made.eos_ids == (END,)
        assert ControlGuard(made).encode("a<end>") == [*b"a<end>"]
    with pytest.raises(ModelError, match="split_special_tokens must be true or false, not 'yes'"):
        folder_of(tmp_path, [], {"tokenizer_config.json": {"split_special_tokens": "yes"}})


def test_other_spellings_of_a_control_token_are_ordinary_text_in_a_chat(tmp_path: Path) -> None:
    """What is looked for in normalised text would be found in them."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=BYTES, merges=[]))
    steps = [tokenizers.normalizers.NFKC(), tokenizers.normalizers.Lowercase()]
    inner.normalizer = tokenizers.normalizers.Sequence(steps)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens([AddedToken("<end>", normalized=True), AddedToken("[T]", normalized=True)])
    inner.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    guard = ControlGuard(ours)
    for typed, shown in (("<END>", "<end>"), ("\uff1cend\uff1e", "<end>"), ("[T]", "[t]"), ("a<End>b", "a<end>b")):
        assert not ours.special_ids.isdisjoint(ours.encode(typed))
        found = guard.encode(f"<end>x{guard.protect(typed)}[T]y")
        assert found == [END, *b"x", *shown.encode(), END + 1, *b"y"], typed
        assert guard.clean(guard.protect(typed)) == typed


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize(
    "name", ["GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizerFast", "PreTrainedTokenizerFast"]
)
def test_a_class_may_contradict_the_file_on_the_first_space(name: str, said: bool, tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.BPE(vocab=BYTES, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=not said)
    inner.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": name, "add_prefix_space": said}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    follows = name != "PreTrainedTokenizerFast"
    assert len(load_tokenizer(tmp_path).encode("a")) == 1 + (said == follows)


def test_vocab_and_merges_with_a_space_before_every_text(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(BYTES))
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": True}))
    assert load_tokenizer(tmp_path).encode("a") == [*b" a"]


def trained(**options: object) -> bytes:
    """A small SentencePiece model of LINES, with byte fallback."""
    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=data, vocab_size=330, byte_fallback=True, hard_vocab_limit=False,
        minloglevel=3, **options,
    )  # fmt: skip
    return data.getvalue()


@pytest.mark.parametrize("legacy", [True, False])
def test_what_follows_a_special_token_gets_a_space_in_old_tokenizers_only(legacy: bool, tmp_path: Path) -> None:
    model_bytes = trained(model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False)
    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "legacy": legacy}))
    ours, judge = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    first, later = judge.encode("hello"), judge.encode("hello") if legacy else judge.encode("\nhello")[2:]
    assert ours.encode("hello<s>hello") == [*first, 1, *later]
    guard = ControlGuard(ours)
    typed = guard.encode("<s>hello" + guard.protect("<s>") + "</s>hello")
    assert typed[: 1 + len(later)] == [1, *later] and typed[-len(later) :] == later


LINES = ["the quick brown fox jumps", "hello world, how are you?", "a  b   c    d", "ﬁne ｗｉｄｅ 日本"] * 20
TEXTS = ["a", " a", "  a  b ", "\nab\n", "a\tb", "\u3000x", "ｗｉｄｅ ﬁ", "   x   y", "日本 z", "é", "c     d", ""]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("norm", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize(("prefix", "trim"), [(True, True), (True, False), (False, True), (False, False)])
def test_every_normaliser_of_sentencepiece(kind: str, norm: str, prefix: bool, trim: bool, tmp_path: Path) -> None:
    model_bytes = trained(
        model_type=kind,
        normalization_rule_name=norm,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=trim,
        user_defined_symbols=["▁▁▁"],
    )
    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    ours, theirs = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids) == theirs.decode(theirs.encode(text)), text
        if kind == "bpe":  # Unigram may choose among rows of equal scores
            assert ids == theirs.encode(text), text


@pytest.mark.parametrize("said", [None, True, False])
def test_settings_say_whether_a_text_gets_a_space(said: bool | None, tmp_path: Path) -> None:
    model_bytes = trained(model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False)
    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_prefix_space": said}))
    ours, judge = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    for text in TEXTS:
        # without its space a text is what follows a line break that is cut off
        expected = judge.encode(f"\n{text}")[2:] if said is False else judge.encode(text)
        assert ours.encode(text) == expected and ours.decode(expected) == text, text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(("prefix", "trim"), [(True, True), (True, False), (False, True), (False, False)])
def test_user_defined_pieces_stand_where_sentencepiece_finds_them(
    kind: str, prefix: bool, trim: bool, tmp_path: Path
) -> None:
    model_bytes = trained(
        model_type=kind,
        normalization_rule_name="nmt_nfkc",
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=trim,
        user_defined_symbols=["<x>", "[y]"],
    )
    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    ours, judge = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    for text in ("<x>12", "a <x> b", "a<x>12 [y][y]<x>", " <x>  [y] ", "a\r\nb", "a \r\n<x>"):
        assert ours.encode(text) == judge.encode(text), text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("trim", [True, False])
def test_a_text_that_is_one_user_defined_piece_and_marks_that_are_typed(kind: str, trim: bool, tmp_path: Path) -> None:
    model_bytes = trained(
        model_type=kind,
        normalization_rule_name="identity",
        remove_extra_whitespaces=trim,
        user_defined_symbols=["<x>", "[y]"],
    )
    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    ours, judge = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    again = Tokenizer.from_state(ours.state())
    for text in ("<x>", " <x> ", "[y]", "<x><x>", "a▁", "▁", "▁ ▁", "a ▁ ", "\u200d", "e\u0301\u200d", "a\0b"):
        assert again.encode(text) == ours.encode(text) == judge.encode(text), text
        assert ours.encode(text, allow_special=False) == judge.encode(text), text


def sentencepiece_file(kind: str, unused: set[str], tmp_path: Path) -> tuple[Path, Any]:
    """A folder whose tokenizer.model calls some of its pieces unused, and that model in its own library."""
    model_bytes = trained(model_type=kind, normalization_rule_name="identity")
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(model_bytes)
    for piece in model.pieces:
        if piece.piece in unused:
            piece.type = model.SentencePiece.UNUSED
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    return tmp_path, sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def test_unused_pieces_are_in_no_text(tmp_path: Path) -> None:
    folder, judge = sentencepiece_file("unigram", {"▁the", "o", "▁how"}, tmp_path)
    ours = load_tokenizer(folder)
    for text in ("the quick brown fox", "how", "hello world, o"):
        assert ours.encode(text) == judge.encode(text)
    for index in range(judge.vocab_size()):
        assert (
            judge.is_byte(index)
            or judge.is_control(index)
            or ours.decode([index]) == judge.decode([index])
            or not index
        )


def test_what_models_of_sentencepiece_ask_for_beyond_what_is_built(tmp_path: Path) -> None:
    folder, _ = sentencepiece_file("bpe", set(), tmp_path)
    whole = (folder / "tokenizer.model").read_bytes()
    for change, says in (
        (lambda model: setattr(model.normalizer_spec, "escape_whitespaces", False), "escape_whitespaces"),
        (lambda model: setattr(model.denormalizer_spec, "precompiled_charsmap", b"abc"), "denormalizer_spec"),
        (lambda model: setattr(model.trainer_spec, "treat_whitespace_as_suffix", True), "suffix"),
    ):
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString(whole)
        change(model)
        (folder / "tokenizer.model").write_bytes(model.SerializeToString())
        with pytest.raises(ModelError, match=says):
            load_tokenizer(folder)


def test_merges_through_unused_pieces_are_refused(tmp_path: Path) -> None:
    folder, _ = sentencepiece_file("bpe", {"▁t"}, tmp_path)
    with pytest.raises(ModelError, match="merges pass through its unused piece '▁t'; provide a tokenizer"):
        load_tokenizer(folder)


def test_the_name_of_a_byte_or_of_the_unknown_token_is_text(tmp_path: Path) -> None:
    model_bytes = trained(model_type="unigram", normalization_rule_name="identity")
    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    ours = load_tokenizer(tmp_path)
    for text in ("a <0x41> b", "<0x0A><0x0A>", "a <unk> b"):
        assert ours.decode(ours.encode(text, allow_special=False)) == text
