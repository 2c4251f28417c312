"""Sums of two and more steps. Owns: accounts that go up and down, change from a note, parts of wholes, later questions
on an earlier result. Knows no tokens.

Every account is answered by its expression, one operation at a time, as in `skill_expression`.
"""

from __future__ import annotations

import random
import re

from authored_data import load
from later_parts import LATER_HELD, LATER_ZH, next_step, said_later, said_later_zh, said_shortly
from phrasing import occasion
from render import Case
from rest_parts import rate, rest
from scenes import COUNTED
from skill_expression import Node, ends_with, value, worked
from skill_facts import ask
from skill_time import VEHICLES
from step_parts import composed_steps
from vocabulary import word

# What goes up and down: how it begins, what makes it more, what makes it less, what is asked.
Account = tuple[list[str], list[str], list[str], list[str]]
RIDE: Account = (
    [
        "A [v] has {a} passengers",
        "There are {a} people on the [v]",
        "{a} people sit in the [v]",
        "A [v] with {a} guests",
    ],
    ["{b} get on", "{b} more get on", "{b} people board", "{b} step in", "{b} join"],
    ["{b} get off", "{b} leave", "{b} people step out", "{b} of them go out", "{b} get out"],
    ["How many are on the [v]", "How many people are left", "How many ride on", "How many passengers now"],
)
MONEY: Account = (
    [
        "I have {a} euros",
        "I had {a} dollars",
        "[N] has {a} euros",
        "There are {a} coins in the purse",
        "I start with {a} euros",
    ],
    ["get {b}", "earn {b}", "find {b}", "win {b}", "am given {b}", "get {b} back", "receive {b} from [N]"],
    [
        "spend {b}",
        "pay {b} for a [t]",
        "buy a [t] for {b}",
        "lose {b}",
        "lend {b} to [N]",
        "give {b} away",
        "need {b} for a [t]",
    ],
    ["How much is left", "How much do I have now", "What is left", "How much remains", "How much money is that"],
)
GOODS: Account = (
    [
        "[N] had {a} [p]",
        "I had {a} [p]",
        "There are {a} [p] in a box",
        "A shop has {a} [p]",
        "We have {a} [p]",
        "{a} [p] lie here",
    ],
    ["got {b} more", "won {b}", "found {b}", "bought {b}", "got {b} from [N]", "added {b}", "collected {b} more"],
    ["lost {b}", "gave {b} away", "ate {b}", "sold {b}", "threw {b} away", "broke {b}", "gave {b} to [N]", "used {b}"],
    ["How many now", "How many [p] are there", "How many are left", "How many [p] is that", "How many in the end"],
)
BIRDS: Account = (
    [
        "There are {a} [z] on a roof",
        "{a} [z] sit in a tree",
        "I see {a} [z]",
        "In the field are {a} [z]",
        "We were {a} people",
    ],
    ["{b} come back", "{b} more arrive", "{b} come", "then {b} join them", "{b} new ones come"],
    ["{b} fly away", "{b} leave", "{b} run off", "{b} go", "then {b} more leave", "{b} hide"],
    ["How many [z]", "How many stay", "How many are there now", "How many are still there", "How many is that"],
)
ZH: Account = (
    ["[M]有{a}个[q]", "盒子里有{a}个[q]", "桌上有{a}个[q]", "店里有{a}个[q]", "我有{a}元"],
    ["又买了{b}个", "又得到{b}个", "又放进{b}个", "又加了{b}个", "捡到{b}个"],
    ["吃了{b}个", "卖了{b}个", "拿走{b}个", "用掉{b}个", "送人{b}个", "丢了{b}个"],
    ["现在有几个", "还剩多少", "一共还有多少", "现在是多少"],
)
RIDE_ZH: Account = (
    ["公交车上有{a}个人", "船上有{a}人", "车上有{a}个乘客", "教室里有{a}个学生", "屋里有{a}个人"],
    ["又来了{b}个", "上来{b}个", "又进来{b}人", "后来来了{b}个"],
    ["走了{b}个", "下去{b}个", "离开{b}人", "出去{b}个"],
    ["现在有多少人", "还有几个人", "还剩几个", "一共有多少人"],
)
ACCOUNTS = [RIDE, MONEY, MONEY, GOODS, GOODS, BIRDS]
QZH = ["苹果", "鸡蛋", "橘子", "气球", "本子", "杯子", "贝壳", "球"]
MZH = ["小明", "小红", "李华", "小丽", "小刚", "王芳", "妈妈"]
HELD_LATER = ["Twenty minutes later", "Some time after that"]


def _plural(rng: random.Random, held: bool) -> str:
    return rng.choice(load().words["fruit.pl"]) if rng.random() < 0.4 else word(rng, "noun", held) + "s"


def _filled(rng: random.Random, text: str, held: bool, fixed: dict[str, str]) -> str:
    """A text with names and things in its places."""
    for mark in ("N", "t", "M"):
        while f"[{mark}]" in text:
            made = (
                rng.choice(MZH)
                if mark == "M"
                else rng.choice(load().words["name"])
                if mark == "N"
                else word(rng, "noun", held)
            )
            text = text.replace(f"[{mark}]", made, 1)
    for mark, made in fixed.items():
        text = text.replace(f"[{mark}]", made)
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def _steps(rng: random.Random, held: bool) -> tuple[str, Node]:
    """Something that goes up and down two or three times."""
    chinese = not held and rng.random() < 0.18
    begins, more, less, asks = rng.choice([ZH, ZH, RIDE_ZH]) if chinese else rng.choice(ACCOUNTS)
    total = rng.randint(5, rng.choice([30, 60, 100]))
    node: Node = total
    parts = [rng.choice(begins).replace("{a}", str(total))]
    for _ in range(rng.choice([2, 2, 2, 3])):
        up = rng.random() < 0.45 or total < 3
        change = rng.randint(1, 40 if up else total - 1)
        node, total = ("+" if up else "-", node, change), total + change if up else total - change
        parts.append(rng.choice(more if up else less).replace("{b}", str(change)))
    fixed = {
        "v": rng.choice(VEHICLES),
        "p": _plural(rng, held),
        "z": rng.choice(load().words["animal"]) + "s",
        "q": rng.choice(QZH),
    }
    question = rng.choice(asks)
    if chinese:
        return _filled(rng, "，".join(parts) + "，" + question + "？", held, fixed), node
    subject = "" if begins is RIDE[0] or begins is BIRDS[0] else "I " if parts[0].startswith("I ") else ""
    events = parts[1:]
    joint = rng.choice([" and ", ", then ", " and then ", ", ", " but then "])
    if subject and rng.random() < 0.7:
        told = f"{parts[0]}. I " + (joint + rng.choice(["", "I "])).join(events)
    elif rng.random() < 0.3:
        told = f"{parts[0]}. " + ". ".join((subject + e)[0].upper() + (subject + e)[1:] for e in events)
    else:
        told = parts[0] + rng.choice([". ", ", ", " and ", ". Then "]) + joint.join(events)
    if held:
        told = told.replace(joint, f". {rng.choice(HELD_LATER)} ", 1)
    return _filled(rng, f"{told}. {question}?", held, fixed), node


PACKED = [
    "[N] has {a} [g] with {b} [p] each",
    "There are {a} [g] of {b} [p]",
    "{a} [g] hold {b} [p] each",
    "I have {a} [g], {b} [p] in each",
]
PACKED += [
    "I buy {a} [g] with {b} [p] in each",
    "A [h] holds {b} [p] and I have {a} of them",
    "{a} times {b} [p] are here",
]
GROUPS = [
    "bags",
    "boxes",
    "baskets",
    "jars",
    "packs",
    "crates",
    "nets",
    "tins",
    "plates",
    "rows",
    "bowls",
    "cartons",
    "sacks",
    "shelves",
]
NOTES = [
    "I pay with {n}",
    "I give {n} euros",
    "I have a note of {n}",
    "I pay with a {n} euro note",
    "and I hand over {n}",
]
BACK = [
    "What do I get back",
    "How much change do I get",
    "How much do I get back",
    "what is the change",
    "How much is left of it",
]
ONE_PRICE = [
    "A [t] costs {p} euros",
    "One [t] is {p} euros",
    "[p] cost {p} euros each",
    "Each [t] costs {p}",
    "I buy {k} [p] for {p} each",
]
MANY = ["I buy {k} of them", "I take {k}", "I need {k}", "We want {k}", "{k} of them go into my bag"]


def _packed(rng: random.Random, held: bool) -> tuple[str, Node]:
    """Groups of the same size, with some more or less of them."""
    a, b = rng.randint(2, 10), rng.randint(2, 12)
    up = rng.random() < 0.4
    c = rng.randint(1, 20 if up else min(20, a * b - 1))
    _, more, less, asks = GOODS
    change = rng.choice(more if up else less).replace("{b}", str(c))
    text = rng.choice(PACKED).replace("{a}", str(a)).replace("{b}", str(b))
    who = " " + rng.choice(["[N]", "I", "Somebody", "We"]) + " "
    text += rng.choice([".", ","]) + who + change + f". {rng.choice(asks)}?"
    group = rng.choice(GROUPS)
    return _filled(rng, text, held, {"p": _plural(rng, held), "g": group, "h": group.rstrip("s")}), (
        "+" if up else "-",
        ("*", a, b),
        c,
    )


def _change(rng: random.Random, held: bool) -> tuple[str, Node]:
    """What comes back from a note: of some of one price, or of two things."""
    if rng.random() < 0.5:
        k, p = rng.randint(2, 9), rng.randint(2, 12)
        note = next((n for n in (10, 20, 50, 100, 200) if n >= k * p), 200)
        text = rng.choice(ONE_PRICE)
        text = text if "{k}" in text else f"{text}. {rng.choice(MANY)}"
        node: Node = ("-", note, ("*", k, p))
        text = text.replace("{k}", str(k)).replace("{p}", str(p))
    else:
        p, k = rng.randint(1, 60), rng.randint(1, 39)
        note = next(n for n in (20, 50, 100) if n >= k + p)
        forms = [
            "A [t] costs {p}, a [t] {k}",
            "I buy a [t] for {p} and a [t] for {k} euros",
            "[t]: {p} euros, [t]: {k} euros",
        ]
        forms += ["The [t] is {p} and the [t] is {k}", "I take a [t] ({p} euros) and a [t] ({k} euros)"]
        text = rng.choice(forms).replace("{k}", str(k)).replace("{p}", str(p))
        node = ("-", note, ("+", p, k))
    text += f". {rng.choice(NOTES).replace('{n}', str(note))}. {rng.choice(BACK)}?"
    return _filled(rng, text, held, {"p": _plural(rng, held)}), node


def _shared(rng: random.Random, held: bool) -> tuple[str, Node]:
    """Equal parts, of which some go or come, or of a whole that is put together first."""
    k, each = rng.randint(2, 9), rng.randint(2, 12)
    if rng.random() < 0.5:
        gone = rng.randint(1, each - 1)
        forms = [
            "{k} friends share {a} [p] and each eats {c}. How many does each have left?",
            "{a} [p] are split by {k}. Everybody loses {c}. How many has each?",
        ]
        forms += [
            "{k} children share {a} [p]. One of them gives {c} away. How many has that child?",
            "{a} [p] in {k} equal rows, {c} of a row are bad. How many good ones in that row?",
        ]
        node: Node = ("-", ("/", k * each, k), gone)
        text = rng.choice(forms).replace("{k}", str(k)).replace("{a}", str(k * each)).replace("{c}", str(gone))
    else:
        part = rng.randint(1, k * each - 1)
        forms = [
            "{x} red and {y} blue [p] are shared by {k}. How many for each?",
            "We have {x} [p] and get {y} more. {k} people share them. How many each?",
        ]
        forms += [
            "[N] brings {x} [p] and [N] brings {y}. There are {k} of us. How many does each get?",
            "The food is {x} euros and the drinks are {y}. We are {k}. What does each pay?",
        ]
        node = ("/", ("+", part, k * each - part), k)
        text = rng.choice(forms).replace("{x}", str(part)).replace("{y}", str(k * each - part)).replace("{k}", str(k))
    return _filled(rng, text, held, {"p": _plural(rng, held)}), node


MADE = 0.6
"""Share of the training sums that are put together."""


def two_steps(rng: random.Random, held: bool = False) -> Case:
    """A story of at least two operations."""
    if not held and rng.random() < MADE:
        text, node = composed_steps(rng)
    else:
        make = rng.choices([_steps, _packed, _change, _shared], [50, 18, 18, 14])[0]
        text, node = make(rng, held)
    text = text[0].upper() + text[1:]
    if not held and rng.random() < 0.08 and text.isascii():
        text = f"{occasion(rng)} {text}"
    if not held and rng.random() < 0.15:
        text = re.sub(r"(?<![\d:])\b([2-9]|1[0-2])\b(?!\d)(?! euro)", lambda m: COUNTED[int(m[1]) - 1], text)
    return ask(text, worked(node) + ("。" if "？" in text else "."), "two_steps", ends_with(value(node)))


def rests(rng: random.Random) -> Case:
    """What is left of something, or so much a day for some time."""
    text, node = (rest if rng.random() < 0.45 else rate)(rng)
    if rng.random() < 0.08 and text.isascii():
        text = f"{occasion(rng)} {text}"
    return ask(text, worked(node) + ("。" if "？" in text else "."), "word_problem", ends_with(value(node)))


FIRST = ["What is {e}?", "{e}", "{e}?", "How much is {e}?", "Compute {e}.", "{e} =", "what's {e}", "Tell me {e}."]
FIRST_ZH = ["{e}是多少？", "{e}等于几？", "算一下{e}"]
TOLD = [
    "Keep this number: {n}.",
    "My number is {n}.",
    "Remember the number {n}.",
    "Let us start with {n}.",
    "I think of {n}.",
]


def follow_up(rng: random.Random, held: bool = False, made: float = MADE) -> Case:
    """A question, and one to three more on the result of the one before; `made` is the share that is put together."""
    chinese = not held and rng.random() < 0.2
    sign = rng.choice("++-*/")
    a, b = rng.randint(2, 60), rng.randint(2, 40)
    if sign == "*":
        a, b = rng.randint(2, 12), rng.randint(2, 12)
    if sign == "/":
        b = rng.randint(2, 12)
        a = b * rng.randint(1, 12)
    a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
    node: Node = (sign, a, b)
    text = rng.choice(FIRST_ZH if chinese else FIRST).replace("{e}", worked(node).split(" = ")[0])
    if rng.random() < 0.25 and not chinese:
        text, node = (_packed if rng.random() < 0.4 else _steps)(rng, held)
        if not held and made and rng.random() < made:
            text, node = composed_steps(rng)
        chinese = "？" in text
    end = "。" if chinese else "."
    case = ask(text, worked(node) + end, "follow_up", "")
    turns = rng.choice([1, 1, 2, 3])
    if not held and not chinese and rng.random() < 0.12:
        # A number that is only told is the first result.
        node, turns = a, max(turns, 2)
        case = ask(
            rng.choice(TOLD).replace("{n}", str(a)),
            rng.choice(["Okay, I will remember that.", "Noted."]),
            "follow_up",
            "",
        )
    for turn in range(turns):
        if turn and not held and rng.random() < 0.12:
            case.messages += ask(rng.choice(["Thanks.", "ok", "Good."]), "You are welcome!", "", "").messages
        now = value(node)
        kind, node = next_step(rng, now)
        if kind == "square" and (held or chinese):
            kind, node = "+", ("+", now, 5)
        if held and turn == turns - 1:
            said = rng.choice(LATER_HELD[kind])
        elif chinese:
            said = said_later_zh(rng, kind) if made else rng.choice(LATER_ZH[kind])
        else:
            said = said_later(rng, kind) if made and not held else said_shortly(rng, kind)
        said = said.replace("{n}", str(node[2] if isinstance(node, tuple) else ""))
        case.messages += ask(said, worked(node) + end, "", "").messages
    case.must = ends_with(value(node))
    return case
