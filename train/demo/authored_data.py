"""The project-written text. Owns: reading `authored/*.jsonl` into one read-only value. Knows nothing of training."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from grammar import expand, parse

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
        words={r["list"]: r["items"] for r in rows("words.jsonl")},
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


def fill(text: str, rng: random.Random, values: dict[str, str]) -> str:
    """A template expanded with given values first and random entries of the word lists otherwise."""
    words = load().words

    def slot(name: str) -> str:
        if name in values:
            return values[name]
        if name == "city":
            return rng.choice(load().countries)["capital"]
        if name == "country":
            return rng.choice(load().countries)["country"]
        return rng.choice(words[name])

    return expand(parse(text), rng, slot)


def wording(intent: str, rng: random.Random, held: bool, values: dict[str, str]) -> str:
    """One user wording of an intent; `held` picks from the wordings that training never sees."""
    return fill(rng.choice(load().wordings[intent]["held" if held else "train"]), rng, values)
