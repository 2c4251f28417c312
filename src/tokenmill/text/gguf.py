"""The tokenizer that a GGUF file's metadata describes. Owns: what the `tokenizer.*` keys mean, the splitting patterns
by their names, and which tokens end a text. Takes the metadata as a plain dict. Must not know: files, tensors, models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers

from tokenmill.core.errors import ModelError
from tokenmill.text import build
from tokenmill.text.codec import Tokenizer, TokenizerSettings
from tokenmill.text.gguf_patterns import COMPOSED, FRAMED, PATTERNS, REFUSED, WHOLE_WORDS
from tokenmill.text.patterns import check_patterns
from tokenmill.text.sentencepiece import ModelKind, Piece, PieceKind, SentencePieceModel

MAX_TOKENS = 1 << 22
HUGGING_FACE = "tokenizer.huggingface.json"
"""The key of a complete tokenizer.json, which says more than the other keys can."""
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "<|end_of_text|>", "<|flush|>", "<|calls|>", "[EOT]", "[EOS]", "<end_of_utterance>", "<turn|>",
    "<|tool_response>",
)  # fmt: skip
"""Tokens that end an answer, whatever their ids. They are control tokens, even if a file has them as text."""
_FILES = (
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
)  # fmt: skip
"""The same: what stands between files, in models that fill code in. llama.cpp ends answers with these, too."""
_SEVERAL = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""Where all tokens of such a set are, <|end|> closes one message of several."""
_USUAL = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}
"""Ids that a kind of tokenizer has if the file does not say."""
_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: str) -> Tokenizer:
    """The tokenizer; raises ModelError that names the file."""
    read = _Keys(metadata, path)
    kind = read.text("model")
    whole = isinstance(metadata.get(HUGGING_FACE), str)
    make = _whole if whole else _KINDS.get(kind)
    if make is None:
        raise read.fail(
            f"its tokenizer is of the kind {kind[:40]!r}; llama (SentencePiece), gpt2 and gemma4 (BPE) are read"
        )
    tokens = read.tokens()
    kinds = read.kinds(tokens)
    try:
        inner = make(read, tokens, kinds)
    except ModelError as error:
        raise read.fail(f"its tokenizer cannot be used: {error}") from error
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        # The native library reports some broken vocabularies by a panic, which is not an Exception.
        raise read.fail(f"its tokenizer cannot be used ({error})") from error
    strings = {name: tokens[index] for name, key in _IDS.items() if (index := read.id(key, len(tokens))) is not None}
    if not whole:
        _frame(read, inner, strings, kind)
        if "phi-3" in (name := str(metadata.get("general.name")).lower()) or "phi3" in name:
            _strip_behind(inner)
    settings = TokenizerSettings(strings, _templates(metadata, read))
    try:
        made = Tokenizer(inner, settings)
        made.probe()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise read.fail(f"its tokenizer cannot be used ({str(error)[:200]})") from error
    made.eos_ids = _end_ids(read, tokens, kinds)
    return made


class _Keys:
    """Checked reading of `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, Any], path: str) -> None:
        self.metadata, self.path = metadata, path

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}. Give a tokenizer folder with --tokenizer instead.")

    def get(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def text(self, name: str, default: str | None = None) -> str:
        found = self.get(name)
        found = default if found is None else found
        if not isinstance(found, str):
            raise self.fail(f"tokenizer.ggml.{name} is {'absent' if found is None else 'no text'}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = self.get(name)
        if found not in (None, 0, 1):
            raise self.fail(f"tokenizer.ggml.{name} must be true or false, not {str(found)[:40]!r}")
        return default if found is None else bool(found)

    def id(self, name: str, count: int) -> int | None:
        """A token id, or the usual one; None where there is none in the vocabulary."""
        found = self.get(f"{name}_token_id")
        found = _USUAL.get(self.get("model") or "", {}).get(name) if found is None else found
        usable = isinstance(found, int) and not isinstance(found, bool) and 0 <= found < count
        return found if usable else None

    def tokens(self) -> list[str]:
        found = self.get("tokens")
        if not isinstance(found, list) or not 0 < len(found) <= MAX_TOKENS:
            raise self.fail("it has no vocabulary (tokenizer.ggml.tokens)")
        if set(map(type, found)) != {str}:
            raise self.fail("its vocabulary has a token that is not UTF-8 text")
        found = [token or f"[EMPTY_{index}]" for index, token in enumerate(found)]
        if len(set(found)) != len(found):
            raise self.fail("its vocabulary has a token twice")
        return found

    def kinds(self, tokens: list[str]) -> list[int]:
        """PieceKind of each token."""
        found = self.get("token_type")
        found = [int(PieceKind.NORMAL)] * len(tokens) if found is None else found
        if not isinstance(found, list) or len(found) != len(tokens) or not set(map(type, found)) <= {int}:
            raise self.fail("tokenizer.ggml.token_type does not fit the vocabulary")
        known, ends = {int(kind) for kind in PieceKind}, frozenset(_ENDS + _FILES)
        return [
            int(PieceKind.CONTROL) if token in ends else kind if kind in known else int(PieceKind.NORMAL)
            for token, kind in zip(tokens, found, strict=True)
        ]

    def scores(self, count: int) -> list[float]:
        found = self.get("scores")
        if not isinstance(found, list) or len(found) != count or not all(isinstance(s, int | float) for s in found):
            raise self.fail("tokenizer.ggml.scores does not fit the vocabulary")
        return [float(score) for score in found]


def _whole(read: _Keys, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    check_patterns(read.metadata[HUGGING_FACE])
    inner = tokenizers.Tokenizer.from_str(read.metadata[HUGGING_FACE])
    build.refuse_chance(inner)
    if inner.get_vocab_size() > len(tokens):
        raise ModelError(f"{HUGGING_FACE} has {inner.get_vocab_size()} tokens, the vocabulary {len(tokens)}")
    return inner


def _sentencepiece(read: _Keys, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    pieces = [
        Piece(token, score, PieceKind(kind))
        for token, score, kind in zip(tokens, read.scores(len(tokens)), kinds, strict=True)
    ]
    unknown = read.id("unknown", len(tokens))
    if unknown is None:
        unknown = kinds.index(PieceKind.UNKNOWN) if PieceKind.UNKNOWN in kinds else 0
    model = SentencePieceModel(
        pieces=pieces,
        kind=ModelKind.BPE,
        byte_fallback=PieceKind.BYTE in kinds,
        unk_id=unknown,
        add_prefix=read.flag("add_space_prefix", True),
        trim_spaces=read.flag("remove_extra_whitespaces", False),
        cut_first=True,
    )
    return build.from_sentencepiece(model)


def _byte_level(read: _Keys, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    name = read.text("pre", "default")
    if name in REFUSED:
        raise ModelError(f"words are split by the rule {name!r}, which is not read: {REFUSED[name]}")
    if name not in PATTERNS:
        raise ModelError(f"words are split by the rule {name[:40]!r}; known: {', '.join(sorted(PATTERNS))}")
    pairs = _merges(read)
    vocab = {token: index for index, token in enumerate(tokens)}
    inner = build.from_merges(vocab, pairs, PATTERNS[name], whole_words=name in WHOLE_WORDS)
    if name in COMPOSED:
        inner.normalizer = normalizers.NFC()
    for kind, special in ((PieceKind.CONTROL, True), (PieceKind.UNKNOWN, True), (PieceKind.USER_DEFINED, False)):
        names = [token for token, found in zip(tokens, kinds, strict=True) if found == kind]
        add: Callable[..., int] = inner.add_special_tokens if special else inner.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in names])
    return inner


def _merges(read: _Keys) -> list[tuple[str, str]]:
    """Pairs of tokens that merge, in order of priority."""
    merges = read.get("merges")
    if not isinstance(merges, list) or not set(map(type, merges)) <= {str}:
        raise ModelError("its merges are absent, or one is not text")
    pairs = [merge.split(" ") for merge in merges]
    if not set(map(len, pairs)) <= {2}:
        raise ModelError("one of its merges is not two tokens with one space between them")
    return [(left, right) for left, right in pairs]


def _marked_spaces(read: _Keys, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    """Gemma 4's tokenizer: merges across whole texts, spaces as marks, bytes for what has no token."""
    unknown = read.id("unknown", len(tokens))
    if unknown is None:
        raise ModelError("it names no token for what is unknown")
    return build.from_marked_merges(tokens, _merges(read), unknown, kinds)


_KINDS: dict[str, Callable[[_Keys, list[str], list[int]], tokenizers.Tokenizer]] = {
    "llama": _sentencepiece,
    "gpt2": _byte_level,
    "gemma4": _marked_spaces,
}


def _frame(read: _Keys, inner: tokenizers.Tokenizer, strings: Mapping[str, str], kind: str) -> None:
    default = kind in ("llama", "gemma4") or read.get("pre") in FRAMED
    before = [strings["bos_token"]] if read.flag("add_bos_token", default) and "bos_token" in strings else []
    after = [strings["eos_token"]] if read.flag("add_eos_token", False) and "eos_token" in strings else []
    build.surround(inner, before, after)


def _strip_behind(inner: tokenizers.Tokenizer) -> None:
    """White space behind added tokens vanishes. The format cannot say so: its reader knows these models by name."""
    added = [token for token in inner.get_added_tokens_decoder().values() if token.content not in _KEEPS_SPACE]
    inner.add_tokens([AddedToken(t.content, rstrip=True, normalized=t.normalized, special=t.special) for t in added])


def _end_ids(read: _Keys, tokens: list[str], kinds: list[int]) -> tuple[int, ...]:
    """The end token's id, and those of all control tokens that are known to end an answer."""
    found = [read.id(name, len(tokens)) for name in ("eos", "eot", "eom")]
    at = {token: index for index, token in enumerate(tokens) if kinds[index] == PieceKind.CONTROL}
    found += [at[token] for token in _ENDS if token in at]
    found += [read.id(name, len(tokens)) for name in ("fim_pad", "fim_rep", "fim_sep")]
    found += [at[token] for token in _FILES if token in at]
    if "<|end|>" in at and any(names <= at.keys() for names in _SEVERAL):
        found = [index for index in found if index != at["<|end|>"]]
    return tuple(dict.fromkeys(index for index in found if index is not None))


def _templates(metadata: Mapping[str, Any], read: _Keys) -> str | dict[str, str] | None:
    single = metadata.get("tokenizer.chat_template")
    if single is not None and not isinstance(single, str):
        raise read.fail("its chat template is not text")
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    named = {key: text for key, text in named.items() if isinstance(text, str)}
    if not named:
        return single
    return {**({"default": single} if single is not None else {}), **named}
