"""What the demo cannot do. Owns: polite answers to it, in the language of the question. Knows no tokens."""

from __future__ import annotations

import random
from functools import lru_cache

from authored_data import fill, rows, wording
from decline_parts import composed_decline
from render import Case
from skill_facts import ask
from vocabulary import invented

DECLINED = "tiny demo model|演示模型|petit modèle de démonstration|kleines Demomodell|pequeño modelo de demostración"
"""What every such answer holds."""
LANGUAGES = {"en": "tiny demo model", "zh": "演示模型", "fr": "anglais", "de": "Englisch", "es": "inglés"}
SHARES = {"en": 0.48, "zh": 0.37, "fr": 0.05, "de": 0.05, "es": 0.05}


MADE = 0.55
"""Share of the training requests that are put together."""
FOREIGN = {
    "fr": "je tu il nous vous est sont le la les un une des et ou où que qui quand comment pourquoi avec pour dans sur"
    " mon ton votre peux pouvez voudrais veux dire savoir faire aller manger acheter aujourd'hui demain maison ville"
    " livre eau jour temps beaucoup très bien petit grand nouveau s'il plaît merci donnez expliquez cherche trouve",
    "de": "ich du er wir sie ist sind der die das ein eine und oder wo was wer wann wie warum mit für in auf bei mein"
    " dein Ihr können Sie möchte will sagen wissen machen gehen essen kaufen heute morgen Haus Stadt Buch Wasser Tag"
    " Zeit viel sehr gut klein groß neu bitte danke geben erklären suche finde liegt mir uns nicht auch",
    "es": "yo tú él nosotros usted es son el la los un una unos y o dónde qué quién cuándo cómo por para con en sobre"
    " mi tu su puedo puede quiero quisiera decir saber hacer ir comer comprar hoy mañana casa ciudad libro agua día"
    " tiempo mucho muy bien pequeño grande nuevo favor gracias dame explique busco encuentro queda está no también",
}


def foreign(rng: random.Random, lang: str) -> str:
    """Words of a language in no order, sometimes with a name: the language alone decides the answer."""
    words = [rng.choice(FOREIGN[lang].split()) for _ in range(rng.randint(3, 9))]
    if rng.random() < 0.5:
        words.insert(rng.randint(0, len(words)), fill("{[city]|[name]|[country]}", rng, {}))
    text = " ".join(words)
    return text[0].upper() + text[1:] + rng.choice(["?", ".", " ?", "!", ""])


@lru_cache(maxsize=1)
def declines() -> list[dict]:
    """The authored requests beyond the model, by kind and language."""
    return rows("declines.jsonl")


def decline(rng: random.Random, held: bool, lang: str = "", kind: str = "", made: float = MADE) -> Case:
    """One request beyond the model with its honest answer; `made` is the share of training ones put together."""
    lang = lang or rng.choices(list(SHARES), list(SHARES.values()))[0]
    row = rng.choice([r for r in declines() if r["lang"] == lang and (not kind or r["kind"] == kind)])
    if not held and lang == "en" and row["kind"] == "know" and rng.random() < 0.12:
        return unknown_place(rng)
    user = fill(rng.choice(row["held" if held else "ask"]), rng, {})
    if not held and made and rng.random() < made:
        user = composed_decline(rng, lang, row["kind"]) or user
    elif not held and lang in FOREIGN and rng.random() < 0.4:
        user = foreign(rng, lang)
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
