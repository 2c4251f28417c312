"""What the evaluation keeps for itself. Owns: held-out sentences as patterns. Knows no task.

Text that is put together from parts may by chance become a sentence of the evaluation. Who composes asks here and draws
again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from authored_data import load, rows
from grammar import Seq, parse

EDGE = " .,!?:;。，！？：；、\"'“”\n"


def _pattern(seq: Seq) -> str:
    """A parsed template as an expression; a slot is anything short."""
    out = []
    for part in seq:
        if isinstance(part, str):
            out.append(re.escape(part))
        elif part[0] == "slot":
            out.append(r"(?:[^.!?。！？\n]|\.(?=\w)){1,60}?")
        else:
            out.append("(?:" + "|".join(_pattern(option) for option in part[1]) + ")")
    return "".join(out)


Matcher = Callable[[str], bool]


def matcher(templates: Iterable[str]) -> Matcher:
    """Whether a text is one of the templates, in any case; those that begin with its first letter are looked at."""
    grouped: dict[str, list[str]] = {}
    for text in templates:
        # A choice that depends on a value, `<paid:has paid|has not>`, is any choice here.
        marked = re.sub(r"<\w+:([^|>]*)\|([^>]*)>", r"{\1|\2}", text.strip(EDGE))
        grouped.setdefault("" if marked[0] in "[{" else marked[0].lower(), []).append(_pattern(parse(marked)))
    anywhere = grouped.pop("", [])
    compiled = {key: re.compile("|".join([*found, *anywhere]), re.IGNORECASE) for key, found in grouped.items()}
    rest = re.compile("|".join(anywhere) or "(?!)", re.IGNORECASE)

    def matches(text: str) -> bool:
        line = text.strip(EDGE)
        return bool(compiled.get(line[:1].lower(), rest).fullmatch(line))

    return matches


@lru_cache(maxsize=1)
def _stories() -> Matcher:
    return matcher(text for intent in ("story", "story_zh") for text in load().wordings[intent]["held"])


@lru_cache(maxsize=1)
def _remarks() -> Matcher:
    held = [row for row in rows("remarks.jsonl") if row.get("held")]
    return matcher(text for row in held for text in (*row["says"], *(ask[0] for ask in row["asks"])))


@lru_cache(maxsize=1)
def _happenings() -> Matcher:
    held = [row for row in rows("scenes.jsonl") if row.get("held")]
    return matcher(text for row in held for text in (*row["says"], *row.get("asks", [])))


@lru_cache(maxsize=1)
def _orders() -> Matcher:
    asked = [row[kind] for row in rows("tools.jsonl") for kind in ("held", "free")]
    return matcher([*asked, *(text for intent in ("weather", "calc") for text in load().wordings[intent]["held"])])


def is_order(text: str) -> bool:
    """Whether an order for a usual tool is one of the evaluation."""
    return _orders()(text)


@lru_cache(maxsize=1)
def _declined() -> Matcher:
    return matcher(text for row in rows("declines.jsonl") for text in row["held"])


def is_declined(text: str) -> bool:
    """Whether a request beyond the model is one of the evaluation."""
    return _declined()(text)


def is_story_wording(text: str) -> bool:
    """Whether a request for a story is one of the evaluation."""
    return _stories()(text)


@lru_cache(maxsize=1)
def _remark_words() -> frozenset[str]:
    """Words of the evaluation's remarks that no remark of the training has: what they are about."""
    said: dict[bool, set[str]] = {False: set(), True: set()}
    for row in rows("remarks.jsonl"):
        text = " ".join([*row["says"], *(part for ask in row["asks"] for part in ask[:2])])
        said[bool(row.get("held"))] |= set(re.findall("[a-z]{4,}", re.sub(r"\[\w+\]", " ", text.lower())))
    return frozenset(said[True] - said[False])


def is_remark(text: str) -> bool:
    """Whether a remark or a question for it is one of the evaluation, or about the same."""
    found = _remark_words() & set(re.findall("[a-z]{4,}", text.lower()))
    return bool(found) or _remarks()(text)


def is_happening(text: str) -> bool:
    """Whether a sentence or an order of a happening is one of the evaluation."""
    return _happenings()(text)
