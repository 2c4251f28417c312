"""A twin of a tokenizer, for text that people type. Owns: making sure that typed text never becomes a control token.
Must not know: files, requests, templates.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection

from tokenizers import AddedToken, Tokenizer, models

# Added tokens that act as control tokens although their authors did not mark them as special.
_STEERING = re.compile(
    r"<[|｜].*[|｜]>|\[/?[A-Z_]{2,}\]|</?(?:think|reasoning|tools?|tool_calls?|tool_responses?|tool_results?)>"
    r"|</?(?:start_of_turn|end_of_turn|bos|eos|s|pad|unk|mask|fim_\w+)>"
)


def steers(token: AddedToken) -> bool:
    """May only templates and models write this added token?"""
    return token.special or bool(_STEERING.fullmatch(token.content))


def control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that typed text must never produce. The unknown token is not among them: odd text may produce it."""
    unknown = _unknown_id(tokenizer)
    added = tokenizer.get_added_tokens_decoder().items()
    return frozenset(index for index, token in added if steers(token) and index != unknown)


def plain_twin(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer with the same ids that reads control tokens as ordinary characters."""
    twin = twin_of(tokenizer)
    marked = [token for token in twin.get_added_tokens_decoder().values() if steers(token)]
    for token in marked:
        token.special = True
    twin.add_special_tokens(marked)
    twin.encode_special_tokens = True
    if isinstance(twin.model, models.Unigram):
        _hide_pieces(twin, control_ids(tokenizer) | {_unknown_id(tokenizer)})
    return twin


def twin_of(tokenizer: Tokenizer) -> Tokenizer:
    """A second tokenizer with the same ids, which may be changed."""
    twin = _shared(tokenizer) or Tokenizer.from_str(tokenizer.to_str())
    twin.encode_special_tokens = tokenizer.encode_special_tokens
    return twin


def _shared(tokenizer: Tokenizer) -> Tokenizer | None:
    """A twin around the same vocabulary in memory; None when its added tokens would get other ids."""
    twin = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(twin, part, value)
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    twin.add_tokens([token for _, token in added])
    same = all(twin.token_to_id(token.content) == index for index, token in added)
    return twin if same else None


def _hide_pieces(twin: Tokenizer, ids: Collection[int | None]) -> None:
    # Unigram finds any vocabulary piece inside a text, control pieces too: respell those so that nobody can type them.
    state = json.loads(twin.model.__getstate__())
    nonce = secrets.token_hex(16)
    vocab = [
        (f"{nonce}{index}" if index in ids else piece, score) for index, (piece, score) in enumerate(state["vocab"])
    ]
    twin.model = models.Unigram(vocab, unk_id=state["unk_id"], byte_fallback=bool(state.get("byte_fallback")))


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    model = tokenizer.model
    name = getattr(model, "unk_token", None)
    if isinstance(name, str):
        return tokenizer.token_to_id(name)
    unk_id = getattr(model, "unk_id", None)
    if unk_id is None and isinstance(model, models.Unigram):
        unk_id = json.loads(model.__getstate__()).get("unk_id")
    return unk_id if isinstance(unk_id, int) else None
