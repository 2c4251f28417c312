"""Two of a kind in one sentence. Owns: remarks and JSON where only the role tells which value is asked for.

`Tom moved from Rome to Oslo` holds two towns. One of them is asked for, and the other in the next draw of the same
sentence, so that neither the kind of the value nor its place decides. Knows no tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from authored_data import load, rows
from grammar import expand, parse
from held_out import is_happening, is_remark
from remark_parts import RELATIONS, sentence, turned, whole
from render import Case
from scene_parts import field_of
from scenes import KINDS, Field, Scene, Told, Value, code, full_person, keyed
from skill_chat import person
from skill_facts import ask
from skill_notes import heard
from skill_notes_zh import HEARD, HEARD_REST, KIN, turned_zh
from skill_scene_json import request_of
from story_parts_zh import THING, name_zh, wide_noun
from twins import keep, kept
from vocabulary import copied, word

GATED = [
    "wifi",
    "garage",
    "front door",
    "gate",
    "safe",
    "laptop",
    "phone",
    "cellar",
    "locker",
    "alarm",
    "tablet",
    "car",
]


def _who(rng: random.Random) -> str:
    """Anybody in the third person, seen by the speaker: a name, or a relation with or without one."""
    if rng.random() < 0.45:
        return full_person(rng)
    kin = f"my {rng.choice(RELATIONS.split())}"
    return f"{kin} {person(rng, False)}" if rng.random() < 0.5 else kin


def _liked(rng: random.Random) -> str:
    """What somebody may like or not: food, drink, animals, hobbies, things."""
    kind = rng.choice(["food", "fruit.pl", "fruit.pl", "drink", "hobby", "things", "animals"])
    if kind == "things":
        return copied(rng).lower() + "s"
    return rng.choice(load().words["animal"]) + "s" if kind == "animals" else rng.choice(load().words[kind])


def _secret(rng: random.Random) -> str:
    pick = rng.random()
    return str(rng.randint(10, 99999)) if pick < 0.35 else code(rng) if pick < 0.5 else copied(rng)


OWN: dict[str, Callable[[random.Random], str]] = {
    "who": _who,
    "zh_who": lambda r: name_zh(r) if r.random() < 0.5 else f"我{r.choice(KIN.split())}",
    "likes": _liked,
    "secret": _secret,
    "gated": lambda r: r.choice(GATED) if r.random() < 0.6 else word(r, "noun", False),
    "lock": lambda r: r.choice(["password", "code", "pin", "key", "number"]),
    "zh_month": lambda r: f"{r.randint(1, 12)}月",
    "month": lambda r: r.choice(load().words["month"]),
    "zh_things": lambda r: wide_noun(r, THING),
    "zh_food": lambda r: r.choice(load().words["zhfood.more"]),
}
"""Kinds of values that only these sentences have."""


@dataclass(frozen=True)
class Part:
    """A value of a sentence: its kind, its names, the questions for it, and what answers them."""

    field: Field
    asks: tuple[str, ...]
    tell: str


@dataclass(frozen=True)
class Form:
    """A happening with two values of a kind, in a few sentences."""

    says: tuple[str, ...]
    parts: dict[str, Part]


SLOT = re.compile(r"\[(\w+)\]")
UNASKED = {
    False: {"p": "who", "q": "who", "m": "month"} | dict.fromkeys("etuw", "copied"),
    True: {"p": "zh_who", "q": "zh_who", "m": "zh_month", "e": "zh_plan", "t": "zh_things", "u": "zh_things"},
}
"""What a slot holds of which nothing is asked."""


def _part(row: dict) -> Part:
    names = [name for name in row["names"].split("|") if name]
    field = field_of(row["kind"], names) if names else Field(row["kind"], ())
    return Part(field, tuple(row["asks"]), row["tell"])


def _form(row: dict) -> Form:
    parts = {key: _part(part) for key, part in row["fields"].items()}
    rest = {slot for text in row["says"] for slot in SLOT.findall(text)} - parts.keys()
    kinds = UNASKED[row["lang"] == "zh"]
    return Form(tuple(row["says"]), parts | {slot: Part(Field(kinds[slot], ()), (), "") for slot in sorted(rest)})


@lru_cache(maxsize=2)
def forms(chinese: bool) -> list[Form]:
    """The forms of a language."""
    return [_form(row) for row in rows("decoys.jsonl") if (row["lang"] == "zh") == chinese]


def _filled(rng: random.Random, text: str, values: dict[str, str]) -> str:
    made = expand(parse(text), rng, lambda key: values.get(key, f"[{key}]"))
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", re.sub(r"  +", " ", made)).strip()


@dataclass
class Drawn:
    """A sentence with its values."""

    form: Form
    said: str
    values: dict[str, Value]

    @property
    def shown(self) -> dict[str, str]:
        """The values as texts."""
        return {key: str(value) for key, value in self.values.items()}


def drawn(rng: random.Random, chinese: bool, named: bool) -> Drawn:
    """A sentence with two values of a kind; `named` wants people told by their names alone."""
    form = rng.choice(forms(chinese))
    values: dict[str, Value] = {}
    for key, part in ((key, part) for key, part in form.parts.items() if part.field.kind):
        kind = part.field.kind
        if named and kind in ("who", "zh_who"):
            kind = "person" if kind == "who" else "zhw_name"
        while key not in values or values[key] in [v for k, v in values.items() if k != key]:
            values[key] = (
                rng.randint(part.field.low, part.field.high) if kind == "int" else (OWN.get(kind) or KINDS[kind])(rng)
            )
    template = rng.choice(form.says)
    said = _filled(rng, template, {key: str(value) for key, value in values.items()})
    told = {key: value for key, value in values.items() if str(value) in said}
    # Where JSON is asked for, a value that opens the sentence is told as it is.
    as_it_is = chinese or (named and template[0] in "[{")
    made = Drawn(form, said if as_it_is else sentence(said, ""), told)
    return drawn(rng, chinese, named) if is_remark(made.said) or is_happening(made.said) else made


def _pairs(rng: random.Random, made: Drawn, chinese: bool) -> list[tuple[str, str, str, str]]:
    """For each value that is told: its key, a question, the answer, and what an answer must hold."""
    out = []
    for key, part in made.form.parts.items():
        for question in part.asks if key in made.values or not part.field.kind else ():
            asked, told = _filled(rng, question, made.shown), _filled(rng, part.tell, made.shown)
            value = str(made.values.get(key, ""))
            if "[" in asked + told or (value and value in asked) or is_remark(f"{asked}?"):
                continue
            seen = turned_zh if chinese else turned
            must = re.escape(seen(value)) if chinese else whole(seen(value)) if value else re.escape(seen(told))
            out.append((key, asked, seen(told), must))
    return out


SAID_ZH = ["", "", "", "记住，", "告诉你，", "对了，", "我想说，"]
ASKED_ZH = ["", "", "", "请问，", "那么，", "我忘了，", "告诉我，"]


def _conversation(rng: random.Random, made: Drawn, pair: tuple[str, str, str, str], once: bool, chinese: bool) -> Case:
    """The sentence, and a question for it in the same breath or after an answer."""
    _, question, answer, must = pair
    if chinese:
        said, asked = f"{rng.choice(SAID_ZH)}{made.said}。", f"{rng.choice(ASKED_ZH)}{question}？"
        reply, answer = f"{rng.choice(HEARD)}{rng.choice(HEARD_REST)}。", f"{answer}。"
    else:
        said, asked = made.said + ".", sentence(question, "?")
        reply, answer = heard(rng), sentence(answer)
    if once:
        messages = [{"role": "user", "content": said + ("" if chinese else " ") + asked}]
    else:
        messages = [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
        messages.append({"role": "user", "content": asked})
    return Case(suite="memory_note", messages=[*messages, {"role": "assistant", "content": answer}], must=must)


def decoy_note(rng: random.Random, chinese: bool = False) -> Case:
    """A remark with two of a kind and a question for one; the next draw is the same remark and another question."""
    if twin := kept(rng, f"decoy_note/{chinese}"):
        return twin
    made, pairs = drawn(rng, chinese, False), []
    while not (pairs := _pairs(rng, made, chinese)):
        made = drawn(rng, chinese, False)
    once = rng.random() < 0.5
    first = rng.choice(pairs)
    if others := [pair for pair in pairs if pair[0] != first[0]]:
        keep(rng, f"decoy_note/{chinese}", _conversation(rng, made, rng.choice(others), once, chinese))
    return _conversation(rng, made, first, once, chinese)


def _asked(rng: random.Random, made: Drawn, told: Told, wanted: list[str]) -> Case:
    fields: dict[str, Value] = {key: made.values[field] for field, key in keyed(rng, told, wanted).items()}
    user = request_of(rng, told.text, fields)
    return ask(user, json.dumps(fields, ensure_ascii=False), "json_own", "", check="json", expect=fields)


def decoy_json(rng: random.Random) -> Case:
    """Some values of such a sentence as JSON; where one is wanted, the next draw wants another of it."""
    if twin := kept(rng, "decoy_json"):
        return twin
    chinese = rng.random() < 0.35
    made = drawn(rng, chinese, True)
    named = [key for key in made.values if made.form.parts[key].field.names]
    parts = {key: made.form.parts[key].field for key in named}
    if not named:
        return decoy_json(rng)
    told = Told(Scene("decoy", parts, [], [], ([], [])), made.said + ("。" if chinese else "."), made.values)
    rng.shuffle(named)
    count = 1 if rng.random() < 0.55 else rng.randint(1, len(named))
    if count == 1 and len(named) > 1:
        keep(rng, "decoy_json", _asked(rng, made, told, named[1:2]))
    return _asked(rng, made, told, named[:count])
