"""Rests, rates and three amounts put together. Owns: what is left of, so much a day for weeks, sums of three things.

Each is said in both languages, and only the words tell the operation. Knows no tokens.
"""

from __future__ import annotations

import random
from functools import lru_cache

from authored_data import load, rows
from grammar import expand, parse, tidy
from skill_expression import Node
from story_parts_zh import THING, name_zh, wide_noun
from topics import plural
from vocabulary import word

Made = tuple[str, Node]
SPANS = [
    ("a week", 7),
    ("one week", 7),
    ("a week", 7),
    ("[n] days", 1),
    ("[n] weeks", 7),
    ("a fortnight", 14),
    ("Monday to Friday", 5),
]


@lru_cache(maxsize=1)
def _forms() -> dict[str, list[str]]:
    return {row["part"]: row["texts"] for row in rows("rest_parts.jsonl")}


def _said(rng: random.Random, form: str, values: dict[str, object]) -> str:
    """A form with its numbers, people and things."""
    names = rng.sample(load().words["name"], 3)
    who = rng.choice([names[0], f"The {rng.choice(load().words['job'])}", "My sister", "Our class", "She", "He"])
    slots = {"N": names[0], "N2": names[1], "N3": names[2], "W": who}
    slots |= {key: str(value) for key, value in values.items()}
    slots |= {key: name_zh(rng) for key in ("M", "M2", "M3")}
    text = tidy(expand(parse(form), rng, lambda key: slots[key]))
    return text[0].upper() + text[1:]


def _things(rng: random.Random) -> list[str]:
    out: list[str] = []
    while len(out) < 3:
        made = rng.choice(load().words["fruit.pl"]) if rng.random() < 0.3 else plural(word(rng, "noun", False))
        out += [made] if made not in out else []
    return out


def rest(rng: random.Random) -> Made:
    """What is left of something."""
    b = rng.randint(1, rng.choice([20, 90]))
    a = b + rng.randint(1, rng.choice([20, 80]))
    if rng.random() < 0.25:
        return _said(rng, rng.choice(_forms()["rest_zh"]), {"a": a, "b": b, "t": wide_noun(rng, THING)}) + "？", (
            "-",
            a,
            b,
        )
    return _said(rng, rng.choice(_forms()["rest"]), {"a": a, "b": b, "p": _things(rng)[0]}) + "?", ("-", a, b)


def rate(rng: random.Random) -> Made:
    """So much a day: for a week, for some weeks, or back to one day."""
    p, n, x, pick = rng.randint(2, 40), rng.randint(2, 9), _things(rng)[0], rng.random()
    values: dict[str, object] = {"p": p, "n": n, "x": x if rng.random() < 0.5 else "pages"}
    if pick < 0.2:
        form = rng.choice(_forms()["rate_zh"])
        days = n if "[n]" in form else 7
        return _said(rng, form, values) + "？", ("*", p, days)
    if pick < 0.65:
        span, days = rng.choice(SPANS)
        node: Node = ("*", ("*", p, days) if days > 1 else p, n) if "[n]" in span else ("*", p, days)
        span = span if span != "Monday to Friday" else rng.choice(["five days", "the days from Monday to Friday"])
        text = _said(rng, rng.choice(_forms()["rate"]).replace("[span]", span), values)
        return text + "?", node
    if pick < 0.8:
        return _said(rng, rng.choice(_forms()["weekly"]), values) + "?", ("*", p, n)
    form = rng.choice(_forms()["each"])
    days = n if "[n]" in form else 7
    return _said(rng, form, values | {"t": p * days}) + "?", ("/", p * days, days)


def three(rng: random.Random) -> Made:
    """Three amounts that all count."""
    a, b, c = (rng.randint(1, rng.choice([12, 60])) for _ in range(3))
    node: Node = ("+", ("+", a, b), c)
    values: dict[str, object] = {"a": a, "b": b, "c": c}
    if rng.random() < 0.5:
        values |= dict(zip("xyz", (wide_noun(rng, THING) for _ in range(3)), strict=True))
        return _said(rng, rng.choice(_forms()["buys_zh"]), values) + "？", node
    values |= dict(zip("xyz", _things(rng), strict=True))
    return _said(rng, rng.choice(_forms()["buys"]), values) + "?", node
