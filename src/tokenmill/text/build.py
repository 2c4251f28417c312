"""Making a tokenizer without a tokenizer.json. Owns: the recipes for SentencePiece models, for `vocab.json` with
`merges.txt`, and for rank files. It takes plain data, so other containers of the same data (GGUF) can use it, too.
Must not know: files, special token settings of a model folder.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenmill.core.errors import ModelError
from tokenmill.text.sentencepiece import ModelKind, Piece, PieceKind, SentencePieceModel
from tokenmill.text.token_bytes import SPACE_MARK, byte_alphabet

START = r"\A"
"""With this begin the patterns of steps that concern a text's edges."""
_HIDDEN = " unused "
"""Put before a piece, it hides it from every text: where pieces are looked for, spaces are marks."""
EXCEPT = rf"{START}(?!(?:"
"""So begins the pattern that puts a mark before every text but these."""
MAX_WORK = 300_000_000
"""Sum of the squared lengths of all tokens; real vocabularies of 256,000 tokens have 30 million."""
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Splitting patterns, named by the longest run of digits that stays one word.
WORDS_DIGITS_1 = f"{_ENDINGS}|{_LETTERS}|\\p{{N}}|{_TAIL}"
WORDS_DIGITS_3 = f"{_ENDINGS}|{_LETTERS}|\\p{{N}}{{1,3}}|{_TAIL}"
WORDS_DEMO = rf"{_ENDINGS}|\p{{Han}}|[^\r\n\p{{L}}\p{{N}}]?(?:(?!\p{{Han}})\p{{L}})+|\p{{N}}|{_TAIL}"
"""The demonstration models': a word of its own for each Chinese sign."""


def from_sentencepiece(model: SentencePieceModel) -> Tokenizer:
    """A tokenizer that segments as SentencePiece does, for texts whose characters have been replaced (charsmap.py);
    control pieces become special tokens."""
    if model.whitespace_suffix:
        raise ModelError("it treats white space as a suffix, which is not supported")
    if not model.cut_first:
        model = replace(model, pieces=_without_unused(model))
    ids = {piece.text: index for index, piece in enumerate(model.pieces)}
    if len(ids) != len(model.pieces):
        raise ModelError("it lists a piece twice")
    if not 0 <= model.unk_id < len(model.pieces):
        raise ModelError(f"its unknown-token id {model.unk_id} is outside the vocabulary of {len(model.pieces)}")
    if model.kind is ModelKind.BPE:
        core: models.Model = models.BPE(
            vocab=ids,
            merges=_merges_by_score(model.pieces),
            unk_token=model.pieces[model.unk_id].text,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    else:
        scored = [(piece.text, piece.score) for piece in model.pieces]
        core = models.Unigram(scored, unk_id=model.unk_id, byte_fallback=model.byte_fallback)
    tokenizer = Tokenizer(core)
    late = _late(model)
    tokenizer.normalizer = _sentencepiece_normalizer(model, late)
    if first := _pre_tokenizers(model):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(first)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if any(piece.kind is PieceKind.UNUSED for piece in model.pieces):
        steps.insert(0, decoders.Replace(_HIDDEN, ""))
    if model.add_prefix or model.trim_spaces:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    for kind in (PieceKind.UNKNOWN, PieceKind.CONTROL):
        names = [piece.text for piece in model.pieces if piece.kind is kind]
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    for name in _user_defined(model):
        tokenizer.add_tokens([AddedToken(name, special=False, normalized=name in late)])
    return tokenizer


def from_marked_merges(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]], unknown: int, kinds: Sequence[int]
) -> Tokenizer:
    """A BPE tokenizer that merges across whole texts; spaces are marks, and bytes spell what has no token."""
    vocab = {token: index for index, token in enumerate(tokens)}
    core = models.BPE(vocab=vocab, merges=list(merges), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(core)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE_MARK)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    for kind, special in ((PieceKind.UNKNOWN, True), (PieceKind.CONTROL, True), (PieceKind.USER_DEFINED, False)):
        names = [token for token, found in zip(tokens, kinds, strict=True) if found == kind]
        added = [AddedToken(name, special=special, normalized=not special and SPACE_MARK in name) for name in names]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return tokenizer


def _pre_tokenizers(model: SentencePieceModel) -> list[pre_tokenizers.PreTokenizer]:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if model.add_prefix and model.first_only:
        steps.append(pre_tokenizers.Metaspace(SPACE_MARK, "first", split=False))
    if model.kind is ModelKind.UNIGRAM and model.byte_fallback:  # its search would take a byte's name for the byte
        steps.append(pre_tokenizers.Split(Regex(r"<(?=0x[0-9A-F]{2}>)"), "isolated"))
    return steps


def _without_unused(model: SentencePieceModel) -> list[Piece]:
    """The pieces, those respelled that must not be found in a text. A merge may pass through such a piece, and what it
    is then cut into depends on the text: no rule of merging says so."""
    names = {piece.text for piece in model.pieces if piece.kind in (PieceKind.NORMAL, PieceKind.UNUSED)}
    unused = [piece.text for piece in model.pieces if piece.kind is PieceKind.UNUSED]
    if model.kind is ModelKind.BPE:
        _check_work(map(len, unused))
        for text in unused:
            if any(text[:cut] in names and text[cut:] in names for cut in range(1, len(text))):
                raise ModelError(f"merges pass through its unused piece {text!r}; provide a tokenizer.json")
    return [
        replace(piece, text=_HIDDEN + piece.text) if piece.kind is PieceKind.UNUSED else piece for piece in model.pieces
    ]


def _user_defined(model: SentencePieceModel) -> list[str]:
    """The user-defined pieces that a text can hold: once spaces are marks, none has a space."""
    names = (piece.text for piece in model.pieces if piece.kind is PieceKind.USER_DEFINED)
    return [name for name in names if model.cut_first or " " not in name]


def _late(model: SentencePieceModel) -> frozenset[str]:
    """The user-defined pieces that are looked for in normalised text. Found before, they would keep the mark from the
    beginning of a text, get one behind them and lose spaces beside them. And a run of spaces is only there after spaces
    have become marks, if they may stand in a row at all. A piece that itself does not outlast the steps stays out."""

    def is_late(name: str) -> bool:
        if SPACE_MARK in name:
            return not (model.trim_spaces and set(name) == {SPACE_MARK})
        return ((model.add_prefix and not model.first_only) or model.trim_spaces) and not model.cut_first

    wanted = frozenset(filter(is_late, _user_defined(model)))
    whole = _sentencepiece_normalizer(model, wanted)
    return frozenset(name for name in wanted if whole.normalize_str(name) == name)


def _sentencepiece_normalizer(model: SentencePieceModel, late: Collection[str]) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.trim_spaces:  # spaces alone: other white space is text, and so is a typed mark, unless it comes last
        edges = rf"{START} |[ {SPACE_MARK}]+\z"
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(edges), "")]
    if model.add_prefix and not model.first_only:
        steps.append(_prefix(model, late))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])


def _prefix(model: SentencePieceModel, late: Collection[str]) -> normalizers.Normalizer:
    """What puts a mark before a text. Late pieces are normalised like texts, but get none."""
    names = sorted(late)
    if not names:
        return normalizers.Prepend(SPACE_MARK)
    kept = "|".join(map(re.escape, names))
    return normalizers.Replace(Regex(rf"{EXCEPT}{kept})\z)(?=[\s\S])"), SPACE_MARK)


def _merges_by_score(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every pair of normal pieces that joins to a normal piece, best joined piece first."""
    # Control and user-defined pieces stay out: typed text must never merge into them.
    ids = {piece.text: index for index, piece in enumerate(pieces) if piece.kind is PieceKind.NORMAL}
    _check_work(map(len, ids))
    found = []
    for text, index in ids.items():
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                found.append((-pieces[index].score, index, left, right))
    found.sort()
    return [(pieces[left].text, pieces[right].text) for _, _, left, right in found]


def from_merges(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    pattern: str | Sequence[str] | None,
    *,
    whole_words: bool = False,
) -> Tokenizer:
    """A byte-level BPE tokenizer; `pattern` splits words, several split one after the other (None: GPT-2's pattern).

    whole_words: a word that is in the vocabulary is that token, whatever the merges say."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=whole_words))
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        patterns = [pattern] if isinstance(pattern, str) else pattern
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(one), "isolated") for one in patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _check_work(lengths: Iterable[int]) -> None:
    """Refuse vocabularies with tokens so long that splitting them would never end."""
    if sum(length * length for length in lengths) > MAX_WORK:
        raise ModelError("its tokens are too long to be a vocabulary")


def read_merges(text: str) -> list[tuple[str, str]]:
    """The pairs of a merges.txt."""
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise ModelError(f"line {number} is not two tokens with one space between them: {line[:60]!r}")
        pairs.append((left, right))
    return pairs


def read_ranks(text: str) -> dict[bytes, int]:
    """The byte strings and ranks of a rank file (base64, space, number; one per line)."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            word, rank = line.split()
            ranks[base64.b64decode(word, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelError(f"line {number} is not base64 text and a rank: {line[:60]!r}") from error
    if len(set(ranks.values())) != len(ranks) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ModelError("it has a rank twice or lacks one of the 256 single bytes")
    return ranks


def from_ranks(ranks: Mapping[bytes, int], pattern: str = WORDS_DIGITS_3, before: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE tokenizer from ranks, where a token's rank is both its merge priority and, behind the special
    tokens `before`, its id."""
    shown = {byte: char for char, byte in byte_alphabet().items()}

    def spell(data: bytes) -> str:
        return "".join(map(shown.__getitem__, data))

    _check_work(map(len, ranks))
    merges = []
    for word, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(word) > 1:
            parts = _split_below(ranks, word, rank)
            # A token that its own lower ranks do not build as a pair appears only as a whole word.
            if len(parts) == 2:
                merges.append((spell(parts[0]), spell(parts[1])))
    vocab = {name: index for index, name in enumerate(before)}
    vocab.update({spell(word): rank + len(before) for word, rank in ranks.items()})
    if len(vocab) != len(before) + len(ranks):
        raise ModelError("it has a token twice")
    tokenizer = from_merges(vocab, merges, pattern, whole_words=True)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in before])
    return tokenizer


def _split_below(ranks: Mapping[bytes, int], word: bytes, limit: int) -> list[bytes]:
    """Merge the bytes of `word` greedily with the ranks below `limit`."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], limit))
        if ranks.get(parts[best] + parts[best + 1], limit) >= limit:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def refuse_chance(tokenizer: Tokenizer) -> None:
    """Refuse merges that are left out at random, which is for training: a text would have other ids each time."""
    if chance := getattr(tokenizer.model, "dropout", None):
        raise ModelError(f"it leaves out merges at random (dropout {chance:g}); set dropout to null in it")


def surround(tokenizer: Tokenizer, before: Iterable[str], after: Iterable[str]) -> None:
    """Make the tokenizer put these special tokens around every text."""
    heads, tails = list(before), list(after)
    if not heads and not tails:
        return
    own = {name: {"id": name, "ids": [tokenizer.token_to_id(name)], "tokens": [name]} for name in {*heads, *tails}}

    def framed(text: str, kind: int) -> list[dict[str, Any]]:
        inner = {"Sequence": {"id": text, "type_id": kind}}
        marks = [[{"SpecialToken": {"id": name, "type_id": 0}} for name in names] for names in (heads, tails)]
        return [*marks[0], inner, *marks[1]]

    made = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    state = {"single": framed("A", 0), "pair": [*framed("A", 0), *framed("B", 1)], "special_tokens": own}
    # As a string a piece has a syntax of its own, which a token's name may not be (`:`, `$A`).
    made.__setstate__(json.dumps({"type": "TemplateProcessing", **state}).encode())
    tokenizer.post_processor = made
