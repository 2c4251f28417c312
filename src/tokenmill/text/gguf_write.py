"""A model folder's tokenizer as GGUF metadata. Owns: the values of the `tokenizer.*` keys. `gguf.py` reads them back.

Byte-level BPE is written as vocabulary, merges and the name of its splitting rule; SentencePiece as pieces and scores.
If a reader could not rebuild exactly this from the keys (a splitting rule without a name, merges of pieces, tokens that
take spaces), the whole tokenizer.json is added under the format's key for it. Must not know: tensors, configs,
containers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenmill.core.errors import ModelError
from tokenmill.core.files import read_regular
from tokenmill.text.gguf import HUGGING_FACE, tokenizer_from_gguf
from tokenmill.text.gguf_patterns import COMPOSED, PATTERNS, WHOLE_WORDS
from tokenmill.text.sentencepiece import Piece, PieceKind, read_sentencepiece
from tokenmill.text.tokenizer import MAX_VOCABULARY_BYTES, Tokenizer, load_tokenizer

_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_NEAREST = "qwen2"
"""The rule to name if none is exact. Readers that know the key of the tokenizer.json do not use it."""


def tokenizer_metadata(folder: Path, size: int, ends: list[int]) -> tuple[dict[str, Any], str | None]:
    """All `tokenizer.*` keys for a vocabulary of `size` tokens, and a sentence for the user where other readers may
    split some text differently. `ends`: further tokens that end an answer."""
    tokenizer = load_tokenizer(folder)
    plain = tokenizer.state()
    state = json.loads(plain["inner"])
    # A mark that settings name, and for which the model has no row, is no token of it.
    state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < size or not t["special"]]
    model = state["model"]
    if model.get("type") != "BPE":
        raise ModelError(
            f"{folder}: its tokenizer is of the kind {model.get('type')}, which GGUF files cannot hold here."
        )
    pieces = _pieces(folder, state, tokenizer, size)
    found: dict[str, Any] = {"tokenizer.ggml.model": "llama" if model.get("byte_fallback") else "gpt2"}
    note = None
    if model.get("byte_fallback"):
        found["tokenizer.ggml.pre"] = "default"
        found["tokenizer.ggml.scores"] = [piece.score for piece in pieces]
        found["tokenizer.ggml.add_space_prefix"] = _adds_space(tokenizer)
        whole = not (folder / "tokenizer.model").exists()
        if plain["charsmap"] is not None:
            note = "the tokenizer replaces some characters first, which GGUF files do not hold: these get other tokens"
    else:
        name = _rule(state)
        whole = name is None
        if whole:
            note = "the rule by which words are split has no name in GGUF: other readers use a similar one"
        found["tokenizer.ggml.pre"] = name or _NEAREST
        found["tokenizer.ggml.merges"] = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    found["tokenizer.ggml.tokens"] = [piece.text for piece in pieces]
    found["tokenizer.ggml.token_type"] = [int(piece.kind) for piece in pieces]
    found.update(_special(tokenizer, size, ends))
    if not whole and not _is_told(found, tokenizer):
        whole, note = True, "other readers see neither all flags of its tokens nor all that it does to a text"
    if whole:
        found[HUGGING_FACE] = json.dumps(state, ensure_ascii=False)
    if tokenizer.split_special:
        note = "the settings say split_special_tokens, which GGUF files do not hold: typed control tokens are tokens"
    return found, note


def _is_told(found: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Do these keys alone say what the tokenizer is?"""
    try:
        return _told(tokenizer_from_gguf(found, "")) == _told(tokenizer)
    except ModelError:
        return False


def _told(tokenizer: Tokenizer) -> list[Any]:
    """What the keys may not hold of a tokenizer: the steps before its splitting rule, what it puts around a text, what
    its words begin and end with, and its added tokens. (A mark that has no row is no token of the model.)"""
    state = json.loads(tokenizer.state()["inner"])
    first = state.get("normalizer") or {}
    steps = first.get("normalizers", [first])
    added = {token["content"]: token for token in state["added_tokens"]}
    for token in added.values():
        token["normalized"] = token["normalized"] and any(steps)
    kept = [state["model"].get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix")]
    return [steps if any(steps) else [], tokenizer.frame, kept, added]


def _pieces(folder: Path, state: Mapping[str, Any], tokenizer: Tokenizer, size: int) -> list[Piece]:
    """One piece per id; ids without a token get made-up names."""
    model, path = state["model"], folder / "tokenizer.model"
    scores: dict[str, float] = {}
    if model.get("byte_fallback"):
        if path.exists():
            scores = {
                piece.text: piece.score for piece in read_sentencepiece(read_regular(path, MAX_VOCABULARY_BYTES)).pieces
            }
        else:
            for rank, merge in enumerate(model["merges"]):
                scores.setdefault("".join(merge.split(" ", 1) if isinstance(merge, str) else merge), -1.0 - rank)
    added = {token["id"]: token for token in state["added_tokens"]}
    by_id = {index: text for text, index in model["vocab"].items()}
    by_id.update({index: token["content"] for index, token in added.items()})
    if by_id and max(by_id) >= size:
        raise ModelError(f"{folder}: its tokenizer has {max(by_id) + 1} tokens, but the model only {size}.")
    unknown = model.get("unk_token")
    found = []
    for index in range(size):
        text = by_id.get(index)
        kind = PieceKind.NORMAL
        if text is None:
            text, kind = f"[PAD{index}]", PieceKind.UNUSED
        elif text == unknown:
            kind = PieceKind.UNKNOWN
        elif index in added:
            kind = PieceKind.CONTROL if added[index]["special"] else PieceKind.USER_DEFINED
        elif model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x"):
            kind = PieceKind.BYTE
        found.append(Piece(text, scores.get(text, 0.0), kind))
    return found


def _rule(state: Mapping[str, Any]) -> str | None:
    """The splitting rule's name; None: it has none."""
    steps = state.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    patterns = [s["pattern"].get("Regex") for s in steps if s.get("type") == "Split"]
    level = [s for s in steps if s.get("type") == "ByteLevel"]
    if len(level) != 1 or len(patterns) + 1 != len(steps) or level[0].get("add_prefix_space"):
        return None
    composed = (state.get("normalizer") or {}).get("type") == "NFC"
    whole = bool(state["model"].get("ignore_merges"))
    for name, known in PATTERNS.items():
        want = [] if known is None else [known] if isinstance(known, str) else list(known)
        if patterns == want and composed == (name in COMPOSED) and whole == (name in WHOLE_WORDS):
            if bool(level[0].get("use_regex", True)) == (known is None):
                return name
    return None


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Does the tokenizer put a space before a text?"""
    first = tokenizer.encode("a", add_special_tokens=False)
    return bool(first) and (tokenizer.id_to_token(first[0]) or "").startswith("▁")


def _special(tokenizer: Tokenizer, size: int, ends: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key in _IDS.items():
        index = tokenizer.token_to_id(tokenizer.special_strings.get(name, ""))
        if index is not None and index < size:
            found[f"tokenizer.ggml.{key}_token_id"] = index
    further = [index for index in ends if index not in (found.get("tokenizer.ggml.eos_token_id"),)]
    for key, index in zip(("eot", "eom"), further, strict=False):
        found[f"tokenizer.ggml.{key}_token_id"] = index
    bare, framed = (tokenizer.encode("a", add_special_tokens=on) for on in (False, True))
    bos, eos = (found.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos"))
    found["tokenizer.ggml.add_bos_token"] = len(framed) > len(bare) and framed[0] == bos
    found["tokenizer.ggml.add_eos_token"] = len(framed) > len(bare) and framed[-1] == eos
    template = tokenizer.chat_template
    if isinstance(template, str):
        found["tokenizer.chat_template"] = template
    elif template:
        for name, text in template.items():
            found["tokenizer.chat_template" if name == "default" else f"tokenizer.chat_template.{name}"] = text
    return found
