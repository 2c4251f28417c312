"""Extraction, labels and text transforms. Owns: JSON, CSV, yes-no, sentiment, sorting, repeating. Knows no tokens."""

from __future__ import annotations

import json
import random
import re

from authored_data import fill, load, wording
from render import Case
from skill_chat import person, value_of
from skill_facts import ask
from vocabulary import invented, word

PREDICATES: dict[str, list[str]] = {
    "age": ["is [v]", "is [v] years old", "turned [v]", "is now [v] years of age"],
    "city": ["lives in [v]", "comes from [v]", "is from [v]", "moved to [v]"],
    "job": ["works as a [v]", "is a [v]", "has a job as a [v]"],
    "hobby": ["likes [v]", "enjoys [v]", "loves [v]"],
    "colour": ["prefers the colour [v]", "likes the colour [v]"],
    "food": ["likes to eat [v]", "orders [v]"],
    "animal": ["has a [v]", "owns a [v]"],
    "drink": ["drinks [v]", "likes to drink [v]"],
    "price": ["paid [v] euros", "spent [v] euros"],
    "month": ["was born in [v]", "has a birthday in [v]"],
}
KEY_NAMES = {
    "age": "age",
    "city": "city",
    "job": "job",
    "hobby": "hobby",
    "colour": "colour",
    "food": "food",
    "animal": "pet",
    "drink": "drink",
    "price": "price",
    "month": "month",
}


def listed(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _value(rng: random.Random, key: str, held: bool) -> str | int:
    if key in ("age", "price"):
        return rng.randint(3, 99) if key == "age" else rng.randint(1, 500)
    return value_of(rng, key, held)


def plain_record(rng: random.Random, held: bool) -> tuple[str, dict[str, object]]:
    """A sentence on a person with its fields."""
    name = person(rng, held)
    keys = rng.sample(list(PREDICATES), rng.choice([1, 1, 1, 2, 2, 3, 4]))
    fields: dict[str, object] = {"name": name}
    clauses = []
    for key in keys:
        value = _value(rng, key, held)
        fields[KEY_NAMES[key]] = value
        clauses.append(rng.choice(PREDICATES[key]).replace("[v]", str(value)))
    return f"{name} {listed(clauses)}.", fields


def _odd_record(rng: random.Random) -> tuple[str, dict[str, object]]:
    fields: dict[str, object] = {}
    for _ in range(rng.randint(1, 4)):
        key = word(rng, "param", False) if rng.random() < 0.6 else rng.choice(load().words["thing"]).replace(" ", "_")
        value = rng.choice(load().words["objadj"]) if rng.random() < 0.6 else word(rng, "any", False)
        fields[key] = rng.randint(0, 999) if rng.random() < 0.5 else value
    return "The " + listed([f"{k} is {v}" for k, v in fields.items()]) + ".", fields


def json_record(rng: random.Random, held: bool) -> Case:
    """Fields of a sentence as a JSON object."""
    text, fields = plain_record(rng, held) if rng.random() < 0.7 else _odd_record(rng)
    if rng.random() < 0.35:
        plain_record(rng, held)
        text = rng.choice([f"{rng.choice(['It is a [w] day.', 'Today is [d].'])} {text}", text])
        text = fill(text.replace("[w]", "[weather]").replace("[d]", "[day]"), rng, {})
    keys = list(fields)
    if len(keys) > 2 and rng.random() < 0.4:
        keys = rng.sample(keys, rng.randint(2, len(keys)))
    picked = {k: fields[k] for k in keys}
    user = wording("json", rng, held, {"k": listed(keys) if rng.random() < 0.8 else ", ".join(keys), "s": text})
    return ask(user, json.dumps(picked, ensure_ascii=False), "json", "", check="json", expect=picked)


def json_nested(rng: random.Random, held: bool) -> Case:
    """A person with a pet as a nested object."""
    name, pet, kind, age = person(rng, held), person(rng, held), rng.choice(load().words["animal"]), rng.randint(1, 20)
    value = {"name": name, "pet": {"kind": kind, "name": pet, "age": age}}
    text = rng.choice(
        [
            f"{name} has a {kind} named {pet}, who is {age}.",
            f"{name} owns a {kind}. It is called {pet} and is {age} years old.",
        ]
    )
    return ask(
        rng.choice(
            [
                f"Extract name and pet (kind, name, age) as JSON: {text}",
                f"JSON with name and a nested pet object: {text}",
            ]
        ),
        json.dumps(value, ensure_ascii=False),
        "json_nested",
        "",
        check="json",
        expect=value,
    )


def json_names(rng: random.Random, held: bool) -> Case:
    """The names of a sentence as an array."""
    names = [person(rng, held) for _ in range(rng.randint(1, 5))]
    names = list(dict.fromkeys(names))
    did = fill("{went {home|to [city]}|played [hobby]|ate [food]|met {in|near} [place]|sang|saw a [animal]}", rng, {})
    user = wording("json_names", rng, held, {"s": f"{listed(names)} {did}."})
    return ask(user, json.dumps(names, ensure_ascii=False), "json_list", "", check="json", expect=names)


def csv_record(rng: random.Random, held: bool) -> Case:
    """Fields of a sentence as one CSV line."""
    text, fields = plain_record(rng, held)
    user = wording("csv", rng, held, {"k": listed(list(fields)), "s": text})
    line = ",".join(str(v) for v in fields.values())
    return ask(user, line, "csv", f"^{re.escape(line)}$")


GOOD = "{I love this [thing].|What a {wonderful|great|lovely} {day|[thing]|film}!|The [food] was {delicious|very good|excellent}.|I am so happy with the [thing].|It works {perfectly|very well}.|The {staff|teacher|[job]} was {kind|friendly and helpful}.|Best [food] I ever had.|I really enjoyed the {trip|show|book}.|This made me smile.|A great gift, thank you!}"  # noqa: E501
BAD = "{I hate this [thing].|What a {terrible|bad|boring} {day|[thing]|film}!|The [food] was {cold|awful|burnt}.|I am very unhappy with the [thing].|It broke after {one|two} days.|The {staff|teacher|[job]} was {rude|unfriendly}.|Worst [food] I ever had.|I did not like the {trip|show|book}.|This made me angry.|A waste of money.}"  # noqa: E501


def sentiment(rng: random.Random, held: bool) -> Case:
    """Positive or negative."""
    label = rng.choice(["positive", "negative"])
    text = fill(GOOD if label == "positive" else BAD, rng, {})
    return ask(wording("sentiment", rng, held, {"s": text}), label.capitalize() + ".", "sentiment", f"^{label}")


YES_NO = {
    "city": ("Does [n] live in [v]?", "Is [n] from [v]?"),
    "job": ("Is [n] a [v]?", "Does [n] work as a [v]?"),
    "hobby": ("Does [n] like [v]?", "Does [n] enjoy [v]?"),
    "animal": ("Does [n] have a [v]?", "Does [n] own a [v]?"),
}


def yes_no(rng: random.Random, held: bool) -> Case:
    """A question on one stated fact; in training often several, on one or two facts, in one conversation.

    In training some values are among a dozen, and some answers name the fact: whether two words are equal is
    hard to find out from one mark at the end, and easier once the fact is copied.
    """
    name = person(rng, held)
    short = not held and rng.random() < 0.4

    def value(key: str) -> str:
        # A dozen seeds make a dozen values.
        return str(_value(random.Random(rng.randrange(12)) if short else rng, key, held))

    keys = ["city", "job", "hobby", "animal"]
    facts = {k: value(k) for k in rng.sample(keys, 1 if held else rng.choice([1, 1, 2, 3]))}
    text = f"{name} {listed([rng.choice(PREDICATES[k][:2]).replace('[v]', v) for k, v in facts.items()])}."
    messages: list[dict] = []
    label = "Yes"
    for turn in range(1 if held or rng.random() < 0.3 else rng.randint(2, 6)):
        key = rng.choice(list(facts))
        asked = facts[key] if rng.random() < 0.5 else value(key)
        label = "Yes" if asked == facts[key] else "No"
        form = YES_NO[key][0] if held else rng.choice(YES_NO[key])
        question, answer = form.replace("[n]", name).replace("[v]", asked), f"{label}."
        if not held and rng.random() < 0.35:
            question += rng.choice([" Say why.", " Give the reason.", " Name the fact."])
            answer = f"{label}, {name} {PREDICATES[key][0].replace('[v]', facts[key])}."
        user = wording("yesno", rng, held, {"s": text, "q": question}) if turn == 0 else question
        messages += [{"role": "user", "content": user}, _decided(answer)]
    return Case(suite="yes_no", messages=messages, must=f"^{label}")


def _decided(answer: str) -> dict:
    """A yes-no answer: one mark is all that it teaches, so it weighs more than its length."""
    return {"role": "assistant", "content": answer, "weight": 3.0 if len(answer) < 5 else 1.0}


MEMBER = ["Is [w] in the list?", "Is [w] one of them?", "Does the list hold [w]?", "Is [w] there?"]


def membership(rng: random.Random) -> Case:
    """Whether a word is in a short list, or two words are equal: the bare skill under a yes-no question on a fact."""
    words = load().words
    pool = words[rng.choice(["animal", "fruit", "hobby", "job", "colour", "thing", "name"])]

    def some() -> str:
        return invented(rng) if rng.random() < 0.15 else rng.choice(pool)

    listing = [some() for _ in range(rng.randint(1, 6))]
    title = rng.choice(["The list is", "List:", "Words:", "These are the words:", "I have", "Here are"])
    text = f"{title} {listed(listing)}."
    messages: list[dict] = []
    label = "Yes"
    for turn in range(rng.randint(1, 6)):
        asked = rng.choice(listing) if rng.random() < 0.5 else some()
        while asked not in listing and asked in text:
            asked = some()  # part of a longer entry: neither in the list nor out of it
        label = "Yes" if asked in listing else "No"
        question = rng.choice(
            ["Is {w} in the list?", "Is {w} one of them?", "Does the list hold {w}?", "Is {w} there?"]
        )
        question = question.replace("{w}", asked)
        user = wording("yesno", rng, False, {"s": text, "q": question}) if turn == 0 else question
        messages += [{"role": "user", "content": user}, _decided(f"{label}.")]
    return Case(suite="membership", messages=messages, must=f"^{label}")


def _words(rng: random.Random, low: int, high: int) -> list[str]:
    words = load().words
    pool = [*words["animal"], *words["fruit"], *words["thing"][:50], *words["colour"]]
    count = rng.randint(low, high)
    chosen = rng.sample(pool, count)
    return [w for w in dict.fromkeys(chosen) if " " not in w]


def transform(rng: random.Random, held: bool) -> Case:
    """Repeat, sort, count, reverse or upper-case a few words."""
    kind = rng.choice(["repeat", "repeat", "upper", "sort", "sortnum", "countw", "reverse"])
    if kind == "repeat":
        text = fill(
            "{this is a {test|[thing]|[objadj] [thing]}|hello {world|[name]}|[name] {likes|has} [food]|the [animal] is [colour]|"  # noqa: E501
            "[fruit.pl] and [fruit.pl]|I am {happy|a [kind]}|good {morning|night} [name]|[num] [objadj] [thing]s}",
            rng,
            {},
        )
        if rng.random() < 0.3:
            text += " " + invented(rng)
        return ask(
            wording("repeat", rng, held, {"s": text}), text[0].upper() + text[1:] + ".", "repeat", re.escape(text)
        )
    if kind == "sortnum":
        numbers = [rng.randint(0, 99) for _ in range(rng.randint(2, 5))]
        user = wording("sortnum", rng, held, {"s": ", ".join(map(str, numbers))})
        return ask(user, ", ".join(map(str, sorted(numbers))), "transform", "^" + ", ".join(map(str, sorted(numbers))))
    words = _words(rng, 2, 6)
    text = ", ".join(words)
    answer = {
        "upper": text.upper(),
        "sort": ", ".join(sorted(words)),
        "countw": f"There are {len(words)} words.",
        "reverse": ", ".join(reversed(words)),
    }[kind]
    if kind == "countw" and len(words) == 1:
        answer = "There is 1 word."
    return ask(wording(kind, rng, held, {"s": text}), answer, "transform", "^" + re.escape(answer))


def extraction(rng: random.Random, held: bool = False) -> Case:
    """Any extraction task in the shares of the mixture."""
    pick = rng.random()
    if pick < 0.38:
        return json_record(rng, held)
    if pick < 0.47:
        return json_names(rng, held)
    if pick < 0.51:
        return json_nested(rng, held)
    if pick < 0.55:
        return csv_record(rng, held)
    if pick < 0.61:
        return sentiment(rng, held)
    if pick < 0.7 and not held:
        return membership(rng)
    return yes_no(rng, held)
