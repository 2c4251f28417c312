"""JSON with given keys. Owns: keys in every spelling, templates and schemas to fill. Knows no tokens.

Keys are copied sign by sign from the instruction: snake, camel, kebab, capitals, digits, nested, known or invented.
"""

from __future__ import annotations

import json
import random
import re

from authored_data import load
from phrasing import any_words
from render import Case
from skill_chat import person
from skill_extract import plain_record
from skill_facts import ask
from vocabulary import LETTERS, copied, crossed, invented, token_words, word

Value = str | int | bool
MADE = 0.7
"""Share of the training keys that are made of any parts."""
KNOWN = [
    "id",
    "userId",
    "user_id",
    "firstName",
    "last_name",
    "fullName",
    "email",
    "phone_number",
    "zipCode",
    "streetAddress",
    "createdAt",
    "updated_at",
    "isActive",
    "orderId",
    "order_total",
    "itemCount",
    "unit_price",
    "currency",
    "status",
    "type",
    "kind",
    "title",
    "description",
    "tags",
    "startDate",
    "end_date",
    "dueDate",
    "latitude",
    "longitude",
    "heightCm",
    "weight_kg",
    "maxSpeed",
    "min_value",
    "page_size",
    "nextPage",
    "errorCode",
    "message",
    "level",
    "score",
    "rank_1",
    "rank2",
    "colour_code",
    "size_xl",
    "option3",
    "v2_total",
    "line1",
    "line_2",
    "address2",
    "birth_year",
    "yearOfBirth",
    "city",
    "countryCode",
    "language_name",
]


DIGITS = ["1", "2", "3", "4", "5", "7", "10", "12", "24", "64", "99", "100", "404", "2024", "007"]


def _part(rng: random.Random) -> str:
    """One word of a key: known, made of syllables, of the halves of two words, of letters, or a number."""
    pick = rng.random()
    if pick < 0.2:
        # A word that is one token behind a space and others behind a quote.
        return rng.choice(token_words(False)).lower()
    if pick < 0.42:
        return word(rng, rng.choice(["param", "noun", "any", "any", "verb"]), False)
    if pick < 0.64:
        return invented(rng)
    if pick < 0.84:
        return crossed(rng)
    if pick < 0.92:
        return rng.choice(LETTERS) + rng.choice(DIGITS)
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 5)))


def made_key(rng: random.Random) -> str:
    """A key of one to four parts in any spelling, with digits anywhere but in front: only copying gives it back."""
    parts = [_part(rng) for _ in range(rng.choice([1, 1, 2, 2, 2, 3, 3, 4]))]
    if rng.random() < 0.22:
        at = rng.randrange(len(parts))
        if rng.random() < 0.5:
            parts[at] += rng.choice(DIGITS)
        else:
            parts.insert(at + 1, rng.choice(DIGITS))
    pick = rng.random()
    if pick < 0.36:
        return "_".join(parts)
    if pick < 0.66:
        return parts[0] + "".join(p[0].upper() + p[1:] for p in parts[1:])
    if pick < 0.78:
        return "-".join(parts)
    if pick < 0.88:
        return "".join(p[0].upper() + p[1:] for p in parts)
    if pick < 0.94:
        return "_".join(parts).upper()
    if pick < 0.97:
        return rng.choice(["", "_", "x_", "my-"]) + "_".join(parts[:2])
    return "_".join(p[0].upper() + p[1:] for p in parts)


def key_name(rng: random.Random, held: bool) -> str:
    """A key: one to three words in one of the usual spellings, some with digits."""
    if not held and rng.random() < MADE:
        return made_key(rng)
    if rng.random() < 0.2 and not held:
        return rng.choice(KNOWN)
    if rng.random() < 0.04:
        return "".join(
            rng.choice(LETTERS) for _ in range(rng.randint(1, 3) if held else rng.choice([1, 1, 2, 3, 6, 9]))
        )
    uses = ["param", "noun", "any"]
    # Half of the words are made of syllables: nothing but copying gives them back.
    words = [
        invented(rng) if not held and rng.random() < 0.35 else word(rng, rng.choice(uses), held)
        for _ in range(rng.choice([1, 1, 2, 2, 2, 3] if held or rng.random() < 0.8 else [3, 4, 5]))
    ]
    if rng.random() < 0.2:
        words[-1] += rng.choice(["", "_"]) + str(rng.choice([1, 2, 3, 4, 5, 10, 12, 24, 99, 2024]))
    pick = rng.random()
    if pick < 0.42:
        return "_".join(words)
    if pick < 0.74:
        return words[0] + "".join(w[0].upper() + w[1:] for w in words[1:])
    if pick < 0.82:
        return "-".join(words)
    if pick < 0.9:
        return "".join(w[0].upper() + w[1:] for w in words)
    return "_".join(words).upper() if pick < 0.96 else words[0].upper()


def _value(rng: random.Random, held: bool) -> Value:
    pick = rng.random()
    w = load().words
    if pick < 0.34:
        if not held and pick < 0.12:
            return copied(rng)
        return rng.randint(0, rng.choice([9, 99, 999, 99999]))
    if pick < 0.42:
        return rng.random() < 0.5
    if pick < 0.55:
        return person(rng, held)
    if pick < 0.68:
        return invented(rng)
    if pick < 0.76:
        return rng.choice(load().countries)["capital"]
    listing = rng.choice(["colour", "thing", "food", "animal", "job", "day", "month", "hobby"])
    return rng.choice(w[listing])


def _said(value: Value) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def spoken(key: str) -> str:
    """A key as words: `firstName` is `first name`."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", key)
    return " ".join(p.lower() for p in parts)


def kind_of(value: Value) -> str:
    """The JSON type of a value."""
    return "boolean" if isinstance(value, bool) else "integer" if isinstance(value, int) else "string"


FACTS = [
    "[k] is [v]",
    "[k]: [v]",
    "[k] = [v]",
    "the [s] is [v]",
    "the [s] is [v]",
    "[v] is the [s]",
    "[s] [v]",
    "its [s] is [v]",
]
KEYS = [
    "Return JSON with the keys [k]. [s]",
    "[s]\nMake a JSON object with the keys [k].",
    "Use exactly these keys: [k]. Text: [s]",
    "JSON, keys [k]: [s]",
    "Give me JSON with [k]. [s]",
    "Answer in JSON. Keys: [k]. [s]",
    "Turn into JSON ([k]): [s]",
    "The keys are [k]. Write the JSON for: [s]",
    "Extract [k] as JSON: [s]",
    "[s] Output a JSON object with [k].",
    "Fill a JSON object having the keys [k]: [s]",
    "I want JSON with the fields [k]. Here is the text: [s]",
    "Keys: [k]\nText: [s]\nJSON:",
    "Write [k] as JSON: [s]",
    "Please produce JSON, key names [k]. [s]",
    "json with keys [k]: [s]",
    "Reply only with JSON. Its keys must be [k]. [s]",
    "Put this into JSON with the key names [k]: [s]",
    "Do not change the keys [k]. Make JSON of: [s]",
    "Convert to JSON using the keys [k]: [s]",
]
KEYS_HELD = ["Create a JSON object whose keys are [k] from this: [s]", "[s]\nGive back JSON; name the keys [k]."]
SCHEMA = [
    "Schema: [k]\nText: [s]",
    "Answer with JSON that follows this schema: [k]\n[s]",
    "[s]\nJSON schema: [k]",
    "Fill the schema [k] from: [s]",
    "Use this JSON schema.\n[k]\n[s]",
    "Follow the schema [k]. [s]",
    "Here is a schema: [k] And the text: [s] Give the JSON.",
]
SCHEMA_HELD = ["Write JSON that is valid for [k]. The text: [s]"]
TEMPLATE = [
    "Fill this template: [k]\n[s]",
    "Complete the JSON [k] with: [s]",
    "[s]\nFill in: [k]",
    "Template: [k]\nText: [s]",
    "Put the values into [k]. [s]",
    "Here is an empty object: [k] Fill it. [s]",
    "Use the form [k] for: [s]",
]
TEMPLATE_HELD = ["Take the template [k] and enter the values of: [s]"]


DO = ["Return", "Give me", "Write", "Produce", "Output", "Print", "Send me", "Build", "Prepare", "Show me", "I need"]
DO += ["I want", "Please write", "Could you make", "Let me have", "Generate", "Make", "Please give me", "I would like"]
OBJECT = ["JSON", "a JSON object", "one JSON object", "an object in JSON", "a JSON record", "the JSON", "plain JSON"]
OBJECT += ["a JSON dictionary", "json", "only JSON", "some JSON", "a small JSON object", "an answer in JSON"]
NAMED = ["keys", "fields", "properties", "entries", "names", "attributes", "labels", "columns", "members", "key names"]
WITH = ["with the [n]", "with [n]", "that has the [n]", "holding the [n]", "containing", "having the [n]", "keyed by"]
WITH += [
    "made of the [n]",
    "consisting of",
    "with nothing but",
    "under the [n]",
    "where the [n] are called",
    "with just",
]
FITS = ["that fits", "matching", "which obeys", "conforming to", "according to", "in line with", "of the form", "like"]
FITS += ["as described by", "satisfying", "which follows", "built like", "in the shape of", "as in", "shaped by"]
FROM = ["from [w]: [s]", "out of [w]: [s]", "for [w]: [s]", "based on [w]: [s]", "with [w]: [s]", "about [w]: [s]"]
FROM += [". [s]", ". The text is: [s]", "; here is the text: [s]", ".\n[s]", ": [s]", ". Facts: [s]", ". Use [w]: [s]"]
WHAT = ["this text", "the text", "these facts", "what follows", "the following", "the sentence", "the note", "the data"]
BLANK = [
    "",
    "",
    "this: ",
    "the object ",
    "the empty object ",
    "this template: ",
    "the JSON ",
    "the form ",
    "the record ",
]
ENTER = ["Fill in", "Complete", "Finish", "Populate", "Put values into", "Add the values to", "Fill the blanks of"]
ENTER += ["Set the values of", "Supply what is missing in", "Replace the empty values of", "Write the values into"]


CALL = ["call the [n]", "label the [n]", "use as [n]", "take as [n]", "the [n] being", "let the [n] be", "choose"]
CALL += ["spell the [n]", "its [n] are", "write the [n] as", "stick to the [n]", "mind the [n]", "copy the [n]", "keep"]
CALL += [
    "I want the [n]",
    "give it the [n]",
    "there are the [n]",
    "it needs",
    "every one of the [n]",
    "no [n] but",
    "only",
]


def composed(rng: random.Random, kind: str) -> str:
    """A request put together from parts, so that no word in front of the keys is always there."""
    do, made = rng.choice(DO), rng.choice(OBJECT)
    naming = rng.choice(NAMED)
    if kind == "list":
        core = f"{do} {made} {rng.choice(WITH)} [k]".replace("[n]", naming)
        if rng.random() < 0.2:
            core = rng.choice(["The [n] {are|must be|have to be} [k]. ", "[n]: [k]. "]).replace("[n]", naming)
            core = re.sub(r"\{(.+?)\}", lambda m: rng.choice(m[1].split("|")), core)
            core = core[0].upper() + core[1:] + f"{do} {made}"
        elif rng.random() < 0.45:
            core = f"{do} {made} {' '.join(any_words(rng, rng.randint(1, 4)))} [k]"
        elif rng.random() < 0.5:
            # The order and its keys are two sentences, and any verb says what the keys are called.
            core = f"{do} {made}{rng.choice(['; ', ', ', '. ', ' - ', ' and '])}{rng.choice(CALL)} [k]"
            core = core.replace("[n]", naming)
    elif kind == "schema":
        fits = " ".join(any_words(rng, rng.randint(1, 3))) if rng.random() < 0.3 else rng.choice(FITS)
        core = f"{do} {made} {fits} [k]"
    else:
        core = f"{rng.choice(ENTER)} {rng.choice(BLANK)}[k]"
        please = rng.choice(["", "", "Please ", "Now ", "Could you ", "Kindly "])
        core = please + (core[0].lower() + core[1:] if please else core)
    if rng.random() < 0.35:
        text = "[s]" + rng.choice(["\n", " ", "\n\n"]) + core + rng.choice([".", "", " please."])
    else:
        tail = rng.choice(FROM)
        text = core + ("" if tail[0] in ".;:" else " ") + tail.replace("[w]", rng.choice(WHAT))
    if rng.random() < 0.1:
        front = word(rng, "noun", False)
        text = rng.choice([f"For the {front}: ", f"This is about a {front}. ", f"{front.capitalize()} list. "]) + text
    return text


def _schema(fields: dict) -> dict:
    inner = {k: _schema(v) if isinstance(v, dict) else {"type": kind_of(v)} for k, v in fields.items()}
    return {"type": "object", "properties": inner}


def _empty(fields: dict) -> dict:
    empty = {"string": "", "integer": 0, "boolean": False}
    return {k: _empty(v) if isinstance(v, dict) else empty[kind_of(v)] for k, v in fields.items()}


def _names(fields: dict) -> list[str]:
    """The keys, those of an object in brackets behind its own."""
    return [f"{k} ({', '.join(_names(v))})" if isinstance(v, dict) else k for k, v in fields.items()]


def _told(rng: random.Random, fields: dict) -> list[str]:
    form = rng.choice(FACTS)
    out: list[str] = []
    for key, item in fields.items():
        if isinstance(item, dict):
            out += _told(rng, item)
        else:
            shape = form if rng.random() < 0.7 else rng.choice(FACTS)
            said = shape.replace("[k]", key).replace("[s]", spoken(key)).replace("[v]", _said(item))
            out.append(said)
    return out


def _listed(rng: random.Random, names: list[str], quoted: float = 0.25) -> str:
    """The keys as a list; a key in quotes has its own tokens already, one behind a space must be spelled."""
    if rng.random() < quoted:
        names = [f'"{n}"' if " " not in n else n for n in names]
    elif rng.random() < 0.15:
        names = [f"`{n}`" if " " not in n else n for n in names]
    return ", ".join(names) if len(names) == 1 or rng.random() < 0.6 else ", ".join(names[:-1]) + " and " + names[-1]


def _fields(rng: random.Random, held: bool, most: int) -> dict:
    out: dict = {}
    while not out:
        for _ in range(rng.randint(1, most)):
            key = key_name(rng, held)
            if not any(spoken(key) == spoken(k) for k in out):
                out[key] = _value(rng, held)
    return out


ALIASES = {
    "name": ["name", "fullName", "full_name", "person", "personName", "first_name", "firstName", "who", "user"],
    "age": ["age", "ageYears", "age_in_years", "years", "yearsOld", "current_age"],
    "city": ["city", "town", "homeCity", "home_town", "location", "lives_in", "place"],
    "job": ["job", "profession", "jobTitle", "job_title", "occupation", "works_as", "work"],
    "hobby": ["hobby", "likes", "favouriteHobby", "favorite_hobby", "free_time", "interest"],
    "colour": ["colour", "color", "favouriteColour", "favorite_color", "colour_choice"],
    "food": ["food", "dish", "favouriteFood", "favorite_food", "meal", "order"],
    "pet": ["pet", "animal", "petKind", "pet_kind", "owned_animal"],
    "drink": ["drink", "beverage", "favouriteDrink", "favorite_drink", "drink_order"],
    "price": ["price", "amount", "priceEuros", "price_in_euros", "paid", "cost"],
    "month": ["month", "birthMonth", "birth_month", "birthday_month", "born_in"],
}
"""Other names of the fields of a sentence."""


def alias(rng: random.Random, key: str, held: bool = False) -> str:
    """Another name for a field: a synonym, sometimes in capitals, with a number or a word in front."""
    name = rng.choice(ALIASES[key])
    if not held and rng.random() < 0.4:
        # Any word in front or behind: what the key means is told by the rest of it.
        front = rng.random() < 0.5
        other = _part(rng)
        first, last = (other, name) if front else (name, other)
        return f"{first}_{last}" if "_" in name or rng.random() < 0.5 else first + last[0].upper() + last[1:]
    pick = rng.random()
    if pick < 0.1:
        return name.upper()
    if pick < 0.2:
        return name + rng.choice(["", "_"]) + str(rng.randint(1, 9))
    if pick < 0.3:
        front = rng.choice(["user", "person", "customer", "client", "guest", "my"])
        return front + "_" + name if "_" in name or rng.random() < 0.5 else front + name[0].upper() + name[1:]
    return name[0].upper() + name[1:] if pick < 0.36 else name


def _named_record(rng: random.Random, held: bool) -> tuple[str, dict]:
    """A plain sentence on a person, its fields under other names."""
    text, fields = plain_record(rng, held)
    out: dict = {}
    for key, item in fields.items():
        name = alias(rng, key, held)
        if name not in out:
            out[name] = item
    return text, out


def json_keys(rng: random.Random, held: bool) -> Case:
    """A JSON object whose keys are given by a list, a schema or a template; the text tells the values."""
    natural = rng.random() < 0.25
    text, fields = _named_record(rng, held) if natural else ("", _fields(rng, held, rng.choice([2, 3, 4, 4, 5])))
    if not natural and rng.random() < 0.3:
        outer = key_name(rng, held)
        if not any(spoken(outer) == spoken(k) for k in fields):
            inner = {k: v for k, v in _fields(rng, held, 3).items() if spoken(k) not in map(spoken, [*fields, outer])}
            if inner:
                fields[outer] = inner
                fields = dict(rng.sample(list(fields.items()), len(fields)))
    parts = _told(rng, fields)
    if rng.random() < 0.25:
        rng.shuffle(parts)
    mark = rng.choice([", ", "; ", ", ", "\n", ". "])
    text = text or mark.join(parts) + ("." if mark != "\n" else "")
    pick = rng.random()
    kind = "list" if pick < 0.55 else "schema" if pick < 0.8 else "form"
    if pick < 0.55:
        shown, forms = _listed(rng, _names(fields), 0.25 if held else 0.12), KEYS_HELD if held else KEYS
    elif pick < 0.8:
        shown, forms = json.dumps(_schema(fields)), SCHEMA_HELD if held else SCHEMA
        if rng.random() < 0.3:
            shown = json.dumps(json.loads(shown)["properties"])
    else:
        shown, forms = json.dumps(_empty(fields)), TEMPLATE_HELD if held else TEMPLATE
    if not held and rng.random() < 0.15 and len(fields) > 1 and pick < 0.55:
        # Only some of what the text tells is asked for.
        kept = rng.sample(list(fields), rng.randint(1, len(fields) - 1))
        fields = {k: fields[k] for k in kept}
        shown = _listed(rng, _names(fields), 0.12)
    form = rng.choice(forms) if held or rng.random() < 0.2 else composed(rng, kind)
    user = re.sub(r"\[([sk])\]", lambda m: text if m[1] == "s" else shown, form)
    return ask(user, json.dumps(fields), "json_keys", "", check="keys", expect=fields)


def same_keys(a: object, b: object) -> bool:
    """Whether two values have the same keys, in any order, all the way down."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_keys(v, b[k]) for k, v in a.items())
    return not isinstance(a, dict) and not isinstance(b, dict)
