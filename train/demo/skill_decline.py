"""What the demo cannot do. Owns: polite answers to it, in the language of the question. Knows no tokens."""

from __future__ import annotations

import random
from functools import lru_cache

from authored_data import fill, rows, wording
from render import Case
from skill_facts import ask
from vocabulary import invented

DECLINED = "tiny demo model|演示模型|petit modèle de démonstration|kleines Demomodell|pequeño modelo de demostración"
"""What every such answer holds."""
LANGUAGES = {"en": "tiny demo model", "zh": "演示模型", "fr": "anglais", "de": "Englisch", "es": "inglés"}
SHARES = {"en": 0.5, "zh": 0.38, "fr": 0.04, "de": 0.04, "es": 0.04}


@lru_cache(maxsize=1)
def declines() -> list[dict]:
    """The authored requests beyond the model, by kind and language."""
    return rows("declines.jsonl")


def decline(rng: random.Random, held: bool, lang: str = "", kind: str = "") -> Case:
    """One request beyond the model with its honest answer."""
    lang = lang or rng.choices(list(SHARES), list(SHARES.values()))[0]
    row = rng.choice([r for r in declines() if r["lang"] == lang and (not kind or r["kind"] == kind)])
    if not held and lang == "en" and row["kind"] == "know" and rng.random() < 0.12:
        return unknown_place(rng)
    user = fill(rng.choice(row["held" if held else "ask"]), rng, {})
    # The first answer is the usual one, so that the likeliest answer is one sentence and not a mixture.
    answers = row["answers"]
    answer = fill(answers[0] if rng.random() < 0.5 else rng.choice(answers), rng, {})
    return ask(user, answer, "decline", DECLINED, tag=f"{lang}/{row['kind']}")


def unknown_place(rng: random.Random) -> Case:
    """The capital of a country that there is not."""
    place = invented(rng).capitalize()
    if rng.random() < 0.5:
        user = wording("capital", rng, False, {"c": place})
    else:
        user = wording("capital_rev", rng, False, {"x": place})
    return ask(user, "I am a tiny demo model and I do not know that.", "decline", DECLINED, tag="en/place")
