"""Texts where other APIs have token ids: prompts of texts and ids in turn, and biases of words. Owns: what such
a prompt is, and biases as ids.

Must not know: HTTP, engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from tokenmill.core.errors import ParameterError
from tokenmill.text.codec import Tokenizer

Prompt = str | list[int] | list[int | str]
FORBIDDEN = -100.0
"""The bias that `false` means: the token never occurs."""
MOST_WORDS = 8192
"""Most characters of all words in a logit_bias together."""


def is_mixed(prompt: Prompt) -> TypeGuard[list[int | str]]:
    """Does it hold texts among ids?"""
    return isinstance(prompt, list) and any(isinstance(piece, str) for piece in prompt)


def biases(given: Any, tokenizer: Tokenizer | None) -> Any:
    """Pairs of a token and a bias, or an object of them, as a completion's logit_bias. A token is an id or a text, of
    which all tokens get the bias. What is neither is left to the schema."""
    if isinstance(given, Mapping):
        pairs: list[Any] = [[int(key) if _is_id(key) else key, bias] for key, bias in given.items()]
    elif isinstance(given, list):
        pairs = given
    else:
        return given
    words = [pair[0] for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str)]
    if sum(map(len, words)) > MOST_WORDS:
        raise ParameterError(f"logit_bias holds more than {MOST_WORDS} characters in all.", param="logit_bias")
    if words and tokenizer is None:
        raise ParameterError("Without a tokenizer (--skip-tokenizer-init), logit_bias takes ids.", param="logit_bias")
    return {str(token): bias for pair in pairs for token, bias in _bias(pair, tokenizer)}


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 10


def _bias(pair: Any, tokenizer: Tokenizer | None) -> list[tuple[int, float]]:
    """[token, bias] for each id that the token stands for."""
    if isinstance(pair, list) and len(pair) == 2:
        token, bias = pair
        number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if number or bias is False:
            value = float(bias) if number else FORBIDDEN
            if isinstance(token, str) and token and tokenizer is not None:
                return [(each, value) for each in tokenizer.encode(token, add_special_tokens=False)]
            if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                return [(token, value)]
    raise ParameterError(
        "logit_bias must hold pairs of a token (an id or a text) and a number, or false.", param="logit_bias"
    )
