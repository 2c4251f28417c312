"""Scenes. Owns: small happenings with named parts, told in sentences or asked for as orders. Knows no task.

A scene has fields. Each has a kind of value and several names, of which a key is made in any spelling; sentences hold
the values among other words, so that only the meaning of a name says which words are its value, and where they end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from authored_data import load, rows
from skill_chat import person
from skill_zh import is_animal
from story_parts_zh import name_zh, wide_noun
from usual_values import USUAL_KINDS
from verbs import thing
from vocabulary import LETTERS, any_sign, copied, invented, is_held, word

Value = str | int | float | bool | list[str]


@dataclass(frozen=True)
class Field:
    """A part of a scene: the kind of its value, its names, and how each value of an enumeration is said."""

    kind: str
    names: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()
    low: int = 1
    high: int = 999


@dataclass(frozen=True)
class Scene:
    """Sentences (`says`) and orders (`asks`) over fields, and how a tool for the orders may be called."""

    name: str
    fields: dict[str, Field]
    says: list[str]
    asks: list[str]
    tool: tuple[list[str], list[str]]
    near: str = ""
    """The scene whose tool is taken for this one's most easily."""


def _field(text: str) -> Field:
    kind, *names = text.split("|")
    kind, _, rest = kind.partition(":")
    usable = tuple(n for n in names if not any(map(is_held, n.split(" ")))) or tuple(names)
    if kind == "enum":
        pairs = (option.partition("=") for option in rest.split(","))
        return Field(kind, usable, tuple((value, said) for value, _, said in pairs))
    if kind == "int":
        low, _, high = rest.partition("-")
        return Field(kind, usable, (), int(low), int(high))
    return Field(kind if kind != "list" else f"list:{rest}", usable)


@lru_cache(maxsize=4)
def scenes(held: bool, orders: bool) -> list[Scene]:
    """The scenes of training or of the evaluation; `orders` asks for those that somebody can want done."""
    out = []
    for row in rows("scenes.jsonl"):
        if row.get("held", False) != held or not row.get("asks" if orders else "says"):
            continue
        names, does = row.get("tool", ["", ""])
        fields = {key: _field(text) for key, text in row["fields"].items()}
        tool = (names.split("|"), does.split("|"))
        out.append(Scene(row["scene"], fields, row["says"], row.get("asks", []), tool, row.get("near", "")))
    return out


NAME_FRONTS = "Ber Hal Mor Lin Oak Ros Schu Vand Kow Petr Mac Ols Har Tan Yam Ok Fer Gar Sil Cas Nov Dra Wil Bran Kel"
NAME_FRONTS += " Ab El Kir Mül Gon Mar San Wat Bel Cor Dun Fal Gru Hol Jan Lar Nor Pal Ric Sal Tho Ull Wer Zim Ash"
NAME_ENDS = "ger son man berg ski ova ez ini field wood ton ley en ic ak ura moto ford dt nes well gren ström ard is"
NAME_ENDS += " chi oni ello aga iev ing by ham er hart mann strom ov quist"
ORGS = "& Co|Ltd|GmbH|Inc.|Brothers|Group|Foods|Labs|& Sons|AG|Motors|Bakery|United|Rovers|City|Partners|Works|Media"
STREETS = ["Lane", "Street", "Road", "Avenue", "Way", "Alley", "Square", "Drive"]
SHOPS = [
    "station",
    "airport",
    "museum",
    "harbour",
    "hospital",
    "theatre",
    "stadium",
    "hotel",
    "zoo",
    "market",
    "library",
    "castle",
    "beach",
    "office",
]
ROOMS = [
    "kitchen",
    "nursery",
    "attic",
    "hall",
    "bathroom",
    "bedroom",
    "office",
    "garage",
    "cellar",
    "studio",
    "garden",
    "lounge",
    "hallway",
    "porch",
]
SPORTS = [
    "running",
    "yoga",
    "rowing",
    "swimming",
    "cycling",
    "tennis",
    "boxing",
    "climbing",
    "dancing",
    "hiking",
    "judo",
    "skating",
    "surfing",
    "golf",
]
BRANDS = [
    "Volvo",
    "Koga",
    "Fiat",
    "Honda",
    "Toyota",
    "Skoda",
    "Tesla",
    "Mazda",
    "Seat",
    "Opel",
    "Ford",
    "Audi",
    "Kia",
    "Saab",
    "Dacia",
    "Nissan",
    "Jeep",
    "Subaru",
]
REASONS = ["it expired", "nobody signed it", "the date is wrong", "it is broken", "the owner is away", "it was paid"]
REASONS += ["the price was wrong", "it arrived late", "the code does not match", "it is too old", "all is in order"]
DE_JOBS = [
    "Bäcker",
    "Lehrer",
    "Koch",
    "Arzt",
    "Maler",
    "Gärtner",
    "Pilot",
    "Schneider",
    "Tischler",
    "Richter",
    "Fahrer",
    "Musiker",
]
DE_JOBS += ["Ingenieurin", "Ärztin", "Lehrerin", "Köchin"]
FR_THINGS = [
    "livre",
    "vélo",
    "chapeau",
    "sac",
    "couteau",
    "manteau",
    "tapis",
    "miroir",
    "panier",
    "stylo",
    "piano",
    "vase",
]


def surname(rng: random.Random) -> str:
    """A family name put together, so that no list of names is learned."""
    if rng.random() < 0.25:
        return word(rng, "noun", False).capitalize()
    return rng.choice(NAME_FRONTS.split()) + rng.choice(NAME_ENDS.split())


def full_person(rng: random.Random) -> str:
    """A person as people write one: a first name, two names, or a title with a name."""
    pick = rng.random()
    if pick < 0.35:
        return person(rng, False)
    if pick < 0.85:
        return f"{person(rng, False)} {surname(rng)}"
    return f"{rng.choice(['Dr.', 'Mr', 'Mrs', 'Ms', 'Prof.', 'Dr'])} {surname(rng)}"


def titled(rng: random.Random) -> str:
    """A title of one to four words."""
    names = [word(rng, rng.choice(["noun", "any"]), False).capitalize() for _ in range(rng.choice([1, 2, 2, 3]))]
    if len(names) == 2 and rng.random() < 0.3:
        names.insert(1, rng.choice(["of", "and", "in the"]))
    return " ".join([rng.choice(["The", "A", "My"]), *names] if rng.random() < 0.3 else names)


def organisation(rng: random.Random) -> str:
    """A company or a team."""
    first = surname(rng) if rng.random() < 0.6 else word(rng, "any", False).capitalize()
    return first if rng.random() < 0.25 else f"{first} {rng.choice(ORGS.split('|'))}"


def date_of(rng: random.Random) -> str:
    """A date in one of its usual forms."""
    day, month, year = rng.randint(1, 28), rng.choice(load().words["month"]), rng.randint(1950, 2035)
    forms = [f"{day} {month}", f"{month} {day}", f"{year}-{rng.randint(1, 12):02d}-{day:02d}", f"{day} {month} {year}"]
    forms += [f"{day}.{rng.randint(1, 12)}.{year}", f"{day}.{rng.randint(1, 12)}.", f"the {day}th of {month}"]
    return rng.choice(forms if day > 3 else forms[:-1])


def when_of(rng: random.Random) -> str:
    """A day: of the week, a date, or a word."""
    return date_of(rng) if rng.random() < 0.4 else rng.choice([*load().words["day"], "tomorrow", "today"])


def clock_of(rng: random.Random) -> str:
    """A time of the day."""
    if rng.random() < 0.2:
        return f"{rng.randint(1, 12)}{rng.choice([' ', ''])}{rng.choice(['am', 'pm'])}"
    return f"{rng.randint(0, 23)}:{rng.choice(['00', '15', '30', '45', '05', '10', '20', '40', '50'])}"


def code(rng: random.Random) -> str:
    """Letters and digits without sense."""
    front = "".join(rng.choice(LETTERS.upper()) for _ in range(rng.randint(1, 3)))
    return front + rng.choice(["", "-", ""]) + "".join(str(rng.randint(0, 9)) for _ in range(rng.randint(2, 6)))


def some_words(rng: random.Random, most: int = 3) -> str:
    """Words that stand together as a topic or a text."""
    words = [word(rng, rng.choice(["noun", "any"]), False) for _ in range(rng.randint(1, most))]
    return " ".join(words)


def money(rng: random.Random) -> int | float:
    """A sum: round, or with cents."""
    if rng.random() < 0.65:
        return rng.randint(1, rng.choice([20, 99, 400, 3000]))
    return round(rng.randint(1, 400) + rng.choice([0.5, 0.25, 0.2, 0.99, 0.75, 0.4]), 2)


def phone(rng: random.Random) -> str:
    """Digits, in groups now and then."""
    groups = ["".join(str(rng.randint(0, 9)) for _ in range(rng.randint(2, 5))) for _ in range(rng.randint(1, 3))]
    return ("+" if rng.random() < 0.15 else "") + rng.choice([" ", " ", "-"]).join(groups)


def email(rng: random.Random) -> str:
    """An address of the net."""
    first = person(rng, False).lower() if rng.random() < 0.5 else invented(rng)
    first += f"{rng.choice('._-')}{invented(rng)}" if rng.random() < 0.35 else ""
    return f"{first}@{invented(rng)}.{rng.choice(['com', 'org', 'net', 'de', 'io', 'fr'])}"


def sentence(rng: random.Random) -> str:
    """A short message."""
    forms = [
        "running late, start without me",
        "I am at the [w]",
        "please bring the [w]",
        "the [w] is [v]",
        "see you [v]",
    ]
    forms += ["good night, my [w]", "no [w] today", "call me about the [w]", "happy [w]", "where is my [w], [v]"]
    forms += ["we need [v] and [w]", "do not forget the [w]", "[v] [w] [v]", "I found [w] in the [v]"]
    return re.sub(r"\[[wv]\]", lambda m: word(rng, "noun" if m[0] == "[w]" else "any", False), rng.choice(forms))


ZH_DAYS = "星期一 星期二 星期三 星期四 星期五 星期六 星期天 明天 后天 今天 下周一 周末"


def signs(rng: random.Random, count: int) -> str:
    """Chinese signs in no order, as a name or a title."""
    return "".join(any_sign(rng) for _ in range(count))


def bare_thing(rng: random.Random) -> str:
    """A thing without its article."""
    return thing(rng, "the").split(" ", 1)[1]


def listed(kind: str) -> Callable[[random.Random], str]:
    """Words of a list, now and then any other."""
    return lambda rng: invented(rng) if rng.random() < 0.12 else rng.choice(load().words[kind])


def any_of(options: list[str]) -> Callable[[random.Random], str]:
    """One of the options, now and then any word."""
    return lambda rng: word(rng, "noun", False) if rng.random() < 0.2 else rng.choice(options)


KINDS: dict[str, Callable[[random.Random], Value]] = {
    "person": full_person,
    "first": lambda r: person(r, False),
    "org": organisation,
    "title": titled,
    "city": lambda r: town(r),
    "day": lambda r: r.choice(load().words["day"]),
    "date": date_of,
    "when": when_of,
    "time": clock_of,
    "num": lambda r: r.randint(10, r.choice([99, 9999, 99999])),
    "year": lambda r: r.randint(1850, 2026),
    "money": money,
    "kg": lambda r: r.randint(1, 60) if r.random() < 0.5 else round(r.randint(1, 40) + r.randint(1, 9) / 10, 1),
    "deg": lambda r: r.randint(5, 30) if r.random() < 0.6 else round(r.randint(10, 99) + r.randint(1, 9) / 10, 1),
    "code": code,
    "gate": lambda r: f"{r.choice('ABCDEFG')}{r.randint(1, 60)}",
    "zip": lambda r: str(r.randint(10000, 99999)),
    "email": email,
    "phone": phone,
    "text": sentence,
    "quote": sentence,
    "topic": some_words,
    "thing": bare_thing,
    "broken": lambda r: word(r, "noun", False),
    "word": lambda r: invented(r),
    "copied": copied,
    "copied_two": lambda r: f"{copied(r)} {copied(r)}",
    "surname": surname,
    "some_day": lambda r: date_of(r).rstrip(".") if r.random() < 0.4 else r.choice(load().words["day"]),
    **USUAL_KINDS,
    "street": lambda r: f"{word(r, r.choice(['noun', 'any']), False).capitalize()} {r.choice(STREETS)}",
    "place": any_of(SHOPS),
    "room": any_of(ROOMS),
    "sport": any_of(SPORTS),
    "brand": any_of(BRANDS),
    "reason": lambda r: r.choice(REASONS),
    "de_job": lambda r: r.choice(DE_JOBS),
    "fr_thing": lambda r: r.choice(FR_THINGS),
    "chan": lambda r: f"#{word(r, 'any', False)}",
    "tick": lambda r: "".join(r.choice(LETTERS.upper()) for _ in range(r.randint(2, 5))),
    "fname": lambda r: (
        f"{word(r, 'any', False)}{r.choice(['', '_v2', '2', '-new'])}.{r.choice(['pdf', 'txt', 'png', 'csv'])}"
    ),
    "zh_name": lambda r: r.choice(load().words["zhname"]) if r.random() < 0.5 else signs(r, r.choice([2, 3, 3])),
    "zh_title": lambda r: signs(r, r.randint(2, 5)),
    "zh_city": lambda r: r.choice(load().countries)["capital_zh"] if r.random() < 0.6 else signs(r, 2),
    "zh_thing": lambda r: r.choice(load().words["zhthing"]) if r.random() < 0.6 else signs(r, 2),
    "zhw_thing": lambda r: wide_noun(r, "zhthing"),
    "zhw_place": lambda r: wide_noun(r, "zhplace"),
    "zhw_beast": lambda r: wide_noun(r, "zhbeast"),
    "zhw_name": name_zh,
    "zh_animal": lambda r: r.choice([noun for noun in load().words["zhbeast"] if is_animal(noun)]),
    "zh_day": lambda r: (
        r.choice(ZH_DAYS.split(" ")) if r.random() < 0.6 else f"{r.randint(1, 12)}月{r.randint(1, 28)}日"
    ),
    "zh_time": lambda r: r.choice(["上午", "下午", "晚上", ""]) + f"{r.randint(1, 12)}点{r.choice(['', '半', ''])}",
    "zh_shop": lambda r: r.choice(["超市", "书店", "市场", "网上", "商场", "药店", "花店", signs(r, 2) + "店"]),
    "zh_room": lambda r: r.choice(["客厅", "卧室", "厨房", "书房", "阳台", "浴室", "办公室", "车库"]),
    "ingredient": listed("ingredient"),
    "plant": listed("tree"),
    "animal": listed("animal"),
    "food": listed("food"),
    "drink": listed("drink"),
    "job": listed("job"),
    "lang": listed("lang"),
    "colour": listed("colour"),
}


def town(rng: random.Random) -> str:
    """A capital, or a town that nobody knows."""
    if rng.random() < 0.6:
        return rng.choice(load().countries)["capital"]
    return (invented(rng).capitalize() if rng.random() < 0.6 else surname(rng)) + rng.choice(["", "", " Bay", "burg"])


COUNTED = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SLOT = re.compile(r"\[(\w+)\]|<(\w+):([^|>]*)\|([^>]*)>")


@dataclass
class Told:
    """A sentence or an order of a scene with the value of each field that it tells."""

    scene: Scene
    text: str
    values: dict[str, Value]


def _value(rng: random.Random, field: Field) -> Value:
    if field.kind == "int":
        return rng.randint(field.low, field.high)
    if field.kind.startswith("list:"):
        make = KINDS[field.kind[5:]]
        return list(dict.fromkeys(str(make(rng)) for _ in range(rng.choice([2, 3, 3, 4]))))
    return KINDS[field.kind](rng)


def said_of(value: Value) -> str:
    """A value as a text tells it."""
    if isinstance(value, list):
        return value[0] if len(value) == 1 else ", ".join(value[:-1]) + " and " + value[-1]
    return str(value)


def tell(rng: random.Random, scene: Scene, template: str, coded: bool = False) -> Told:
    """A template of a scene with values in it; `coded` wants the codes of an enumeration, not the words of the text."""
    values: dict[str, Value] = {}

    def slot(match: re.Match[str]) -> str:
        if match[2]:
            values[match[2]] = rng.random() < 0.5
            return match[3] if values[match[2]] else match[4]
        field = scene.fields[match[1]]
        if field.kind == "enum":
            value, said = rng.choice(field.options)
            said = said if rng.random() < 0.85 else value
            values[match[1]] = value if coded else said
            return said
        made = _value(rng, field)
        while made in values.values():
            made = _value(rng, field)
        values[match[1]] = made
        alone = template[match.start() - 1 : match.start()] in ("", " ") and template[match.end() :][:1] != ":"
        if isinstance(made, int) and 0 < made < 13 and field.kind == "int" and alone and rng.random() < 0.15:
            return COUNTED[made - 1]
        return said_of(made)

    text = SLOT.sub(slot, template)
    return Told(scene, re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text), values)


def spelled(rng: random.Random, name: str, plain: bool = False) -> str:
    """A name as a key in one of the usual spellings; `plain` gives those that tools use."""
    words = name.split(" ")
    if not name.isascii():
        return name
    pick = rng.random()
    if len(words) == 1 and not plain and rng.random() < 0.1:
        words.append(rng.choice(["1", "2", "name", "value", "text", "field", "info", "no", "id", "key"]))
    if pick < 0.5:
        return "_".join(words)
    if pick < 0.76 or plain:
        return words[0] + "".join(w.capitalize() for w in words[1:])
    if pick < 0.84:
        return "-".join(words)
    if pick < 0.92:
        return "".join(w.capitalize() for w in words)
    return "_".join(words).upper() if pick < 0.97 else " ".join(words)


def keyed(rng: random.Random, told: Told, wanted: list[str], plain: bool = False) -> dict[str, str]:
    """A key for each wanted field: one of its names in one spelling; no key comes twice."""
    out: dict[str, str] = {}
    for field in wanted:
        names = told.scene.fields[field].names
        for _ in range(6):
            key = spelled(rng, names[0] if rng.random() < 0.3 else rng.choice(names), plain)
            if key not in out.values():
                out[field] = key
                break
    return out
