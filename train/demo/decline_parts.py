"""Requests beyond the model, put together. Owns: eight kinds in English and Chinese, short ones in three others.

An order for a usual tool where none is offered is one of them, too. Knows no answers.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache

from authored_data import load, rows
from grammar import expand, parse, tidy
from held_out import is_declined
from scenes import tell
from skill_chat import person
from usual_parts import usual_of
from vocabulary import word

ORDERS = {
    "act": "light light_on light_off dim heating oven alarm timer taxi message email call pay music volume table hotel"
    " order door plug alarm_off doctor event parcel",
    "weather": "weather",
}
"""Usual tools that such a request may want where there is none, by the kind of the answer."""
KIN = ["mother", "son", "daughter", "cat", "boss", "friend", "uncle", "wife"]


@lru_cache(maxsize=1)
def _forms() -> dict[tuple[str, str], list[str]]:
    return {(row["lang"], row["kind"]): row["forms"] for row in rows("decline_parts.jsonl")}


def _filled(rng: random.Random, form: str) -> str:
    words, countries = load().words, load().countries
    made = {
        "noun.w": lambda: word(rng, "noun", False),
        "animal.w": lambda: rng.choice(words["animal"]),
        "name": lambda: person(rng, False),
        "kin": lambda: rng.choice(KIN),
        "city": lambda: rng.choice(countries)["capital"],
        "country": lambda: rng.choice(countries)["country"],
        "zhcity": lambda: rng.choice(countries)["capital_zh"],
        "zhcountry": lambda: rng.choice(countries)["zh"],
    }
    text = expand(parse(form), rng, lambda key: made[key]() if key in made else rng.choice(words[key]))
    return " ".join(text.split())


def _order(rng: random.Random, kind: str) -> str:
    """An order for a usual tool of a kind."""
    scene = usual_of(rng, rng.choice(ORDERS[kind].split()))
    told = tell(rng, scene, scene.asks[0]).text
    return told[0].upper() + told[1:]


def composed_decline(rng: random.Random, lang: str, kind: str) -> str:
    """A request of a kind that no list holds; empty where the kind has no forms."""
    forms = _forms().get((lang, kind), [])
    if lang == "en" and kind in ORDERS and (not forms or rng.random() < 0.5):
        text = _order(rng, kind)
    elif forms:
        text = tidy(_filled(rng, rng.choice(forms))) if lang == "en" else _filled(rng, rng.choice(forms))
        text = text[0].upper() + text[1:]
        if lang == "zh":
            text += "？" if re.search("[吗谁哪几怎不]|什么|多少", text) else "。"
        if lang == "en":
            asks = text.startswith(("Could", "Can", "Will", "Would", "How", "Wh", "Is", "Are", "Do", "Should", "Shall"))
            text = text.rstrip(".?") + (rng.choice(["?", "?", ""]) if asks else rng.choice([".", ".", ""]))
    else:
        return ""
    return composed_decline(rng, lang, kind) if is_declined(text) else text
