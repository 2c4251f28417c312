"""JSON of happenings. Owns: requests with one's own keys for what a sentence tells. Knows no tokens.

The sentence and the keys are those of a scene, so a value must be found by the meaning of its key and cut where it
ends: no word around it comes along. What a sentence denies is false, and numbers in words become digits.
"""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache

from held_out import is_happening
from phrasing import any_words, is_chinese, occasion
from render import Case
from scene_parts import composed_scene
from scene_parts_zh import composed_scene_zh
from scenes import Scene, Told, Value, keyed, said_of, scenes, spelled, tell
from skill_facts import ask
from vocabulary import word

DO = ["Give me", "Make", "Write", "I need", "Return", "Create", "Produce", "Please send", "I'd like", "Build", "Output"]
DO += ["Could you make", "Show", "Put together", "Convert to", "Turn this into", "Can you write", "Extract", "", "Fill"]
DO += [
    "Get me",
    "Summarise as",
    "Answer with",
    "Reply with",
    "Please answer with",
    "We want",
    "Generate",
    "Print",
    "Do",
]
WHAT = [
    "JSON",
    "a JSON",
    "json",
    "a JSON object",
    "JSON only",
    "a small JSON",
    "a JSON record",
    "the JSON",
    "valid JSON",
]
WHAT += [
    "one JSON object",
    "an object in JSON",
    "JSON data",
    "only JSON",
    "plain JSON",
    "a json",
    "some JSON",
    "a dict",
]
LINK = ["with [k]", "with the keys [k]", "with keys [k]", "with fields [k]", "with the fields [k]", "that has [k]"]
LINK += [
    "having [k]",
    "([k])",
    "using the keys [k]",
    "using [k]",
    "whose keys are [k]",
    "where the keys are [k]",
    ": [k]",
]
LINK += [
    ", keys [k],",
    "under the keys [k]",
    "with the properties [k]",
    "holding [k]",
    "carrying [k]",
    "in the keys [k]",
]
LINK += ["with exactly these keys: [k]", "with the key names [k]", "keyed by [k]", "for the fields [k]", "of [k]"]
FORMS = ["[o]: [s]", "[o]. [s]", "[o] for this: [s]", "[o] from: [s]", "[s] [o].", "[s]\n[o]", "[o]\n[s]", "[o] - [s]"]
FORMS += ["[o]. Text: [s]", "[o] of this text: [s]", "[o] from this sentence: [s]", "Text: [s]\n[o]", "[o]. Input: [s]"]
FORMS += [
    "Read this: [s] [o].",
    "[o] about the following. [s]",
    "[s] Now [l].",
    'From "[s]" [l]',
    "[o]. It is about: [s]",
]
FORMS += ["The keys are [k]. [s] Write the JSON.", "Keys: [k]. [s]", "json please: keys [k]. [s]", "Please [l]. [s]"]
FORMS += [
    "JSON with [k]: [s]",
    "Extract [k] as JSON from: [s]",
    "[k] as JSON: [s]",
    "[s] Give me [k] as JSON.",
    "[o], [s]",
]
FORMS += [
    "I need JSON: the keys are [k]. [s]",
    "Put this in JSON with the keys [k]: [s]",
    "[s] As JSON with [k], please.",
]
HELD_FORMS = [
    "Express the following as a JSON object, naming its members [k]: [s]",
    "[s] What is that in JSON? Take [k].",
]
FILL = [
    "Fill [t]: [s]",
    "Fill [t] - [s]",
    "[t] Fill this from: [s]",
    "Create JSON [t] from: [s]",
    "Return JSON: [t]. [s]",
]
FILL += ["Answer like [t]. [s]", "[s]\nUse this form: [t]", "Make [t] of: [s]", "The shape is [t]. [s]", "[s] -> [t]"]
FILL += ["Complete [t] for this text: [s]", "Output must look like [t]\n[s]", "JSON of the form [t]: [s]", "[t]\n\n[s]"]
HELD_FILL = ["Replace the blanks of [t] by what you read here: [s]"]


ZH_FORMS = [
    "给我一个JSON，包含[k]：[s]",
    "用JSON写出[k]：[s]",
    "[s]请用JSON表示[k]。",
    "用键[k]生成JSON：[s]",
    "提取[k]，输出JSON：[s]",
]
ZH_FORMS += [
    "[s]转成JSON，键为[k]",
    "请把下面的话变成JSON，字段是[k]。[s]",
    "JSON字段：[k]。内容：[s]",
    "[s]我要JSON，键名[k]。",
    "键：[k]。[s]写成JSON。",
]
ZH_FORMS += [
    "请输出JSON（[k]）：[s]",
    "从“[s]”里取[k]，做成JSON",
    "根据这句话写JSON，键是[k]：[s]",
    "[k]，用JSON回答：[s]",
    "只要JSON，键为[k]：[s]",
]
ZH_HELD = ["麻烦整理成JSON对象，其中的键依次叫[k]：[s]", "请把原文中的[k]列成JSON对象。原文：[s]"]


def _shown(rng: random.Random, keys: list[str]) -> str:
    """The keys in a row, as people write one."""
    pick = rng.random()
    if pick < 0.2 or any(" " in key for key in keys):
        mark = rng.choice(['"', "'", "`"])
        keys = [f"{mark}{key}{mark}" for key in keys]
    if len(keys) > 1 and pick > 0.93:
        return "\n- " + "\n- ".join(keys) + "\n"
    if len(keys) == 1 or rng.random() < 0.35:
        return ", ".join(keys)
    joint = " and " if len(keys) == 2 else rng.choice([" and ", " and ", ", and "])
    return ", ".join(keys[:-1]) + joint + keys[-1]


def type_of(value: Value | None) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    return "array" if isinstance(value, list) else "number" if isinstance(value, int | float) else "string"


def _template(rng: random.Random, fields: dict[str, Value]) -> str:
    """An object to fill: empty values, dots, or the types of the values."""
    pick = rng.random()
    if pick < 0.4:
        empty = {"boolean": False, "array": [], "number": 0, "string": ""}
        return json.dumps({k: empty[type_of(v)] for k, v in fields.items()}, ensure_ascii=False)
    short = {"boolean": "bool", "array": "list", "number": "int", "string": "str"} if pick < 0.6 else {}
    inner = [f'"{k}": ' + ("..." if pick > 0.8 else short.get(type_of(v), type_of(v))) for k, v in fields.items()]
    return "{" + ", ".join(inner) + "}"


def _order(rng: random.Random, shown: str) -> str:
    what, link = rng.choice(WHAT), rng.choice(LINK)
    if rng.random() < 0.15:
        link = " ".join(any_words(rng, rng.randint(1, 3))) + " [k]"
    joint = "" if link[0] in ":," else " "
    return f"{rng.choice(DO)} {what}{joint}{link}".strip(" ,").replace("[k]", shown)


DO_ZH = ["写", "给我", "生成", "输出", "返回", "做", "我要", "请给", "请写", "帮我写", "整理出", "只给", "造", "列"]
OBJECT_ZH = ["JSON", "一个JSON", "JSON对象", "一段JSON", "JSON数据", "json", "一个JSON对象", "JSON格式"]
KEYS_ZH = [
    "键是[k]",
    "键为[k]",
    "字段[k]",
    "字段是[k]",
    "键名用[k]",
    "包含[k]",
    "要有[k]",
    "只要[k]",
    "属性[k]",
    "用[k]作键",
]
TEXT_ZH = ["：[s]", "。内容：[s]", "。[s]", "，文字是：[s]", "\n[s]", "。原句：[s]", "。根据：[s]", "，说的是：[s]"]


def _asked_zh(rng: random.Random) -> str:
    """A Chinese request with its keys and its text, put together in one order or the other."""
    do, what, keys = rng.choice(DO_ZH), rng.choice(OBJECT_ZH), rng.choice(KEYS_ZH)
    core = f"{do}{what}，{keys}" if rng.random() < 0.7 else f"{keys}，{do}{what}"
    if rng.random() < 0.35:
        return f"[s]{rng.choice(['', '请', '现在', '麻烦'])}{core}{rng.choice(['。', '', '！'])}"
    return core + rng.choice(TEXT_ZH)


def _request(rng: random.Random, text: str, fields: dict[str, Value], held: bool) -> str:
    """The keys and the text in one request."""
    if is_chinese(text):
        form = rng.choice(ZH_HELD if held else ZH_FORMS) if held or rng.random() < 0.4 else _asked_zh(rng)
        row = rng.choice(["、", "、", "，", ", ", "和"]).join(fields)
        return form.replace("[k]", row).replace("[s]", text)
    if rng.random() < 0.22:
        form = rng.choice(HELD_FILL if held else FILL)
        return form.replace("[t]", _template(rng, fields)).replace("[s]", text)
    shown = _shown(rng, list(fields))
    order = _order(rng, shown)
    parts = {"s": text, "o": order[0].upper() + order[1:], "l": order[0].lower() + order[1:], "k": shown}
    if rng.random() < 0.25:
        parts["o"] = order
    return re.sub(r"\[([solk])\]", lambda m: parts[m[1]], rng.choice(HELD_FORMS if held else FORMS))


def request_of(rng: random.Random, text: str, fields: dict[str, Value]) -> str:
    """A training request for the fields of a text."""
    return _request(rng, text, fields, False)


@lru_cache(maxsize=2)
def plain_scenes(held: bool) -> list[Scene]:
    """The scenes that are told in English or another language with its letters."""
    return [scene for scene in scenes(held, False) if not scene.name.startswith("zh_")]


def _wanted(rng: random.Random, told: Told) -> list[str]:
    """The fields that are asked for: mostly all, in the order of the text or another."""
    wanted = list(told.values)
    if len(wanted) > 1 and rng.random() < 0.25:
        wanted = rng.sample(wanted, rng.randint(1, len(wanted) - 1))
    if rng.random() < 0.5:
        rng.shuffle(wanted)
    return wanted


MADE = 0.65
"""Share of the training happenings that are put together."""
ZH = 0.15
"""Share of them in Chinese."""


def _drawn(rng: random.Random, held: bool, listed: list[Scene]) -> Told:
    """A happening of the list or one that is put together, and one sentence of it."""
    while True:
        made = not held and rng.random() < MADE
        if made:
            scene = composed_scene_zh(rng) if rng.random() < ZH else composed_scene(rng)
        else:
            scene = rng.choice(listed)
        told = tell(rng, scene, rng.choice(scene.says))
        if not made or not is_happening(told.text):
            return told


def _told(rng: random.Random, held: bool) -> tuple[str, dict[str, Value]]:
    """A sentence of a scene, sometimes two, and what is wanted of it under its keys."""
    told = _drawn(rng, held, scenes(held, False))
    keys = keyed(rng, told, _wanted(rng, told))
    fields: dict[str, Value] = {key: told.values[field] for field, key in keys.items()}
    text = told.text
    if rng.random() < 0.15 and not held and not is_chinese(text):
        text = f"{occasion(rng)} {text}" if rng.random() < 0.5 else f"{text} {occasion(rng)}"
    return text, fields


def _flat(rng: random.Random, held: bool) -> tuple[str, object]:
    text, fields = _told(rng, held)
    if rng.random() < 0.04 and not held and not is_chinese(text):
        # A key that the text says nothing of is null.
        fields = {**fields, spelled(rng, word(rng, "noun", False)): "none"}
        user = _request(rng, text, fields, held)
        return f"{user} Use null for what is not said.", {k: None if v == "none" else v for k, v in fields.items()}
    return _request(rng, text, fields, held), fields


def _several(rng: random.Random, held: bool) -> tuple[str, object]:
    """Some sentences of one kind, one object for each."""
    made = not held and rng.random() < MADE
    scene = composed_scene(rng) if made else rng.choice(plain_scenes(held))
    form = rng.choice(scene.says)
    told = [tell(rng, scene, form) for _ in range(rng.choice([2, 2, 3]))]
    keys = keyed(rng, told[0], _wanted(rng, told[0]))
    out = [{key: one.values[field] for field, key in keys.items()} for one in told]
    what = rng.choice(["a JSON array of objects", "a JSON list, one object for each,", "a list of JSON objects"])
    do = rng.choice(["Make", "Give me", "Return", "Write", "I need", "Turn this into", ""])
    order = f"{do} {what} with the keys {_shown(rng, list(keys.values()))}".strip()
    text = rng.choice([" ", "\n"]).join(one.text for one in told)
    return rng.choice([f"{order}: {text}", f"{text}\n{order}.", f"{order}.\n{text}"]), out


def _nested(rng: random.Random, held: bool) -> tuple[str, object]:
    """Some of the fields stand in an object of their own."""
    text, fields = _told(rng, held)
    while is_chinese(text):
        text, fields = _told(rng, held)
    outer = spelled(rng, word(rng, "noun", held))
    if outer in fields:
        return _request(rng, text, fields, held), fields
    cut = rng.randint(0, len(fields) - 1)
    inner = list(fields)[cut:]
    value = {**{k: fields[k] for k in list(fields)[:cut]}, outer: {k: fields[k] for k in inner}}
    if rng.random() < 0.3:
        return rng.choice(FILL).replace("[t]", json.dumps(_emptied(value), ensure_ascii=False)).replace(
            "[s]", text
        ), value
    link = rng.choice(
        ["[k] containing [i]", "an object [k] with [i]", "[k] ([i])", "[k] that holds [i]", "[k] with [i] inside"]
    )
    last = link.replace("[k]", outer).replace("[i]", _shown(rng, inner).replace("\n", " "))
    shown = _shown(rng, list(fields)[:cut]).strip() + " and " + last if cut else last
    order = (
        f"{rng.choice(DO)} {rng.choice(['nested JSON', 'JSON', 'a JSON object', 'a nested JSON'])} with {shown}".strip()
    )
    return rng.choice([f"{order}: {text}", f"{text} {order}.", f"{order}. {text}", f"{order}\n{text}"]), value


def _emptied(value: object) -> object:
    if isinstance(value, dict):
        return {k: _emptied(v) for k, v in value.items()}
    return {"boolean": False, "array": [], "number": 0, "string": ""}[type_of(value)]  # type: ignore[arg-type]


def _in_brackets(rng: random.Random, held: bool) -> tuple[str, object]:
    """The values are told under other names than the keys, which follow in the same order."""
    scene = rng.choice(plain_scenes(held))
    told = tell(rng, scene, rng.choice(scene.says))
    fields = list(told.values)
    names = [rng.choice(scene.fields[f].names) for f in fields]
    form = rng.choice(["my [n] ([v])", "the [n] ([v])", "the [n] [v]", "[n]: [v]", "[n] = [v]", "the [n], [v]"])
    yes, no = rng.choice([("true", "false"), ("yes", "no")])
    said = []
    for field, name in zip(fields, names, strict=True):
        value = told.values[field]
        shown = (yes if value else no) if isinstance(value, bool) else said_of(value)
        said.append(form.replace("[n]", name).replace("[v]", shown))
    row = ", ".join(said[:-1]) + " and " + said[-1] if len(said) > 1 else said[0]
    if form in ("[n]: [v]", "[n] = [v]") and rng.random() < 0.5:
        row = "\n" + "\n".join(said) + "\n"
    keys = [
        spelled(rng, word(rng, "any", held)) if rng.random() < 0.6 else rng.choice("abcdefghklmnpqrstuvwxyz")
        for _ in fields
    ]
    if len(set(keys)) < len(keys):
        keys = [f"{name[0]}{i}" for i, name in enumerate(names)]
    use = rng.choice(["Use the keys [k].", "The keys are [k].", "Call them [k].", "Keys: [k]", "Name the keys [k]."])
    lead = rng.choice(
        [
            "Can you give me a JSON with",
            "Make JSON of",
            "Write JSON for",
            "JSON with",
            "I want JSON with",
            "Turn into JSON:",
        ]
    )
    use = use.replace("[k]", _shown(rng, keys).replace("\n", " "))
    text = f"{lead} {row}{'' if row[-1] == chr(10) else '?' if lead.startswith('Can') else '. '}{use}"
    return text, dict(zip(keys, told.values.values(), strict=True))


SOLD = ["[n] [t] at [p] euros each", "[n] [t] for [p] each", "I bought [n] [t], [p] euros a piece", "[n] [t], [p] each"]


def _computed(rng: random.Random, held: bool) -> tuple[str, object]:
    """A value that must be computed: a total of some things, or how many there are."""
    key = rng.choice(["total", "sum", "total_price", "totalCost", "toPay", "amount_due"])
    if rng.random() < 0.5:
        n, p, what = rng.randint(2, 10), rng.randint(2, 12), word(rng, "noun", held)
        text = rng.choice(SOLD).replace("[n]", str(n)).replace("[t]", what).replace("[p]", str(p))
        fields: dict[str, Value] = {rng.choice(["product", "item", "what", "article"]): what}
        fields |= {rng.choice(["count", "quantity", "pieces"]): n} if rng.random() < 0.5 else {}
        return _request(rng, f"{text}.", {**fields, key: 0}, held), {**fields, key: n * p}
    items = list(dict.fromkeys(word(rng, "noun", held) for _ in range(rng.randint(2, 5))))
    name, count = word(rng, "noun", held) + "s", rng.choice(["count", "number", "how_many", "n", "total"])
    rows = [f"Make a JSON with key {name} as a list: {said_of(items)}; and key {count} with how many there are."]
    rows += [
        f"JSON with {name} (a list) and {count} (how many): {said_of(items)}.",
        f"{name}: {said_of(items)}. Give JSON with the list {name} and {count}, the number of them.",
    ]
    return rng.choice(rows), {name: items, count: len(items)}


def scene_json(rng: random.Random, held: bool = False) -> Case:
    """A request for JSON with keys of one's own; the text tells the values in passing."""
    make = rng.choices([_flat, _several, _nested, _in_brackets, _computed], [72, 6, 9, 8, 5])[0]
    user, value = make(rng, held)
    return ask(user, json.dumps(value, ensure_ascii=False), "json_own", "", check="json", expect=value)
