"""Chinese plots put together, and topics for them. Owns: wide lists, beats as in `story_parts`. Knows no request.

Each beat has a pool of its own, and nearly every sentence names what the topic tells.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import lru_cache

from authored_data import fill, load, rows
from vocabulary import any_sign, is_held

LIVING, THING, PLACE = "zhbeast", "zhthing", "zhplace"
ORDER = [
    ("open", 1.0),
    ("day", 0.4),
    ("wish", 1.0),
    ("why", 0.35),
    ("block", 1.0),
    ("try", 0.7),
    ("fail", 0.35),
    ("helper", 0.9),
    ("talk", 0.4),
    ("plan", 0.5),
    ("turn", 1.0),
    ("gain", 1.0),
    ("thanks", 0.35),
    ("end", 1.0),
]
"""The beats in their order, and how often each is told."""


@lru_cache(maxsize=1)
def _parts() -> dict[str, list[str]]:
    return {row["part"]: row["texts"] for row in rows("story_parts_zh.jsonl") if "texts" in row}


@lru_cache(maxsize=1)
def _stops() -> list[dict]:
    return [row for row in rows("story_parts_zh.jsonl") if "names" in row]


@lru_cache(maxsize=4)
def _listed(listing: str) -> list[str]:
    """The nouns of a role that training may use: the short list and the long one, without what is held out."""
    w = load().words
    more = [*w[f"{listing}.more"], *(w["zhperson.more"] if listing == LIVING else [])]
    return [n for n in dict.fromkeys([*w[listing], *more]) if not is_held(n)]


@lru_cache(maxsize=1)
def held_nouns() -> frozenset[str]:
    """The nouns that only the evaluation may use."""
    return frozenset(n for listing in (LIVING, THING, PLACE) for n in load().words[listing] if is_held(n))


WHOLE = [
    "这是一个关于[t]的故事。",
    "你听过[t]的故事吗？",
    "大家都爱听[t]的故事。",
    "下面讲[t]的故事。",
    "今天的故事是[t]。",
]
WHOLE += ["奶奶讲过[t]的故事。", "故事的名字叫《[t]》。", "说起[t]，故事很长。", "很多人都知道[t]。", "我来讲[t]。"]


PEOPLE = frozenset(
    (
        "公主",
        "王子",
        "农夫",
        "老师",
        "医生",
        "厨师",
        "渔夫",
        "国王",
        "女孩",
        "男孩",
        "老人",
        "画家",
        "宇航员",
        "木匠",
        "机器人",
        "牧羊人",
    )
)


def is_animal(noun: str) -> bool:
    """Whether a noun is an animal of the list."""
    return noun in load().words["zhbeast"] and noun not in PEOPLE


def counts_as_animal(noun: str) -> bool:
    """Whether a noun of the wide lists is an animal, also with a word in front."""
    words = load().words
    return any(noun.endswith(n) for n in (*words["zhbeast"], *words["zhbeast.more"]) if n not in PEOPLE)


def wide_noun(rng: random.Random, listing: str) -> str:
    """A noun of the wide list of a role; some are put together, and some are signs that make no word."""
    pick = rng.random()
    if pick < 0.22:
        made = any_sign(rng) + any_sign(rng)
    elif pick < 0.34:
        made = rng.choice(rng.choice(_listed(THING))) + rng.choice(_listed(listing))
    else:
        return rng.choice(_listed(listing))
    return made if made not in held_nouns() and not is_held(made) else rng.choice(_listed(listing))


def looked(rng: random.Random, noun: str, listing: str, share: float) -> str:
    """A noun with a word for its looks in front, now and then."""
    if rng.random() >= share:
        return noun
    words = load().words
    if listing == LIVING:
        return f"{rng.choice(words['zhtrait.more'])}的{noun}"
    return rng.choice(words["zhplace.adj" if listing == PLACE else "zhadj"]) + noun


@dataclass(frozen=True)
class TopicZh:
    """A topic, the words a story on it must hold, and its parts: `k`, `l` live, `o` a thing, `p` a place, `n` named."""

    phrase: str
    must: list[str]
    given: dict[str, str]


WHO = [
    "[k]",
    "[k]",
    "一个[k]",
    "住在[p]的[k]",
    "[p]里的[k]",
    "[k]和[l]",
    "没有[o]的[k]",
    "带着[o]的[k]",
    "叫[n]的[k]",
    "[k][n]",
]
WHO += ["找[o]的[k]", "从[p]来的[k]", "害怕[l]的[k]", "想要[o]的[k]", "[l]的朋友[k]"]
DOES = ["[v][o]", "[v][o]", "去[p]", "在[p][v][o]", "想[e]", "学[e]", "不会[e]", "遇到[l]", "帮[l][v][o]", "送给[l][o]"]
DOES += ["从[p]带回[o]", "梦见[o]", "害怕[o]", "离开[p]", "和[l]一起去[p]", "忘了[o]", "想念[p]", "把[o]借给[l]"]
WHAT = [
    "[o]",
    "[o]和[k]",
    "[p]的[o]",
    "[p]里的[o]",
    "[k]的[o]",
    "[o]、[k]和[p]",
    "[p]",
    "[p]的秘密",
    "[o]的秘密",
    "[k]、[l]和[o]",
]
WHAT += [
    "[p]的一天",
    "[o]从哪里来",
    "谁拿走了[o]",
    "[p]为什么没有[o]",
    "[k]为什么怕[l]",
    "两个[o]",
    "最后一个[o]",
    "[k]的梦",
]


def topic_zh(rng: random.Random) -> TopicZh:
    """A topic of one to four parts, put together from who, what somebody does, and what it is about."""
    pick = rng.random()
    form = rng.choice(WHO) if pick < 0.25 else rng.choice(WHAT) if pick < 0.55 else rng.choice(WHO) + rng.choice(DOES)
    given: dict[str, str] = {}
    must: list[str] = []

    def put(match: re.Match[str]) -> str:
        mark = match[1]
        if mark in given:
            return given[mark]
        words = load().words
        if mark in "ve":
            return rng.choice(words["zhverb" if mark == "v" else "zhact"])
        if mark == "n":
            given["n"] = name_zh(rng)
            must.append(given["n"])
            return given["n"]
        listing = {"k": LIVING, "l": LIVING, "o": THING, "p": PLACE}[mark]
        noun = wide_noun(rng, listing)
        while noun in given.values():
            noun = wide_noun(rng, listing)
        given[mark] = noun
        must.append(noun)
        return looked(rng, noun, listing, 0.2)

    return TopicZh(re.sub(r"\[(\w)\]", put, form), must, given)


def name_zh(rng: random.Random) -> str:
    """A name: of the lists, or any two signs."""
    if rng.random() < 0.2:
        return any_sign(rng) + any_sign(rng)
    return rng.choice(load().words["zhname.more" if rng.random() < 0.7 else "zhname"])


PEOPLE_PRONOUN = ("他", "她")
DEEDS = ["去[p2]", "走到[p2]", "在[p2]住一夜", "去[p2]看日出", "把[o]带到[p2]"]
TOWARDS = ["和[m]做朋友", "请[m]吃[f]", "把[o]送给[m]", "让[m]笑一笑", "和[m]一起去[p2]"]


def _deed(rng: random.Random, given: dict[str, str]) -> str:
    """What the hero wants to do, with the thing of the topic where it has one."""
    words = load().words
    pick = rng.uniform(0.0 if "o" in given or not given else 0.4, 1.0)
    if pick < 0.6:
        return rng.choice(words["zhverb"]) + "[o]"
    if pick < 0.76:
        return "学会" + rng.choice(words["zhact"])
    return rng.choice(DEEDS if pick < 0.9 else TOWARDS)


def dressed_zh(rng: random.Random, given: dict[str, str], counts: bool) -> dict[str, str]:
    """The parts of a story: those of its topic, and others; `counts`: the hero is counted as an animal."""
    words = load().words
    other = wide_noun(rng, LIVING)
    values = {"k": wide_noun(rng, LIVING), "l": other, "o": wide_noun(rng, THING), "p": wide_noun(rng, PLACE), **given}
    values["n"] = given.get("n") or name_zh(rng)
    values["m"] = name_zh(rng)
    while values["m"] == values["n"]:
        values["m"] = name_zh(rng)
    he = "它" if counts else rng.choice(PEOPLE_PRONOUN)
    values |= {"c": "只" if counts else "个", "cl": "位", "c2": rng.choice(["个", "位"]), "m2": he, "m3": values["n"]}
    values["t"] = rng.choice(words["zhtrait.more" if rng.random() < 0.7 else "zhtrait"])
    values["s"] = rng.choice(["春天", "夏天", "秋天", "冬天"])
    values["f"] = rng.choice(words["zhfood.more" if rng.random() < 0.6 else "zhfood"])
    values["a"] = rng.choice(words["zhadj"])
    values["u"], values["e"] = wide_noun(rng, THING), rng.choice(words["zhact"])
    values["x"], values["x2"] = wide_noun(rng, LIVING), wide_noun(rng, THING)
    values["p2"] = values["p"] if rng.random() < 0.5 else wide_noun(rng, PLACE)
    row = rng.choice(_stops())
    for mark, text in (("d", _deed(rng, given)), ("b", rng.choice(row["names"]))):
        values[mark] = fill(text, rng, values)
    values["dd"] = values["d"]
    values["bd"], values["bg"] = (fill(rng.choice(row[pool]), rng, values) for pool in ("does", "gone"))
    values["b3"] = re.sub("^一", "那", values["b"])
    return values


def told_zh(rng: random.Random, pool: list[str], values: dict[str, str]) -> str:
    """A sentence of a beat; who is named is often told with what he is, so that the topic's word comes back."""
    text = rng.choice(pool)
    named = {}
    if "[k]" not in text and values["n"] != values["k"] and rng.random() < 0.35:
        named["n"] = rng.choice([values["k"], f"{values['k']}{values['n']}"])
    if "[l]" not in text and rng.random() < 0.45:
        named["m"] = rng.choice([values["l"], f"{values['l']}{values['m']}"])
    return fill(text, rng, values | named)


def beats_zh(rng: random.Random) -> list[list[str]]:
    """The pools of a plot, in the order in which they are told."""
    return [_parts()[part] for part, share in ORDER if rng.random() < share]
