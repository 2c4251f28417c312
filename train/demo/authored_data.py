"""The project-written text. Owns: reading `authored/*.jsonl` into one read-only value. Knows nothing of training."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from grammar import expand, parse
from own_facts import FACTS

AUTHORED = Path(__file__).parent / "authored"


@dataclass(frozen=True)
class Authored:
    """All authored tables, as loaded; `words` maps a list name to its items."""

    plots: list[dict]
    words: dict[str, list[str]]
    pools: dict[str, list[str]]
    countries: list[dict]
    pairs: dict[str, list[list[str]]]
    jokes: list[dict]
    faq: list[dict]
    completions: list[dict]
    poems: list[dict]
    chat: list[dict]
    out_of_scope: list[str]
    wordings: dict[str, dict]


def rows(name: str) -> list[dict]:
    """The rows of one authored file."""
    with open(AUTHORED / name, encoding="utf-8") as handle:
        return [json.loads(line) for line in handle if line.strip()]


@lru_cache(maxsize=1)
def load() -> Authored:
    """Every authored table, read once per process."""
    pools: dict[str, list[str]] = {}
    for row in rows("pools.jsonl"):
        pools.setdefault(row["pool"], []).append(row["text"])
    return Authored(
        plots=rows("plots.jsonl"),
        words={r["list"]: r["items"] for name in ("words", "words_zh") for r in rows(f"{name}.jsonl")},
        pools=pools,
        countries=rows("countries.jsonl"),
        pairs={r["table"]: r["pairs"] for r in rows("pairs.jsonl")},
        jokes=rows("jokes.jsonl"),
        faq=rows("faq.jsonl"),
        completions=rows("completions.jsonl"),
        poems=rows("poems.jsonl"),
        chat=rows("chat.jsonl"),
        out_of_scope=[r["text"] for r in rows("out_of_scope.jsonl")],
        wordings={r["intent"]: r for r in rows("wordings.jsonl")},
    )


@lru_cache(maxsize=1)
def free_stories() -> list[dict]:
    """Stories written as a whole."""
    return rows("free_stories.jsonl")


@lru_cache(maxsize=1)
def synonyms() -> list[dict]:
    """Words that may stand for each other in plots."""
    return rows("synonyms.jsonl")


def fill(text: str, rng: random.Random, values: dict[str, str]) -> str:
    """A template expanded with given values first and random entries of the word lists otherwise."""
    words = load().words

    def slot(name: str) -> str:
        if name in values:
            return values[name]
        if name in FACTS:
            return FACTS[name]
        if name in ("zhcity", "zhcountry"):
            return rng.choice(load().countries)["capital_zh" if name == "zhcity" else "zh"]
        if name == "city":
            return rng.choice(load().countries)["capital"]
        if name == "country":
            return rng.choice(load().countries)["country"]
        return rng.choice(words[name])

    return expand(parse(text), rng, slot)


FILLERS = ["please", "now", "just", "then", "so", "well", "gladly", "me", "the", "me the", "quickly", "again"]
SUFFIXES = [" please", " for me", ", thanks", " Thank you.", " now", ", please", " if you can", " for me, please"]
SUFFIXES_ZH = ["谢谢", "好吗？", "请回答", "！"]


# In these a word more or less changes the task itself.
LITERAL = frozenset(("capital_word", "repeat", "upper", "sort", "sortnum", "countw", "reverse"))


def _loosen(rng: random.Random, words: list[str]) -> list[str]:
    """One small change of an instruction: a word lost or added. Slot marks stay as they are."""
    free = [i for i, w in enumerate(words) if "\x01" not in w]
    pick = rng.random()
    if pick < 0.45 and len(free) > 2:
        return _without(words, rng.choice(free))
    if pick < 0.75:
        at = rng.choice(free) if free else 0
        return [*words[:at], rng.choice(FILLERS), *words[at:]]
    return [*words[:-1], words[-1] + rng.choice(SUFFIXES)]


def _without(words: list[str], at: int) -> list[str]:
    return words[:at] + words[at + 1 :]


def loosened(rng: random.Random, template: str, held: str) -> str:
    """A template with `[slot]` marks after one small change, never equal to the held-out one."""
    text = " ".join(_loosen(rng, template.replace("[", "\x01[").split(" "))).replace("\x01", "")
    return template if _plain(text) == _plain(held) else text


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w\[\] ]", " ", text.lower()).split())


def wording(intent: str, rng: random.Random, held: bool, values: dict[str, str]) -> str:
    """One user wording of an intent; `held` picks from the wordings that training never sees.

    In training a third of the wordings is loosened, because a phrase that was never seen must still be understood.
    """
    row = load().wordings[intent]
    if held:
        return fill(rng.choice(row["held"]), rng, values)
    text = rng.choice(row["train"])
    if intent in LITERAL or rng.random() > 0.33:
        return fill(text, rng, values)
    text = expand(parse(text), rng, lambda name: f"\x01{name}\x02")
    if any("\u4e00" <= c <= "\u9fff" for c in text):
        text = rng.choice(["请问", "请", "你好，", ""]) + text + rng.choice(["", *SUFFIXES_ZH])
    else:
        text = " ".join(_loosen(rng, text.split(" ")))
    for name, value in values.items():
        text = text.replace(f"\x01{name}\x02", value)
    return text
