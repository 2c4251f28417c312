"""Tokenizers stored as byte strings with ranks: tiktoken's files and Mistral's tekken.json. Owns: which pattern splits
words (it is in a model's Python code, or in the file), and which special tokens there are.

Must not know: folders, other tokenizers.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tokenmill.core.errors import ModelError
from tokenmill.text import build
from tokenmill.text.gguf_patterns import KIMI
from tokenmill.text.patterns import try_patterns

_BY_CLASS = {
    "QWenTokenizer": build.WORDS_DIGITS_1,
    "ChatGLM4Tokenizer": build.WORDS_DIGITS_3,
    "TikTokenTokenizer": KIMI,
    "PreTrainedTokenizerFast": build.WORDS_DIGITS_3,
    "LlamaTokenizer": build.WORDS_DIGITS_3,
}
"""`tokenizer_class` of tokenizer_config.json -> the pattern in its code."""
_RESERVED = 256
"""Ids behind Kimi's byte strings. Those without a listed name are named after their number."""
MAX_SPECIAL = 100_000


def from_rank_file(data: bytes, name: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of the rank file `name`; refused if its class's pattern is not known."""
    kind = config.get("tokenizer_class")
    if kind is None:
        pattern = build.WORDS_DIGITS_1 if name.startswith("qwen") else build.WORDS_DIGITS_3
    elif kind in _BY_CLASS:
        pattern = _BY_CLASS[kind]
    else:
        raise ModelError(
            f"its words are split by a pattern in the code of {str(kind)[:80]!r}, which is not known here; provide a "
            f"tokenizer.json (known: {', '.join(_BY_CLASS)})"
        )
    ranks = build.read_ranks(data.decode())
    made = build.from_ranks(ranks, pattern)
    if pattern is KIMI:
        named = _named(config)
        every = range(len(ranks), len(ranks) + _RESERVED)
        made.add_special_tokens(
            [AddedToken(named.get(i, f"<|reserved_token_{i}|>"), special=True, normalized=False) for i in every]
        )
    return made


def _named(config: Mapping[str, Any]) -> dict[int, str]:
    listed = config.get("added_tokens_decoder") or {}
    try:
        return {int(index): str(entry["content"]) for index, entry in listed.items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"the list of added tokens is malformed ({error})") from error


def from_tekken(data: bytes) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of a tekken.json, and its special strings. Special tokens come first, then as many byte strings as
    fill the vocabulary to the size that the file states."""
    whole = _object(json.loads(data), "the file")
    config = _object(whole.get("config"), "config")
    size, special = _count(config, "default_vocab_size"), _count(config, "default_num_special_tokens")
    pattern = config.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        raise ModelError("'config.pattern' must be text")
    if not 0 < special < size or special > MAX_SPECIAL:
        raise ModelError(f"{special} special tokens do not fit into a vocabulary of {size}")
    try_patterns({pattern})
    names = _special(whole.get("special_tokens"), special)
    made = build.from_ranks(_ranks(whole.get("vocab"), size - special), pattern, names)
    strings = {f"{key}_token": name for key, name in _STRINGS.items() if name in names}
    return made, strings


_STRINGS = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
_OLDER = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
          "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
          "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")  # fmt: skip
"""Special tokens of files that do not list them."""


def _special(listed: Any, count: int) -> list[str]:
    names = dict(enumerate(_OLDER)) if listed is None else {}
    for entry in listed or []:
        rank, name = entry.get("rank"), entry.get("token_str")
        if not isinstance(rank, int) or not isinstance(name, str) or not 0 <= rank < count or rank in names:
            raise ModelError(f"a special token is unusable: {str(entry)[:80]}")
        names[rank] = name
    return [names.get(index, f"<SPECIAL_{index}>") for index in range(count)]


def _ranks(listed: Any, count: int) -> dict[bytes, int]:
    if not isinstance(listed, list) or len(listed) < count:
        raise ModelError(f"'vocab' must list at least {count} byte strings")
    ranks: dict[bytes, int] = {}
    for index, entry in enumerate(listed[:count]):
        try:
            word = base64.b64decode(entry["token_bytes"], validate=True)
            fits = entry["rank"] == index and word not in ranks
        except (TypeError, KeyError, ValueError, binascii.Error) as error:
            raise ModelError(f"entry {index} of 'vocab' is unusable ({str(error)[:80]})") from error
        if not fits:
            raise ModelError(f"entry {index} of 'vocab' is out of order, or is there twice")
        ranks[word] = index
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ModelError("it lacks one of the 256 single bytes")
    return ranks


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ModelError(f"{what} must hold an object")
    return value


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 26:
        raise ModelError(f"'config.{name}' must be a whole number, not {str(value)[:40]}")
    return value
