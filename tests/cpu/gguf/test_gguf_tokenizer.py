"""Tokenizers out of GGUF metadata give Transformers' ids; and the metadata that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tokenmill.checkpoint.gguf_file import open_gguf
from tokenmill.core.errors import ModelError
from tokenmill.text.codec import Tokenizer as Ours
from tokenmill.text.gguf import HUGGING_FACE, tokenizer_from_gguf
from tokenmill.text.gguf_patterns import COMPOSED, PATTERNS, REFUSED
from tokenmill.text.gguf_write import tokenizer_metadata
from tokenmill.text.token_bytes import byte_alphabet
from tokenmill.text.tokenizer import load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? I'M sure THEY'LL agree; we've 1234567 reasons.",
    "def f(x):\n    return x ** 2  # square\n\n\nprint(f(10), 'ok')\t\tend",
    "Größe, naïve café, 你好世界, Привет мир, עברית; emoji 🙂🙃 and ½ or ④.",
    "HelloWorld camelCase XMLHttpRequest iPhone15ProMax http://a.b/c?d=e&f=g",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "   leading and   inner  spaces ",
    "a\r\n\r\nb\n \n c",
    "12345 1 22 333 4444",
    "<|im_start|>user\nhi<|im_end|>",
    "e\u0301 combining, \u00e9 not; \ufb01 ligature; \u3000 wide space",
    "don't DON'T you'Ll 'tis 'S",
    "\U0001f468‍\U0001f469‍\U0001f467 family",
    "日本語123テキスト",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
LEVEL = {"add_prefix_space": False, "use_regex": False}
SPLITS: dict[str, Any] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(**LEVEL)],
    "qwen2": [
        pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
        pre_tokenizers.ByteLevel(**LEVEL),
    ],
    "gpt-4o": [pre_tokenizers.Split(Regex(O200K), "isolated"), pre_tokenizers.ByteLevel(**LEVEL)],
    "tekken": [pre_tokenizers.Split(Regex(TEKKEN), "isolated"), pre_tokenizers.ByteLevel(**LEVEL)],
    "qwen35": [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(**LEVEL),
    ],
    "deepseek-v3": [
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.Split(Regex("[一-龥\u3040-ゟ゠-ヿ]+"), "isolated"),
        pre_tokenizers.Split(
            Regex(
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(**LEVEL),
    ],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}
RUN = "\u2581\u2581"
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def byte_level(pre: str) -> Tokenizer:
    """A small trained vocabulary with that way of splitting."""
    inner = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken", "gpt-4o")))
    inner.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[pre])
    inner.normalizer = normalizers.NFC() if pre in ("qwen2", "qwen35") else None
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    inner.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return inner


SHARED = byte_level("gpt-2")


def write_byte_level(path: Path, inner: Tokenizer, pre: str, **options: Any) -> None:
    import json

    state = json.loads(inner.to_str())
    tokens = [inner.id_to_token(i) or "" for i in range(inner.get_vocab_size())]
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    out.add_token_types([3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in tokens])
    out.add_bos_token_id(tokens.index("<|begin|>"))
    out.add_eos_token_id(tokens.index("<|im_end|>"))
    for name, value in options.items():
        getattr(out, f"add_{name}")(value)
    finish(out)


def finish(out: gguf.GGUFWriter) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def read(path: Path) -> Ours:
    return tokenizer_from_gguf(open_gguf(path).metadata, str(path))


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_ids(pre: str, tmp_path: Path) -> None:
    inner = byte_level(pre)
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(inner.to_str()))
    write_byte_level(tmp_path / "t.gguf", inner, pre, add_bos_token=False)
    ours = read(tmp_path / "t.gguf")
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.special_ids == {inner.token_to_id(name) for name in SPECIAL}
    assert ours.eos_ids == (inner.token_to_id("<|im_end|>"), inner.token_to_id("<|endoftext|>"))


@pytest.mark.parametrize("pre", sorted({str(pattern): name for name, pattern in PATTERNS.items()}.values()))
def test_every_known_splitter_splits(pre: str, tmp_path: Path) -> None:
    """Each pattern compiles, loses nothing, and is fast; what it splits is checked above where a library says it."""
    write_byte_level(tmp_path / "t.gguf", SHARED, pre, add_bos_token=False)
    ours = read(tmp_path / "t.gguf")
    for text in TEXTS:
        found = ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False)
        assert found == (normalizers.NFC().normalize_str(text) if pre in COMPOSED else text)


def test_digits_in_threes_from_the_end() -> None:
    """Where a rule counts digits from the right (Arcee Trinity), the first group is the short one."""
    split = pre_tokenizers.Split(Regex(PATTERNS["afmoe"][0]), "isolated")
    for digits, parts in {"7": ["7"], "1234567": ["1", "234", "567"], "123456": ["123", "456"]}.items():
        assert [piece for piece, _ in split.pre_tokenize_str(digits)] == parts
    assert [piece for piece, _ in split.pre_tokenize_str("a12345b")] == ["a", "12", "345", "b"]


def test_refused_splitters_say_why(tmp_path: Path) -> None:
    assert not set(REFUSED) & set(PATTERNS)
    write_byte_level(tmp_path / "t.gguf", SHARED, "modern-bert")
    with pytest.raises(ModelError, match="the rule 'modern-bert', which is not read: models of embeddings"):
        read(tmp_path / "t.gguf")


def test_marked_spaces(tmp_path: Path) -> None:
    """Gemma 4's: merges of whole texts, bytes for what has no token."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    kept = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner.train_from_iterator(
        CORPUS[:2] * 3, trainers.BpeTrainer(vocab_size=600, special_tokens=kept, show_progress=False)
    )
    state = json.loads(inner.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 4]
    inner = Tokenizer.from_str(json.dumps(state))
    tokens = [inner.id_to_token(i) for i in range(inner.get_vocab_size())]
    out = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "gemma4")
    out.add_tokenizer_model("gemma4")
    out.add_token_list(tokens)
    out.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    out.add_token_types([6 if token in kept[4:] else 3 if token in kept else 1 for token in tokens])
    out.add_bos_token_id(2)
    out.add_eos_token_id(1)
    out.add_unk_token_id(3)
    finish(out)
    ours = read(tmp_path / "t.gguf")
    for text in TEXTS:
        assert ours.encode(text) == [2, *inner.encode(text, add_special_tokens=False).ids], text
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_ids == (1,)


def test_frame_and_templates(tmp_path: Path) -> None:
    inner = byte_level("llama-bpe")
    write_byte_level(tmp_path / "t.gguf", inner, "llama-bpe", add_eos_token=True, chat_template="{{ messages }}")
    ours = read(tmp_path / "t.gguf")
    ids = ours.encode("hi")  # no add_bos_token: this splitter's family has it on
    assert ids[0] == ours.bos_id == inner.token_to_id("<|begin|>") and ids[-1] == inner.token_to_id("<|im_end|>")
    assert ours.chat_template == "{{ messages }}"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write_byte_level(tmp_path / "n.gguf", inner, "gpt-2", chat_template=named)
    assert read(tmp_path / "n.gguf").chat_template == {"default": "d", "tool_use": "t"}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids(prefix: bool, tmp_path: Path) -> None:
    corpus = tmp_path / "c.txt"
    corpus.write_text("\n".join(CORPUS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "sp"), vocab_size=500, model_type="bpe", byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=prefix, user_defined_symbols=["<tool>", RUN], minloglevel=2,
    )  # fmt: skip
    spm = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    out = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    out.add_tokenizer_model("llama")
    ids = range(spm.vocab_size())
    out.add_token_list([spm.id_to_piece(i) for i in ids])
    out.add_token_scores([spm.get_score(i) for i in ids])
    out.add_token_types([kind_of(spm, i) for i in ids])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_add_space_prefix(prefix)
    finish(out)
    ours = read(tmp_path / "t.gguf")
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == spm.encode(text), text
        assert ours.encode(text)[0] == 1 and ours.decode(ours.encode(text)) == spm.decode(spm.encode(text))


def test_runs_of_spaces_among_the_added_tokens(tmp_path: Path) -> None:
    """Converters write such tokens with spaces in place of marks, and readers look for them before anything else."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a", "  ", "    ", "\n\n"]
    ours = tokenizer_from_gguf({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 4, 4, 4],
        "tokenizer.ggml.scores": [*[0.0] * 259, -3.0, -1.0, -1.5, -1000.0, -1000.0, -1000.0],
        "tokenizer.ggml.add_space_prefix": False}, "x.gguf")  # fmt: skip
    for text, pieces in (
        ("a  a", ["a", "  ", "a"]), ("a     a", ["a", "    ", "▁a"]), ("\n\n  a a", ["\n\n", "  ", "a", "▁a"]),
        (" a", ["▁a"]), ("  ", ["  "]),
    ):  # fmt: skip
        ids = ours.encode(text, add_special_tokens=False)
        assert [ours.id_to_token(index) for index in ids] == pieces and ours.decode(ids) == text


def kind_of(spm: Any, index: int) -> int:
    if spm.is_unknown(index):
        return 2
    if spm.is_control(index):
        return 3
    if spm.is_byte(index):
        return 6
    return 4 if spm.id_to_piece(index) in ("<tool>", RUN) else 1


GOOD = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|end|>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({"tokenizer.ggml.model": None}, "absent"),
    "unknown kind": ({"tokenizer.ggml.model": "bert"}, "'bert'"),
    "kind is a number": ({"tokenizer.ggml.model": 3}, "no text"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "no vocabulary"),
    "tokens not text": ({"tokenizer.ggml.tokens": ["a", b"\xff", "ab", "c"]}, "not UTF-8"),
    "token twice": ({"tokenizer.ggml.tokens": ["a", "a", "ab", "c"]}, "twice"),
    "short types": ({"tokenizer.ggml.token_type": [1]}, "does not fit"),
    "no merges": ({"tokenizer.ggml.merges": None}, "merges are absent"),
    "broken merge": ({"tokenizer.ggml.merges": ["ab"]}, "not two tokens"),
    "merge of nothing": ({"tokenizer.ggml.merges": ["x y"]}, "cannot be used"),
    "unknown splitter": ({"tokenizer.ggml.pre": "nobody-knows"}, "nobody-knows"),
    "template a number": ({"tokenizer.chat_template": 5}, "not text"),
    "flag of text": ({"tokenizer.ggml.add_bos_token": "no"}, "add_bos_token must be true or false, not 'no'"),
    "spm without scores": ({"tokenizer.ggml.model": "llama"}, "scores"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_metadata(name: str) -> None:
    change, told = BAD[name]
    with pytest.raises(ModelError, match=told):
        tokenizer_from_gguf({**GOOD, **change}, "x.gguf")


def test_tokens_that_end_answers_are_control_tokens_whatever_their_type() -> None:
    ours = tokenizer_from_gguf({**GOOD, "tokenizer.ggml.token_type": None}, "x.gguf")
    assert ours.eos_ids == (3,) and ours.special_ids == {3}
    assert ours.encode("ab<|end|>") == [2, 3] and ours.decode([2, 3]) == "ab"
    for several in (["<|return|>", "<|call|>"], ["<|calls|>", "<|flush|>"]):
        tokens = [*GOOD["tokenizer.ggml.tokens"], *several]
        ours = tokenizer_from_gguf({**GOOD, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [4] * 6}, "x")
        assert set(ours.eos_ids) == {4, 5}, "<|end|> closes one message of several"
    tokens = [*GOOD["tokenizer.ggml.tokens"], "<|fim_pad|>", "<|file_sep|>", "<mine>"]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": None, "tokenizer.ggml.fim_sep_token_id": 6}
    assert tokenizer_from_gguf({**GOOD, **keys}, "x").eos_ids == (3, 6, 4, 5), "what stands between files ends one"


@pytest.mark.parametrize("name", [":", "$A", "$A:1", "<s:1>", "a b", "$"])
def test_a_first_token_of_any_name(name: str) -> None:
    tokens = ["a", "b", "ab", name]
    ours = tokenizer_from_gguf({**GOOD, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_bos_token": True,
                                "tokenizer.ggml.bos_token_id": 3}, "x.gguf")  # fmt: skip
    assert (
        ours.encode("ab") == [3, 2] and ours.frame == ((3,), ()) and Ours.from_state(ours.state()).encode("ab")[0] == 3
    )


def test_tokens_without_a_name_get_one() -> None:
    tokens = ["a", "b", "ab", "", "<|end|>", ""]
    ours = tokenizer_from_gguf(
        {**GOOD, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 6}, "x.gguf"
    )
    assert ours.id_to_token(3) == "[EMPTY_3]" and ours.vocab_size == 6 and ours.encode("ab") == [2]


PIECES = ["<unk>", "<s>", "</s>", "\u2581a", "\u2581", "a", "\n", "<|user|>", "<|endoftext|>"]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": [-float(i) for i in range(9)],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 4, 3],
}


def test_sentencepiece_has_its_usual_ids_where_a_file_names_none() -> None:
    ours = tokenizer_from_gguf(SPM, "x.gguf")
    assert (ours.bos_id, ours.eos_ids) == (1, (2, 8)) and ours.encode("a") == [1, 3]
    ours = tokenizer_from_gguf({**SPM, "tokenizer.ggml.bos_token_id": 8}, "x.gguf")
    assert ours.bos_id == 8


@pytest.mark.parametrize("name", ["Phi-3 Mini", "my-phi3", "Llama", None])
def test_white_space_behind_tokens_of_phi_3_vanishes(name: str | None) -> None:
    ours = tokenizer_from_gguf({**SPM, "general.name": name}, "x.gguf")
    kept = [] if name and "hi" in name else [4, 6, 5]
    assert ours.encode("<|user|>\na<|endoftext|>\na") == [1, 7, *(kept or [3]), 8, 4, 6, 5]
    assert ours.encode("<s>\na", add_special_tokens=False) == [1, 4, 6, 5]


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    wild = {"tokenizer.ggml.eos_token_id": 99, "tokenizer.ggml.bos_token_id": -1, "tokenizer.ggml.add_bos_token": True}
    ours = tokenizer_from_gguf({**GOOD, **wild}, "x.gguf")
    assert ours.encode("ab") == [2] and ours.eos_ids == (3,) and ours.bos_id is None


@pytest.mark.parametrize(
    "odd", ["nothing", "takes spaces", "one word", "another case", "a first token without a role", "both ends"]
)
def test_what_the_keys_cannot_say_is_written_whole(odd: str, tmp_path: Path) -> None:
    """Flags of tokens, other normalisers and unnamed tokens around a text were lost in a written file."""
    inner = Tokenizer(models.BPE(vocab={**byte_alphabet(), "<s>": 256, "</s>": 257}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens([AddedToken("<x>", rstrip=odd == "takes spaces", single_word=odd == "one word", normalized=False)])
    if odd == "another case":
        inner.normalizer = normalizers.Lowercase()
    single = "<s> $A </s>" if odd == "both ends" else "<s> $A"
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 256), ("</s>", 257)])
    inner.save(str(tmp_path / "tokenizer.json"))
    roles = {} if odd == "a first token without a role" else {"bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    ours = load_tokenizer(tmp_path)
    written, note = tokenizer_metadata(tmp_path, 259, [])
    assert (HUGGING_FACE in written) == (note is not None) == (odd != "nothing")
    again = tokenizer_from_gguf(written, "x.gguf")
    for text in ("", "a <x> B", "a<x>b", "<x>  c", "É"):
        assert again.encode(text) == ours.encode(text), text


def test_a_setting_without_a_key_is_told(tmp_path: Path) -> None:
    inner = Tokenizer(models.BPE(vocab=dict(byte_alphabet()), merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"split_special_tokens": True}))
    assert "split_special_tokens" in str(tokenizer_metadata(tmp_path, 256, [])[1])
