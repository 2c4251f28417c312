"""Text templates. Owns: parsing and expanding `{a|b}` choices and `[slot]` names. Knows no vocabulary."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache

Seq = tuple  # of str | ("slot", name) | ("alt", (Seq, ...))


def _parse(text: str, at: int, closing: bool) -> tuple[list[Seq], int]:
    options: list[Seq] = []
    parts: list[object] = []
    buffer: list[str] = []

    def flush() -> None:
        if buffer:
            parts.append("".join(buffer))
            buffer.clear()

    while at < len(text):
        char = text[at]
        if char == "{":
            flush()
            inner, at = _parse(text, at + 1, True)
            parts.append(("alt", tuple(inner)))
            continue
        if char == "[":
            flush()
            end = text.index("]", at)
            parts.append(("slot", text[at + 1 : end]))
            at = end + 1
            continue
        if closing and char in "|}":
            flush()
            options.append(tuple(parts))
            parts = []
            at += 1
            if char == "}":
                return options, at
            continue
        buffer.append(char)
        at += 1
    if closing:
        raise ValueError(f"unbalanced braces in template: {text!r}")
    flush()
    options.append(tuple(parts))
    return options, at


@cache
def parse(text: str) -> Seq:
    """The parsed form of a template; braces must balance."""
    return _parse(text, 0, False)[0][0]


def expand(seq: Seq, rng: random.Random, slot: Callable[[str], str]) -> str:
    """One random expansion of a parsed template; `slot(name)` fills the slots."""
    out: list[str] = []
    for part in seq:
        if isinstance(part, str):
            out.append(part)
        elif part[0] == "slot":
            out.append(slot(part[1]))
        else:
            options = part[1]
            out.append(expand(options[int(rng.random() * len(options))], rng, slot))
    return "".join(out)


_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU](?!ni[cvf]|se[df ]|uro|ne ))")
_BEFORE_CONSONANT = re.compile(r"\b([Aa])n (?=[bcdfgjklmnpqrstvwxzBCDFGJKLMNPQRSTVWXZ])")
_SENTENCE = re.compile(r"(^|[.!?] |[.]\" |\n)([a-z])")


def tidy(text: str) -> str:
    """Articles before vowels, capitals after sentence ends and single spaces."""
    text = _ARTICLE.sub(lambda m: m.group(1) + "n ", " ".join(text.split(" ")).replace("  ", " ").replace(" ,", ","))
    text = _BEFORE_CONSONANT.sub(r"\1 ", text)
    return _SENTENCE.sub(lambda m: m.group(1) + m.group(2).upper(), text)
