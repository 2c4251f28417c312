"""Free requests for JSON. Owns: records told in any words, with keys named in passing. Knows no tokens.

Every value is a span of the request and every key is written in it; which belongs to which is said by the meaning of
the key, by its order, or by the key itself beside its value.
"""

from __future__ import annotations

import json
import random
import re

from authored_data import load
from phrasing import any_words, occasion
from render import Case
from skill_chat import person
from skill_facts import ask
from skill_keys import ALIASES, alias, key_name, spoken
from verbs import thing
from vocabulary import any_sign, invented, word

Value = str | int | float | bool


def clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23)}:{rng.choice(['00', '15', '30', '45', '05'])}"


def span(rng: random.Random) -> str:
    """A few words that only copying gives back."""
    words = [word(rng, rng.choice(["noun", "any"]), False) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    return " ".join(words) if rng.random() < 0.5 else " ".join(w.capitalize() for w in words)


def code_of(rng: random.Random) -> str:
    return (
        "".join(rng.choice("ABCDEFGHKLMNPRSTVWX") for _ in range(rng.randint(1, 3)))
        + rng.choice(["", "-"])
        + str(rng.randint(1, 9999))
    )


# Field: the keys that mean it, the predicates that tell it of a person (P) or a thing (T), and its value.
PERSON: dict[str, tuple[list[str], list[str]]] = {
    "age": (ALIASES["age"], ["is [v]", "is [v] years old", "turned [v]", "is aged [v]", "just became [v]"]),
    "city": (ALIASES["city"], ["lives in [v]", "is from [v]", "comes from [v]", "moved to [v]", "is based in [v]"]),
    "job": (ALIASES["job"], ["works as a [v]", "is a [v]", "earns a living as a [v]", "has a job as a [v]"]),
    "hobby": (ALIASES["hobby"], ["likes [v]", "loves [v]", "enjoys [v]", "is into [v]", "spends Sundays on [v]"]),
    "instrument": (["instrument", "plays", "musical_instrument"], ["plays the [v]", "is learning the [v]"]),
    "language": (["language", "speaks", "mother_tongue", "lang"], ["speaks [v]", "talks in [v]"]),
    "pet": (ALIASES["pet"], ["has a [v]", "owns a [v]", "keeps a [v]"]),
    "drink": (ALIASES["drink"], ["drinks [v]", "ordered [v]", "would like [v]"]),
    "month": (ALIASES["month"], ["was born in [v]", "has a birthday in [v]"]),
    "room": (["room", "roomNumber", "room_no"], ["is in room [v]", "has room [v]", "stays in room [v]"]),
    "email": (
        ["email", "mail", "e_mail", "emailAddress"],
        ["can be reached at [v]", "writes from [v]", "has the address [v]"],
    ),
    "phone": (["phone", "tel", "phoneNumber", "mobile"], ["has the number [v]", "can be called on [v]"]),
    "children": (["children", "kids", "childCount"], ["has [v] children", "is the parent of [v] kids"]),
}
THING: dict[str, tuple[list[str], list[str]]] = {
    "price": (["price", "cost", "amount", "euros", "priceEur"], ["costs [v] euros", "is [v] dollars", "sells for [v]"]),
    "colour": (ALIASES["colour"], ["is [v]", "comes in [v]", "is painted [v]"]),
    "weight": (["weight", "kg", "weight_kg", "mass"], ["weighs [v] kilos", "weighs [v] kg", "has [v] kg"]),
    "year": (
        ["year", "built", "published", "since", "yearMade"],
        ["was made in [v]", "is from [v]", "came out in [v]"],
    ),
    "city": (["city", "place", "location", "where"], ["is in [v]", "stands in [v]", "was sold in [v]"]),
    "count": (["count", "quantity", "stock", "pieces", "units"], ["is there [v] times", "comes in packs of [v]"]),
    "owner": (["owner", "belongs_to", "holder"], ["belongs to [v]", "is owned by [v]", "is the property of [v]"]),
    "author": (["author", "writer", "maker", "by"], ["was written by [v]", "is by [v]", "was made by [v]"]),
    "code": (["code", "sku", "id", "ref", "serial"], ["has the code [v]", "is listed under [v]", "is number [v]"]),
    "day": (["day", "weekday", "date"], ["takes place on [v]", "is on [v]", "arrives on [v]"]),
    "time": (["time", "start", "hour", "starts_at"], ["starts at [v]", "is at [v]", "begins at [v]"]),
    "height": (["height", "heightCm", "cm", "tall"], ["is [v] cm high", "measures [v] cm"]),
}
HEADS_P = ["name", "name", "who", "person", "fullName", "user", "customer", "first_name", "student", "employee"]
HEADS_T = ["name", "item", "product", "title", "thing", "article", "what", "label", "object", "kind"]


def _value(rng: random.Random, kind: str) -> Value:
    w = load().words
    if kind in ("job", "hobby", "instrument", "drink", "month", "day", "colour", "pet"):
        if kind not in ("month", "day") and rng.random() < 0.15:
            return invented(rng)
        return rng.choice(w["animal" if kind == "pet" else kind])
    if kind == "language":
        return rng.choice(w["lang"])
    if kind == "city":
        return rng.choice(load().countries)["capital"] if rng.random() < 0.7 else invented(rng).capitalize()
    if kind in ("owner", "author"):
        return person(rng, False) + (f" {invented(rng).capitalize()}" if rng.random() < 0.4 else "")
    if kind == "email":
        return f"{invented(rng)}@{invented(rng)}.{rng.choice(['com', 'org', 'net', 'de', 'io'])}"
    if kind == "phone":
        return "".join(str(rng.randint(0, 9)) for _ in range(rng.randint(4, 9)))
    if kind == "code":
        return code_of(rng)
    if kind == "time":
        return clock(rng)
    if kind == "price" and rng.random() < 0.25:
        return round(rng.randint(1, 99) + rng.choice([0.5, 0.25, 0.99, 0.75]), 2)
    top = {"age": 99, "year": 2024, "children": 9, "weight": 200, "height": 300, "count": 99}.get(kind, 999)
    return rng.randint(1800 if kind == "year" else 1, top)


def _key(rng: random.Random, names: list[str], kind: str) -> str:
    """A key for a field: its plain name mostly, or another that means it."""
    if rng.random() < 0.3 and kind in ALIASES:
        return alias(rng, kind)
    key = names[0] if rng.random() < 0.4 else rng.choice(names)
    return key.upper() if rng.random() < 0.06 else key


def record(rng: random.Random) -> tuple[str, list[str], dict[str, Value], bool]:
    """A subject with its predicates and the fields under their keys; whether it is a person."""
    human = rng.random() < 0.6
    table = PERSON if human else THING
    if human:
        subject = person(rng, False) + (f" {invented(rng).capitalize()}" if rng.random() < 0.2 else "")
    else:
        subject = thing(rng, "the").split(" ", 1)[1] if rng.random() < 0.8 else span(rng)
    fields: dict[str, Value] = {rng.choice(HEADS_P if human else HEADS_T): subject}
    says = []
    for kind in rng.sample(list(table), rng.choice([1, 1, 2, 2, 3, 4])):
        names, forms = table[kind]
        key, value = _key(rng, names, kind), _value(rng, kind)
        if key in fields or value in fields.values():
            continue
        fields[key] = value
        text = rng.choice(forms).replace("[v]", str(value))
        says.append(re.sub(r"\ba (?=[aeiou])", "an ", text) if str(value)[0] in "aeiou" else text)
    return subject, says, fields, human


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


DO = ["Give me", "Make", "Write", "I need", "Return", "Create", "Can I have", "Please send", "I'd like", "Build"]
DO += [
    "Could you make",
    "Show",
    "Put together",
    "Turn this into",
    "Can you write",
    "Now",
    "Output",
    "",
    "Just",
    "Get me",
]
WHAT = ["JSON", "a JSON", "json", "a JSON object", "some JSON", "a small JSON", "a JSON record", "an object (JSON)"]
WHAT += ["the JSON", "a JSON entry", "one JSON object", "JSON data", "valid JSON", "a json object"]
WITH = ["with [k]", "with [k]", "with the keys [k]", "with the fields [k]", "that has [k]", "holding [k]", "using [k]"]
WITH += ["having [k]", "([k])", "containing [k]", "with keys [k]", "whose keys are [k]", "having only [k]", ": [k]"]
WITH += ["with [k] in it", "with just [k]", "where the keys are [k]", "made of [k]", "[k]", "with [k] as keys"]
FOR_P = [
    " for [n], who [c]",
    " about [n], who [c]",
    ": [n] [c]",
    ". [n] [c]",
    " for this person: [n] [c]",
    " from: [n] [c]",
]
FOR_P += [" of [n], who [c]", " describing [n] who [c]", " for [n] ([n] [c])", " - [n] [c]", " from this. [N] [c]"]
FOR_T = [" for the [n], which [c]", " about a [n] that [c]", ": the [n] [c]", ". The [n] [c]", " for a [n] that [c]"]
FOR_T += [
    " of the [n] which [c]",
    " from: the [n] [c]",
    " for our [n]. It [c]",
    " - the [n] [c]",
    " describing a [n] that [c]",
]


def _keys_shown(rng: random.Random, keys: list[str]) -> str:
    if rng.random() < 0.2:
        mark = rng.choice(['"', "'", "`"])
        keys = [f"{mark}{k}{mark}" for k in keys]
    return ", ".join(keys) if rng.random() < 0.25 else _and(keys)


def _order(rng: random.Random, shown: str, begun: bool = False) -> str:
    """The order with its keys; one that is begun needs no verb."""
    link = rng.choice(WITH)
    if rng.random() < 0.2:
        link = " ".join(any_words(rng, rng.randint(1, 3))) + " [k]"
    what, do = rng.choice(WHAT), "" if begun else rng.choice(DO)
    joint = "" if link[0] == ":" else " "
    return f"{do} {what}{joint}{link}".strip().replace("[k]", shown)


def _asked(rng: random.Random) -> tuple[str, dict[str, Value]]:
    """The order names the keys and the sentence tells the values by their meaning."""
    subject, says, fields, human = record(rng)
    keys = list(fields)
    if len(keys) > 2 and rng.random() < 0.3:
        keys = rng.sample(keys, rng.randint(1, len(keys)))
    order, told = _order(rng, _keys_shown(rng, keys)), _and(says) if says else "is here"
    picked = {k: fields[k] for k in keys}
    pick = rng.random()
    if pick < 0.25:
        lead = subject if human else f"The {subject}"
        order = order[0].lower() + order[1:] if rng.random() < 0.3 else order
        return f"{lead} {told}. {order}{rng.choice(['.', '', ' please.', '?'])}", picked
    if pick < 0.35:
        lead = subject if human else f"The {subject}"
        before = occasion(rng) + " " if rng.random() < 0.6 else ""
        return f"{order}:\n{before}{lead} {told}.{'' if before else ' ' + occasion(rng)}", picked
    form = rng.choice(FOR_P if human else FOR_T)
    text = order + form.replace("[n]", subject).replace("[N]", subject).replace("[c]", told)
    return text + rng.choice([".", ".", "", ", please"]), picked


PAIR = [
    "[k] [v]",
    "[k] is [v]",
    "[k]: [v]",
    "[k]=[v]",
    "[k] = [v]",
    "the [k] is [v]",
    "[k] should be [v]",
    "[v] as [k]",
]
PAIR += ["[v] for [k]", "set [k] to [v]", "[k] [v]", "[k] -> [v]", "[k] equal to [v]", "[k] being [v]", "[v] under [k]"]
PAIRED = [
    "[d] [w] with [p]",
    "[d] [w]: [p]",
    "[p] - [d] [w]",
    "[p]. [d] [w]",
    "[d] [w] where [p]",
    "[w]: [p]",
    "[p] as JSON",
]
PAIRED += [
    "[d] [w] for a [e] with [p]",
    "[d] [w] of a [e]: [p]",
    "[d] [w] in which [p]",
    "[p], as JSON",
    "[p] in JSON, please",
]
PAIRED += ["We have a [e]: [p]. [d] [w]", "[e] as JSON: [p]", "[d] [w] saying [p]"]


def _free_value(rng: random.Random) -> Value:
    pick = rng.random()
    if pick < 0.3:
        return rng.randint(0, rng.choice([9, 99, 999, 9999]))
    if pick < 0.38:
        return rng.random() < 0.5
    if pick < 0.44:
        return round(rng.randint(0, 99) + rng.randint(1, 99) / 100, 2)
    if pick < 0.7:
        return span(rng)
    if pick < 0.8:
        return person(rng, False)
    kind = rng.choice(["city", "colour", "code", "email", "time", "day", "job", "author"])
    return _value(rng, kind)


def _said(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _own(rng: random.Random) -> str:
    """A key of one's own: a word, or one in any spelling."""
    return word(rng, rng.choice(["param", "noun", "any"]), False) if rng.random() < 0.55 else key_name(rng, False)


def _free_fields(rng: random.Random, most: int) -> dict[str, Value]:
    fields: dict[str, Value] = {}
    for _ in range(rng.randint(1, most)):
        key = _own(rng)
        if spoken(key) not in map(spoken, fields):
            fields[key] = _free_value(rng)
    return fields


def _paired(rng: random.Random) -> tuple[str, dict[str, Value]]:
    """Each key stands beside its value."""
    fields = record(rng)[2] if rng.random() < 0.35 else _free_fields(rng, 5)
    form, out = rng.choice(PAIR), []
    for key, value in fields.items():
        shape = form if rng.random() < 0.75 else rng.choice(PAIR)
        said = f'"{value}"' if isinstance(value, str) and rng.random() < 0.15 else _said(value)
        out.append(re.sub(r"\[([kv])\]", lambda m, k=key, s=said: k if m[1] == "k" else s, shape))
    told = _and(out) if rng.random() < 0.6 else rng.choice([", ", "; ", "\n"]).join(out)
    values = {"d": rng.choice(DO), "w": rng.choice(WHAT), "p": told, "e": word(rng, "noun", False)}
    text = re.sub(r"\[([dwpe])\]", lambda m: values[m[1]], rng.choice(PAIRED)).strip()
    spans = (*fields, *(_said(v) for v in fields.values()))
    return text if text.startswith(spans) else text[0].upper() + text[1:], fields


ROWS = ["[o] for [v]", "[o] from [v]", "[v]. [o]", "[o]: [v]", "[v] as [o]", "Put [v] into [o]", "Turn [v] into [o]"]
ROWS += [
    "[o]. The values are [v]",
    "[o], the values being [v]",
    "[o] (values: [v])",
    "Make [v] [o]",
    "Here: [v]. [o] in that order",
]


def _ordered(rng: random.Random) -> tuple[str, dict[str, Value]]:
    """Keys and values stand in two rows of one order."""
    fields = _free_fields(rng, 4)
    values = _and([_said(v) for v in fields.values()]) if rng.random() < 0.6 else ", ".join(map(_said, fields.values()))
    form = rng.choice(ROWS)
    order = _order(rng, _keys_shown(rng, list(fields)), form.startswith(("Put", "Turn", "Make")))
    low = order[0].lower() + order[1:]
    text = re.sub(r"\[([ov])\]", lambda m: values if m[1] == "v" else order if m.start() == 0 else low, form)
    return text + rng.choice([".", "", " please"]), fields


def _array(rng: random.Random) -> tuple[str, dict | list]:
    """A row of things as an array, bare or under a key."""
    items = list(
        dict.fromkeys(span(rng) if rng.random() < 0.5 else person(rng, False) for _ in range(rng.randint(1, 5)))
    )
    row = _and(items)
    if rng.random() < 0.45:
        forms = ["A JSON array of [v]", "[v] as a JSON array", "Make a JSON list: [v]", "Give me [v] as JSON list"]
        forms += ["JSON array please: [v]", "Turn [v] into a JSON array", "List [v] in a JSON array"]
        return rng.choice(forms).replace("[v]", row), items
    key, fields = _own(rng), {}
    if rng.random() < 0.5:
        other = _own(rng)
        fields = {other: _free_value(rng)} if spoken(other) != spoken(key) else {}
    shown = "".join(f"{k} {_said(v)} and " for k, v in fields.items())
    forms = [f"{rng.choice(DO)} {rng.choice(WHAT)} with {shown}a list {key}: {row}"]
    forms += [f"{rng.choice(DO)} {rng.choice(WHAT)} with {shown}{key} as an array of {row}"]
    forms += [f"{rng.choice(WHAT)}: {shown}{key} is the list {row}", f"JSON where {shown}{key} holds the array {row}"]
    return rng.choice(forms).strip(), {**fields, key: items}


ZH_KEYS = {
    "name": "zhname",
    "姓名": "zhname",
    "hobby": "zhhobby",
    "爱好": "zhhobby",
    "food": "zhfood",
    "食物": "zhfood",
}
ZH_KEYS |= {
    "age": "",
    "年龄": "",
    "city": "city",
    "城市": "city",
    "item": "zhthing",
    "物品": "zhthing",
    "价格": "",
    "price": "",
}
ZH_SAYS = {
    "name": "[v]",
    "hobby": "喜欢[v]",
    "food": "爱吃[v]",
    "age": "[v]岁",
    "city": "住在[v]",
    "item": "买了[v]",
    "price": "花了[v]元",
}
ZH_SAME = {
    "姓名": "name",
    "爱好": "hobby",
    "食物": "food",
    "年龄": "age",
    "城市": "city",
    "物品": "item",
    "价格": "price",
}
ZH_DO = ["给我一个JSON，包含[k]：[s]", "用JSON写出[k]：[s]", "[s]请用JSON表示[k]。", "把这句话变成JSON，键是[k]：[s]"]
ZH_DO += [
    "[s]我要JSON，字段[k]",
    "请输出JSON（[k]）：[s]",
    "JSON，[k]。[s]",
    "做一个有[k]的JSON：[s]",
    "[s]生成JSON，键为[k]。",
]


def _chinese(rng: random.Random) -> tuple[str, dict[str, Value]]:
    """A Chinese sentence on a person, its keys in Chinese or English."""
    own = rng.random() < 0.5
    fields: dict[str, Value] = {}
    told = []
    for kind in ["name", *rng.sample(["hobby", "food", "age", "city", "item", "price"], rng.randint(1, 3))]:
        key = next(z for z, e in ZH_SAME.items() if e == kind) if own else kind
        listing = ZH_KEYS[key]
        value: Value = rng.randint(2, 99)
        if listing:
            value = (
                rng.choice(load().countries)["capital_zh"] if listing == "city" else rng.choice(load().words[listing])
            )
            value = any_sign(rng) + any_sign(rng) if rng.random() < 0.2 else value
        fields[key] = value
        told.append(ZH_SAYS[kind].replace("[v]", str(value)))
    sentence = "，".join([told[0] + told[1], *told[2:]]) + "。"
    return rng.choice(ZH_DO).replace("[k]", rng.choice(["、", "和", "，"]).join(fields)).replace(
        "[s]", sentence
    ), fields


def free_json(rng: random.Random) -> Case:
    """A free request for JSON of any kind."""
    make = rng.choices([_asked, _paired, _ordered, _array, _chinese], [40, 28, 14, 9, 9])[0]
    user, value = make(rng)
    while not value:
        user, value = make(rng)
    if make is not _chinese and rng.random() < 0.12:
        user = occasion(rng) + " " + user
    if rng.random() < 0.08:
        # Typed without capitals: keys and values are copied as they were typed.
        user, value = user.lower(), json.loads(json.dumps(value, ensure_ascii=False).lower())
    return ask(user, json.dumps(value, ensure_ascii=False), "json_free", "", check="json", expect=value)
