"""Sums of two steps put together. Owns: accounts of anything with any verbs, change, two prices. Knows no tokens.

An account of the list has one of four beginnings. Here who has what, where it is, what makes it more or less and how it
is asked for are drawn, in both languages, and the note of a purchase comes first as often as last.
"""

from __future__ import annotations

import random
import re

from authored_data import load
from grammar import tidy
from rest_parts import three
from skill_expression import Node
from story_parts_zh import THING, name_zh, wide_noun
from topics import plural
from vocabulary import word

WHO = ["I", "We", "[N]", "[N]", "[N]", "My [kin]", "The [job]", "A [job]", "[N] and [N2]", "Our [kin]"]
KIN = "mother father sister brother aunt uncle cousin neighbour boss friend teacher daughter son class team club family"
HAS = [
    "has",
    "keeps",
    "owns",
    "starts with",
    "brings",
    "carries",
    "counts",
    "sees",
    "stores",
    "holds",
    "saves",
    "begins with",
]
HAD = [
    "had",
    "kept",
    "owned",
    "started with",
    "brought",
    "carried",
    "counted",
    "saw",
    "stored",
    "held",
    "saved",
    "began with",
]
MORE = [
    "got",
    "found",
    "bought",
    "won",
    "received",
    "added",
    "collected",
    "made",
    "picked",
    "earned",
    "borrowed",
    "caught",
]
MORE += ["ordered", "was given", "discovered", "grew", "baked", "drew", "fetched", "took in", "unpacked", "was sent"]
LESS = [
    "lost",
    "sold",
    "ate",
    "broke",
    "gave away",
    "used",
    "threw away",
    "lent",
    "forgot",
    "dropped",
    "burned",
    "wasted",
]
LESS += [
    "hid",
    "donated",
    "returned",
    "spoiled",
    "sent off",
    "put aside",
    "left behind",
    "handed over",
    "missed",
    "swapped",
]
COME = [
    "come",
    "arrive",
    "appear",
    "are added",
    "join",
    "are brought",
    "are put in",
    "get on",
    "enter",
    "fall in",
    "turn up",
]
GO = [
    "leave",
    "are taken out",
    "disappear",
    "get off",
    "run away",
    "break",
    "are sold",
    "are eaten",
    "fall out",
    "are lost",
]
THEN = [
    ", then ",
    " and ",
    ", and then ",
    ". Then ",
    ". Later ",
    ", but ",
    "; ",
    ". After that ",
    ". In the evening ",
    ", next ",
]
LEFT = [
    "How many are left?",
    "How many are there now?",
    "How many is that?",
    "How many in the end?",
    "What is the number now?",
]
LEFT += [
    "How many [p] remain?",
    "How many [p] are there?",
    "How many [p] now?",
    "Count the [p].",
    "How many [p] is that now?",
]
LEFT += [
    "How large is the rest?",
    "What remains?",
    "And now?",
    "How many [p] after all that?",
    "Tell me the number of [p].",
]


def _many(rng: random.Random) -> str:
    """Things that can be counted."""
    return rng.choice(load().words["fruit.pl"]) if rng.random() < 0.25 else plural(word(rng, "noun", False))


def _filled(rng: random.Random, text: str, things: str) -> str:
    names = rng.sample(load().words["name"], 2)
    slots = {"N": names[0], "N2": names[1], "p": things, "kin": rng.choice(KIN.split())}
    slots |= {"job": rng.choice(load().words["job"]), "x": word(rng, "noun", False), "y": word(rng, "noun", False)}
    done = re.sub(r"\[(\w+)\]", lambda m: slots[m[1]], text)
    return tidy(done)


def _changes(rng: random.Random, total: int) -> list[tuple[str, int]]:
    """Two or three changes that never fall below zero."""
    out = []
    for _ in range(rng.choice([2, 2, 2, 3])):
        sign = "+" if rng.random() < 0.48 or total < 3 else "-"
        change = rng.randint(1, 40 if sign == "+" else total - 1)
        total += change if sign == "+" else -change
        out.append((sign, change))
    return out


def account(rng: random.Random) -> tuple[str, Node]:
    """Something that goes up and down: somebody's, or somewhere."""
    total = rng.randint(4, rng.choice([20, 50, 100]))
    changes = _changes(rng, total)
    node: Node = total
    for sign, change in changes:
        node = (sign, node, change)
    things = _many(rng)
    if rng.random() < 0.55:
        who = rng.choice(WHO)
        past = rng.random() < 0.6 or who in ("I", "We", "[N] and [N2]")
        text = f"{who} {rng.choice(HAD if past else HAS)} {total} [p]"
        he = "I" if who == "I" else "we" if who == "We" else "they" if " and " in who else rng.choice(["she", "he"])
        lines = []
        for sign, change in changes:
            verb = rng.choice(MORE if sign == "+" else LESS)
            verb = verb.replace("was ", "were ") if he in ("we", "they") else verb
            head, _, tail = verb.partition(" ")
            more = rng.choice([" more", ""] if sign == "+" else [" of them", "", ""])
            gone = (
                f"{verb} {change}{more}" if head in ("was", "were") or tail == "in" else f"{head} {change}{more} {tail}"
            )
            lines.append(f"{he} {gone.strip()}")
    else:
        spot = rng.choice(
            ["in a [x]", "on the [x]", "in the [x]", "behind the [x]", "at the [x]", "under a [x]", "near the [x]"]
        )
        text = rng.choice([f"There are {total} [p] {spot}", f"{total} [p] lie {spot}", f"{spot} there are {total} [p]"])
        lines = []
        for sign, change in changes:
            more = rng.choice([" more", "", " others"]) if sign == "+" else rng.choice(["", " of them", ""])
            lines.append(f"{change}{more} {rng.choice(COME if sign == '+' else GO)}")
    for line in lines:
        text += rng.choice(THEN if text.count(".") < 2 else [". Then ", ". "]) + line
    return _filled(rng, f"{text}. {rng.choice(LEFT)}", things), node


PRICED = [
    "one [x] costs {p} euros",
    "a [x] is {p} euros",
    "each [x] is {p}",
    "the price of a [x] is {p} euros",
    "{p} euros a [x]",
]
TAKEN = ["buy {k}", "take {k} of them", "need {k}", "want {k}", "order {k}", "pay for {k}", "put {k} into the basket"]
NOTE = [
    "pay with a note of {n}",
    "give {n} euros",
    "have {n} euros",
    "hand over {n}",
    "put {n} on the table",
    "bring {n} euros",
]
BACK = [
    "How much do I get back?",
    "What is my change?",
    "What is left?",
    "How much remains of it?",
    "How much comes back?",
]
BACK += ["What do I keep?", "How much of it is left?", "What will I get back?", "How much money is left then?"]


def change(rng: random.Random) -> tuple[str, Node]:
    """What comes back from a note that is told before or after the purchase."""
    k, p = rng.randint(2, 9), rng.randint(2, 12)
    note = rng.choice([n for n in (10, 20, 50, 100, 200) if n >= k * p][:2])
    node: Node = ("-", note, ("*", k, p))
    priced, taken, paid = (rng.choice(pool) for pool in (PRICED, TAKEN, NOTE))
    if rng.random() < 0.35:
        q = rng.randint(1, max(1, note - p)) if note > p else 1
        node = ("-", note, ("+", p, q))
        bought = rng.choice(
            [
                "a [x] for {p} and a [y] for {q}",
                "a [x] ({p} euros) and a [y] ({q} euros)",
                "one [x] at {p}, one [y] at {q}",
            ]
        )
        buy = f"I {rng.choice(['buy', 'take', 'order', 'want'])} {bought}".replace("{q}", str(q))
    else:
        buy = rng.choice([f"{priced}, and I {taken}", f"I {taken}; {priced}", f"{priced}. I {taken}"])
    pay = f"I {paid}"
    first, last = (pay, buy) if rng.random() < 0.5 else (buy, pay)
    text = f"{first}{rng.choice(['. ', '. ', ' and ', ', '])}{last}. {rng.choice(BACK)}"
    for mark, number in (("{p}", p), ("{k}", k), ("{n}", note)):
        text = text.replace(mark, str(number))
    return _filled(rng, text, ""), node


GROUPS = [("adults", "children"), ("big ones", "small ones"), ("men", "women"), ("days", "nights"), ("rooms", "halls")]
GROUPS += [("red ones", "blue ones"), ("hours", "weeks"), ("tickets", "maps"), ("trips", "meals"), ("cars", "bikes")]
ALL = [
    "What do they pay?",
    "How much is it in all?",
    "What is the total?",
    "How much together?",
    "What does it cost?",
    "The sum?",
]


def two_prices(rng: random.Random) -> tuple[str, Node]:
    """Some of one price and some of another: both count."""
    a, b, c, d = rng.randint(2, 9), rng.randint(2, 12), rng.randint(2, 9), rng.randint(2, 12)
    one, two = rng.choice(GROUPS) if rng.random() < 0.4 else (_many(rng), _many(rng))
    forms = ["{a} {one} at {b} euros and {c} {two} at {d} euros.", "{a} {one} for {b} each, {c} {two} for {d} each."]
    forms += [
        "{one} cost {b} and {two} cost {d}. We are {a} {one} and {c} {two}.",
        "I need {a} {one} ({b} each) and {c} {two} ({d} each).",
    ]
    forms += [
        "One pays {b} for {one} and {d} for {two}. There are {a} {one} and {c} {two}.",
        "{a} times {b} for {one}, {c} times {d} for {two}.",
        "{one} are {b} euros a piece, {two} {d}. I take {a} of the first and {c} of the others.",
        "I want {a} {one} and {c} {two}. {one} cost {b} each, {two} {d}.",
        "{b} euros is the price of {one}, {d} that of {two}; {a} and {c} of them are bought.",
    ]
    text = rng.choice(forms)
    node: Node = ("+", ("*", a, b), ("*", c, d))
    slots = {"a": str(a), "b": str(b), "c": str(c), "d": str(d), "one": one, "two": two}
    told = re.sub(r"\{(\w+)\}", lambda m: slots[m[1]], text)
    return _filled(rng, f"{told} {rng.choice(ALL)}", ""), node


ZH_MORE = "买了 又买了 得到 又得到 捡到 找到 放进 收到 做了 借来 赢了 加了 拿来 摘了 带来"
ZH_LESS = "吃了 卖了 用了 送了 丢了 拿走 借出 扔了 弄坏 给了别人 换掉 藏了 忘了 分给朋友"
ZH_LEFT = [
    "现在有几个？",
    "还剩多少？",
    "还剩几个？",
    "一共还有多少？",
    "现在是多少？",
    "最后有几个？",
    "还有多少[p]？",
    "剩下几个[p]？",
]


def account_zh(rng: random.Random) -> tuple[str, Node]:
    """The same in Chinese, with any thing, place and name."""
    total = rng.randint(4, rng.choice([20, 50, 100]))
    node: Node = total
    thing, unit = wide_noun(rng, THING), rng.choice("个个个只本张件")
    who = rng.choice(
        ["我", "我们", name_zh(rng), name_zh(rng), "老师", "妈妈", "店里", f"{wide_noun(rng, THING)}里", "桌上"]
    )
    text = f"{who}{rng.choice(['有', '原来有', '一共有', '本来有'])}{total}{unit}{thing}"
    for sign, change in _changes(rng, total):
        node = (sign, node, change)
        verb = rng.choice((ZH_MORE if sign == "+" else ZH_LESS).split())
        text += f"{rng.choice(['，', '，', '，后来', '，然后', '。', '，接着', '，第二天'])}{verb}{change}{unit}"
    return f"{text}{rng.choice(['，', '。'])}{rng.choice(ZH_LEFT).replace('[p]', thing)}", node


def change_zh(rng: random.Random) -> tuple[str, Node]:
    """What comes back from a note, in Chinese."""
    k, p = rng.randint(2, 9), rng.randint(2, 12)
    note = rng.choice([n for n in (10, 20, 50, 100, 200) if n >= k * p][:2])
    thing, who = wide_noun(rng, THING), rng.choice(["我", name_zh(rng), "妈妈"])
    buy = rng.choice(
        [f"一个{thing}{p}元，{who}买{k}个", f"{who}买了{k}个{thing}，每个{p}元", f"{thing}{p}元一个，{who}要{k}个"]
    )
    pay = rng.choice([f"付了{note}元", f"给了{note}元", f"拿出{note}元", f"有{note}元"])
    both = f"{who}{pay}，{buy}" if rng.random() < 0.5 else f"{buy}，{pay}"
    return f"{both}，{rng.choice(['应找回多少？', '找回多少元？', '还剩多少钱？', '剩下多少？'])}", (
        "-",
        note,
        ("*", k, p),
    )


def composed_steps(rng: random.Random, chinese: float = 0.2) -> tuple[str, Node]:
    """Any of these sums."""
    if rng.random() < chinese:
        return (account_zh if rng.random() < 0.7 else change_zh)(rng)
    return rng.choices([account, change, two_prices, three], [50, 22, 16, 12])[0](rng)
