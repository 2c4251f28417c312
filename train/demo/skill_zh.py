"""Chinese tasks. Owns: Chinese facts, stories, memory and extraction. Knows no tokens."""

from __future__ import annotations

import json
import random
import re

from authored_data import fill, load, rows, wording
from render import Case
from skill_facts import ask, plain
from skill_story_zh import made_story_zh
from story_parts_zh import PEOPLE, WHOLE, is_animal
from vocabulary import any_sign, is_held

TABLES = {
    "opposite_zh": ("[a]的反义词是[b]。", True),
    "colour_zh": ("[a]是[b]的。", False),
    "sound_zh": ("[a]的叫声是[b]。", False),
}


def table_zh(rng: random.Random, held: bool) -> Case:
    """An opposite, a colour or a sound."""
    kind = rng.choice(list(TABLES))
    form, both = TABLES[kind]
    a, b = rng.choice(load().pairs[kind])
    if both and rng.random() < 0.5:
        a, b = b, a
    text = form.replace("[a]", a).replace("[b]", b)
    if not held and rng.random() < 0.15:
        return plain(text[: text.index("是") + 1], text[text.index("是") + 1 :], "facts_zh", b)
    return ask(wording(kind, rng, held, {"a": a}), text, "facts_zh", re.escape(b))


def translation_zh(rng: random.Random, held: bool) -> Case:
    """A word of the dictionary, asked for in Chinese."""
    en, zh = rng.choice(load().pairs["zh"])
    if rng.random() < 0.5:
        return ask(wording("translate_zh", rng, held, {"a": en}), f"“{en}”的中文是“{zh}”。", "translation", zh)
    return ask(wording("translate_en", rng, held, {"a": zh}), f"“{zh}”的英文是“{en}”。", "translation", en)


def larger_zh(rng: random.Random, held: bool) -> Case:
    """Which of two numbers is larger."""
    a, b = rng.randint(0, 999), rng.randint(0, 999)
    b = b + 1 if a == b else b
    user = wording("larger_zh", rng, held, {"a": str(a), "b": str(b)})
    return ask(user, f"{max(a, b)}比{min(a, b)}大。", "compare", f"^{max(a, b)}比")


def noun_zh(rng: random.Random, listing: str, held: bool) -> str:
    """A Chinese noun; a twelfth of each list is held out, and some in training are put together from two signs."""
    words = [w for w in load().words[listing] if is_held(w) == held]
    pick = rng.random()
    if not held and pick < 0.1:
        return "".join(rng.choice(rng.choice(load().words["zhthing"] + load().words["zhplace"])) for _ in "ab")
    if not held and pick < 0.35:
        # Two signs that make no word: they can only be copied, and a sign that no list holds is learned here.
        kept = any_sign(rng) + any_sign(rng)
        return kept if not is_held(kept) else words[0]
    return rng.choice(words)


FORMS = [
    "K",
    "K",
    "O",
    "P",
    "K和O",
    "K和L",
    "P的K",
    "K在P",
    "K找O",
    "TK",
    "T的K和O",
    "P里的O",
    "会飞的K",
    "迷路的K",
    "K、L和O",
    "K去P",
    "K的O",
    "住在P的K",
    "K的朋友L",
    "P旁边的O",
]
LINKS = ["[k]看见[o]", "[k]买了[o]", "[k]喜欢[o]", "[k]离开[p]", "[k]住在[p]", "[k]画[o]", "[k]送给[l]一个[o]"]
LINKS += [
    "[p]里的[k]",
    "[p]下面的[o]",
    "[k]帮助[l]",
    "[k]忘了[o]",
    "[k]走进[p]",
    "[k]想要[o]",
    "[k]梦见[p]",
    "[o]不见了",
]
LINKS += [
    "爱[o]的[k]",
    "没有[o]的[k]",
    "[p]上的[k]和[o]",
    "[k]教[l]",
    "两个[o]",
    "[k]第一次去[p]",
    "[k]从[p]回来",
    "怕[l]的[k]",
]
FORMS += [re.sub(r"\[(\w)\]", lambda m: m[1].upper(), link) for link in LINKS]
FORMS_HELD = ["想家的K", "P边上的K", "K丢了O", "K带着O", "K遇到L"]


MADE = 0.75
"""Share of the training stories whose topic and plot are put together."""


def story_zh(rng: random.Random, held: bool) -> Case:
    """A short story on a topic of nouns."""
    if not held and rng.random() < MADE:
        return made_story_zh(rng)
    form = rng.choice(FORMS_HELD if held else FORMS)
    words = {
        "K": noun_zh(rng, "zhbeast", held),
        "L": noun_zh(rng, "zhbeast", held),
        "O": noun_zh(rng, "zhthing", held),
        "P": noun_zh(rng, "zhplace", held),
        "T": rng.choice(load().words["zhtrait"]),
    }
    while words["L"] == words["K"]:
        words["L"] = noun_zh(rng, "zhbeast", held and len(load().words["zhbeast"]) > 60)
    must = [words[mark] for mark in "KLOP" if mark in form]
    topic = re.sub("[KLOPT]", lambda m: words[m.group()], form)
    values = {"k": words["K"], "l": words["L"], "o": words["O"], "p": words["P"], "t": words["T"]}
    values["c"] = "个" if words["K"] in PEOPLE or not is_animal(words["K"]) else "只"
    values["n"], values["m"] = rng.sample(load().words["zhname"], 2)
    plot = rng.choice([row["beats"] for row in rows_zh()])
    lines = [fill(rng.choice(beat), rng, values) for beat in plot]
    if rng.random() < 0.8:
        lines.insert(0, rng.choice(WHOLE).replace("[t]", topic))
    text = "".join(lines)
    for word in must:
        if word not in text:
            lines.insert(1, rng.choice(["那里还有[w]。", "大家都知道[w]。", "故事要从[w]说起。"]).replace("[w]", word))
            text = "".join(lines)
    check = "".join(rf"(?=[\s\S]*{re.escape(w)})" for w in must)
    if not held and rng.random() < 0.1:
        return plain("", text, "story_zh", check)
    return ask(wording("story_zh", rng, held, {"t": topic}), text, "story_zh", check, check="story")


_ROWS: list[dict] = []


def rows_zh() -> list[dict]:
    """The Chinese plots, read once."""
    if not _ROWS:
        _ROWS.extend(rows("plots_zh.jsonl"))
    return _ROWS


ATTRIBUTES = {
    "zhcity": (
        ["我住在[v]。", "我来自[v]。", "我家在[v]。"],
        ["我住在哪里？", "我来自哪里？", "我家在哪儿？", "我住在哪个城市？"],
        "你住在[v]。",
    ),
    "zhage": (
        ["我今年[v]岁。", "我[v]岁了。"],
        ["我几岁了？", "我今年多大？", "我多少岁？", "你记得我的年龄吗？"],
        "你今年[v]岁。",
    ),
    "zhhobby": (
        ["我喜欢[v]。", "我的爱好是[v]。"],
        ["我喜欢什么？", "我的爱好是什么？", "你记得我的爱好吗？"],
        "你喜欢[v]。",
    ),
    "zhfood": (
        ["我最爱吃[v]。", "我喜欢吃[v]。"],
        ["我喜欢吃什么？", "我最爱吃什么？", "你知道我爱吃什么吗？"],
        "你喜欢吃[v]。",
    ),
    "zhjob": (
        ["我是一名[v]。", "我的工作是[v]。"],
        ["我是做什么的？", "我的工作是什么？", "你记得我的职业吗？"],
        "你的工作是[v]。",
    ),
    "zhname": (
        ["我的好朋友叫[v]。", "我有个朋友叫[v]。"],
        ["我的朋友叫什么？", "我的好朋友是谁？", "我朋友的名字是什么？"],
        "你的好朋友叫[v]。",
    ),
}


def _value(rng: random.Random, key: str) -> str:
    if key == "zhage":
        return str(rng.randint(5, 90))
    return rng.choice(load().countries)["capital_zh"] if key == "zhcity" else rng.choice(load().words[key])


def attributes_zh(rng: random.Random, held: bool) -> Case:
    """What the user told about himself, asked for after some turns."""
    keys = rng.sample(list(ATTRIBUTES), rng.randint(1, 4))
    if {"zhhobby", "zhfood"} <= set(keys):
        keys.remove("zhfood")
    values = {k: _value(rng, k) for k in keys}
    messages = []
    for key in keys:
        tell, _, answer = ATTRIBUTES[key]
        said = rng.choice(tell).replace("[v]", values[key])
        reply = rng.choice(["好的，我记住了。", "我记住了：" + answer.replace("[v]", values[key])])
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
        if rng.random() < 0.3:
            messages += [dict(m) for m in table_zh(rng, False).messages]
    key = rng.choice(keys)
    _, asks, answer = ATTRIBUTES[key]
    messages += [
        {"role": "user", "content": asks[-1] if held else rng.choice(asks[:-1])},
        {"role": "assistant", "content": answer.replace("[v]", values[key])},
    ]
    return Case(suite="memory_zh", messages=messages, must=re.escape(values[key]))


CLAUSES = {
    "年龄": ("age", "zhage", ["今年[v]岁", "[v]岁"]),
    "城市": ("city", "zhcity", ["住在[v]", "来自[v]"]),
    "爱好": ("hobby", "zhhobby", ["喜欢[v]", "爱好[v]"]),
    "职业": ("job", "zhjob", ["是一名[v]", "当[v]"]),
}
ASK_JSON = [
    "请提取[k]，用JSON表示：[s]",
    "[s]请用JSON输出[k]。",
    "从句子中提取[k]，返回JSON：[s]",
    "用JSON写出[k]：[s]",
    "把[k]写成JSON：[s]",
    "提取[k]为JSON。[s]",
    "[s]\n返回包含[k]的JSON。",
    "请以JSON格式给出[k]：[s]",
]


def json_zh(rng: random.Random, held: bool) -> Case:
    """Fields of a Chinese sentence as JSON, with Chinese or English keys."""
    english = rng.random() < 0.4
    name = rng.choice(load().words["zhname"])
    fields: dict[str, object] = {"name" if english else "姓名": name}
    parts = []
    for key in rng.sample(list(CLAUSES), rng.randint(1, 3)):
        en, listing, forms = CLAUSES[key]
        value = _value(rng, listing)
        fields[en if english else key] = int(value) if value.isdigit() else value
        parts.append(rng.choice(forms).replace("[v]", value))
    keys = list(fields)
    listed = keys[0] if len(keys) == 1 else "、".join(keys[:-1]) + "和" + keys[-1]
    form = "请把[k]整理成JSON：[s]" if held else rng.choice(ASK_JSON)
    user = form.replace("[k]", listed).replace("[s]", name + "，".join(parts) + "。")
    return ask(user, json.dumps(fields, ensure_ascii=False), "json", "", check="json", expect=fields)


def small_zh(rng: random.Random, held: bool) -> Case:
    """Any short Chinese task that is no sum and no capital."""
    pick = rng.random()
    if pick < 0.35:
        return table_zh(rng, held)
    if pick < 0.5:
        return translation_zh(rng, held)
    if pick < 0.6:
        return larger_zh(rng, held)
    return attributes_zh(rng, held) if pick < 0.85 else json_zh(rng, held)
