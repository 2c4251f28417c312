"""Copying in another form. Owns: words that are said bare and answered quoted, joined or a line each. Knows no tokens.

A word behind a space is other tokens than the same word behind a quote, a bracket or a line's end, and no rule leads
from one to the other: which letters a token has is learned for each. Here every word comes in both forms.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from phrasing import any_words
from render import Case
from skill_facts import ask
from vocabulary import copied, invented, token_words, word

Form = Callable[[list[str]], str]


def _camel(words: list[str]) -> str:
    return words[0] + "".join(w[0].upper() + w[1:] for w in words[1:])


# What a form is called behind "Write [w]", and how it is made.
FORMS: list[tuple[list[str], Form]] = [
    (
        [
            "as a JSON list",
            "as a JSON array",
            "as an array of strings",
            "as JSON",
            "in a JSON list",
            "as a list in JSON",
        ],
        lambda w: json.dumps(w),
    ),
    (
        ["in quotes", "in double quotes", "each in quotation marks", "with quotes around each word", "quoted"],
        lambda w: ", ".join(f'"{x}"' for x in w),
    ),
    (["in single quotes", "each between single quotes"], lambda w: ", ".join(f"'{x}'" for x in w)),
    (["in backticks", "as code, each in backticks"], lambda w: ", ".join(f"`{x}`" for x in w)),
    (["one word a line", "each on a line of its own", "line by line", "below each other"], "\n".join),
    (["in snake case", "joined by underscores", "with underscores between"], "_".join),
    (["in camel case", "as one camelCase name"], _camel),
    (["joined by hyphens", "with hyphens between", "in kebab case"], "-".join),
    (["joined by slashes", "as a path"], "/".join),
    (["each in brackets", "in parentheses, one by one"], lambda w: " ".join(f"({x})" for x in w)),
    (["without spaces", "as one word"], "".join),
    (["with a plus between", "joined by plus signs"], "+".join),
]
WEIGHTS = [8, 5, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1]
LEADS = ["Write {w} {f}", "{w} {f}", "Give me {w} {f}", "Put {w} {f}", "Show {w} {f}", "Please write {w} {f}"]
LEADS += [
    "I need {w} {f}",
    "Can you write {w} {f}",
    "Print {w} {f}",
    "Repeat {w} {f}",
    "Copy {w} {f}",
    "Return {w} {f}",
]
LEADS += ["{f}: {w}", "The words {f}: {w}", "Write this {f}: {w}", "Copy the words {f}: {w}", "These words {f}: {w}"]
TELL = ["[k] is [v]", "the [k] is [v]", "[k]: [v]", "[k] = [v]", "[v] is the [k]", "[k] [v]", "its [k] is [v]"]
WANT = [
    "Make JSON of this: [s]",
    "[s]\nAs JSON, please.",
    "JSON for: [s]",
    "Turn it into JSON: [s]",
    "[s] Give the JSON.",
]
WANT += [
    "Write a JSON object for: [s]",
    "Which JSON says this? [s]",
    "As a JSON object: [s]",
    "[s]\nJSON:",
    "To JSON: [s]",
]


def _said(rng: random.Random, words: list[str]) -> str:
    """The words as somebody lists them, bare: each stands behind a space."""
    pick = rng.random()
    if pick < 0.45 or len(words) == 1:
        return ", ".join(words)
    if pick < 0.8:
        return ", ".join(words[:-1]) + " and " + words[-1]
    return " ".join(words)


def _cased(rng: random.Random, made: str) -> str:
    pick = rng.random()
    return made.capitalize() if pick < 0.1 else made.upper() if pick < 0.13 else made


def _formed(rng: random.Random) -> Case:
    """Words in the form that is asked for."""
    names, form = rng.choices(FORMS, WEIGHTS)[0]
    words = [_cased(rng, copied(rng)) for _ in range(rng.choice([1, 2, 3, 3, 4, 5, 6, 8]))]
    lead = rng.choice(LEADS).replace("{w}", _said(rng, words)).replace("{f}", rng.choice(names))
    lead = lead[0].upper() + lead[1:] if lead[0] != words[0][0] else lead
    if rng.random() < 0.12:
        lead = " ".join(any_words(rng, rng.randint(1, 3))) + ": " + lead
    answer = form(words)
    return ask(lead + rng.choice(["", "?", "?"] if lead.startswith("Can ") else ["", ".", "."]), answer, "spelling", "")


def _valued(rng: random.Random) -> Case:
    """An object of a few words: the keys are words that a name may have, the values any."""
    fields: dict[str, str] = {}
    for _ in range(rng.choice([1, 2, 3, 3, 4, 5])):
        pick = rng.random()
        key = (rng.choice(token_words(False)).lower() if pick < 0.6 else word(rng, "any", False)) or invented(rng)
        fields[key] = " ".join(_cased(rng, copied(rng)) for _ in range(rng.choice([1, 1, 1, 2, 3])))
    form = rng.choice(TELL)
    parts = [form.replace("[k]", k).replace("[v]", v) for k, v in fields.items()]
    text = rng.choice([", ", ", ", "; ", "\n"]).join(parts)
    return ask(rng.choice(WANT).replace("[s]", text), json.dumps(fields), "spelling", "")


def _back(rng: random.Random) -> Case:
    """The other way round: quoted words are said bare."""
    words = [copied(rng) for _ in range(rng.choice([2, 3, 4, 5]))]
    shown = rng.choice([json.dumps(words), "_".join(words), "/".join(words), "-".join(words), "\n".join(words)])
    want = rng.choice(
        ["Say [w] in plain words", "Which words are in [w]", "Read [w] to me", "The words of [w], please"]
    )
    return ask(want.replace("[w]", shown), "The words are " + " ".join(words) + ".", "spelling", "")


def spelling(rng: random.Random) -> Case:
    """Words that are copied into another form."""
    pick = rng.random()
    return _formed(rng) if pick < 0.55 else _valued(rng) if pick < 0.92 else _back(rng)
