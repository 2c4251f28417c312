"""Sums as people tell them. Owns: small accounts of money, things and groups, put together; rows of numbers to add.

Each is answered as the plain operation that it is. Knows no tokens.
"""

from __future__ import annotations

import random

from authored_data import load
from render import Case
from skill_expression import answer_of, ends_with, quotient, value, worked
from skill_facts import ask

THINGS = (
    "euros dollars coins books cards marbles stamps tickets eggs candles chairs pens biscuits buttons stickers photos"
)
OWN = ["I had", "I have", "We had", "We have", "{n} had", "{n} has", "There were", "My brother had", "I got", "She had"]
LESS = ["spent {b}", "gave {b} away", "lost {b}", "used {b} of them", "sold {b}", "gave {b} to {n}", "need {b} of them"]
LESS += ["threw {b} away", "lent {b} to a friend", "took {b} out", "paid {b} for lunch", "dropped {b}"]
LEFT = ["How many are left", "What is left", "How many remain", "How much is left", "How many do I still have"]
LEFT += ["How much do I still have", "What remains", "what's left", "so how many now"]
MORE = [
    "got {b} more",
    "bought {b} more",
    "found {b}",
    "was given {b}",
    "won {b}",
    "picked up another {b}",
    "added {b}",
]
MORE += ["then came {b}", "earned {b}", "{n} gave me {b}"]
TOTAL = [
    "How many is that",
    "How many now",
    "What is the total",
    "How many in all",
    "How much is it now",
    "What do I have",
]
EACH = [
    "{a} {c} with {b} {t} in each. How many {t} altogether?",
    "I bought {a} {t} at {b} euros each. What did I pay?",
    "One of them costs {b}. How much for {a}?",
    "{n} works {b} hours a day. How many hours in {a} days?",
    "Every {d} has {b} {t}, and there are {a}. How many {t}?",
    "We need {b} {t} per guest and have {a} guests. How many {t}?",
    "{a} {c}, {b} {t} each. Total?",
]
SHARED = [
    "We are {b} and the bill is {a}. What does each of us pay?",
    "The bill is {a} and there are {b} of us. How much per person?",
    "{a} {t} for {b} children, the same for all. How many each?",
    "{n} has {a} {t} and {b} friends who get the same number. How many does each get?",
    "I have {a} {t} and {c} that hold {b}. How many {c} are full?",
    "A trip of {a} kilometres takes {b} days. How many kilometres a day?",
    "{a} pages in {b} days: how many pages a day?",
    "If {b} cost {a} euros, what does one cost?",
    "{b} of us found {a} {t} and want to share them. How many for each?",
]
GROUPS = ["boxes", "bags", "rows", "shelves", "cartons", "baskets", "teams", "coaches", "jars", "crates", "trays"]
ONES = ["shelf", "bus", "class", "room", "garden", "table", "page", "floor"]
OWN_ZH = ["我有{a}{t}", "我原来有{a}{t}", "{n}有{a}{t}", "盒子里有{a}{t}", "我们有{a}{t}", "店里有{a}{t}"]
LESS_ZH = ["花了{b}{u}", "用掉{b}{u}", "送给朋友{b}{u}", "卖了{b}{u}", "丢了{b}{u}", "拿走{b}{u}"]
MORE_ZH = ["又买了{b}{u}", "又来了{b}{u}", "妈妈给了{b}{u}", "捡到{b}{u}", "再加{b}{u}"]
LEFT_ZH = ["还剩多少{u}", "还有几{u}", "剩下多少", "现在还有多少{u}"]
TOTAL_ZH = ["一共多少{u}", "现在有几{u}", "总共是多少", "一共有多少{u}"]
EACH_ZH = [
    "我买了{a}{t}，每{u}{b}元，一共要付多少钱？",
    "每{u}{b}元，{a}{u}多少钱？",
    "{a}个盒子，每个装{b}{u}，一共多少{u}？",
]
EACH_ZH += ["{n}每天做{b}{u}，{a}天做多少{u}？", "一排有{b}个座位，{a}排有多少个座位？"]
SHARED_ZH = [
    "{a}{t}平均放到{b}个盘子里，每个放几{u}？",
    "我们{b}个人一共花了{a}元，每人付多少？",
    "{a}{u}分成{b}堆，一堆几{u}？",
]
SHARED_ZH += ["{b}个孩子分{a}{t}，每人几{u}？", "买{b}{u}花了{a}元，一{u}多少钱？"]
THINGS_ZH = [
    ("本书", "本"),
    ("个苹果", "个"),
    ("块饼干", "块"),
    ("元钱", "元"),
    ("张票", "张"),
    ("支笔", "支"),
    ("颗糖", "颗"),
]


def _numbers(rng: random.Random, sign: str) -> tuple[int, int]:
    if sign == "/":
        node = quotient(rng, True)
        a, b = node[1], node[2]
        if b < 2:
            a, b = 2 * a, 2
        return (a + rng.randint(1, b - 1), b) if rng.random() < 0.15 else (a, b)
    if sign == "*":
        a, b = rng.randint(2, 12), rng.randint(2, 12) if rng.random() < 0.6 else rng.randint(13, 60)
        return (a, b) if a < 10 or b < 13 else (a - 4, b)
    a, b = rng.randint(2, 200), rng.randint(1, 99)
    return (max(a, b), min(a, b)) if sign == "-" else (a, b)


def told_sum(rng: random.Random) -> Case:
    """A sum, difference, product or quotient told in a sentence or two."""
    sign, chinese = rng.choice("+-*/"), rng.random() < 0.35
    a, b = _numbers(rng, sign)
    if chinese:
        thing, unit = rng.choice(THINGS_ZH)
        change, after = (LESS_ZH, LEFT_ZH) if sign == "-" else (MORE_ZH, TOTAL_ZH)
        form = rng.choice(SHARED_ZH if sign == "/" else EACH_ZH)
        if sign in "+-":
            form = f"{rng.choice(OWN_ZH)}，{rng.choice(change)}，{rng.choice(after)}？"
        user = form.format(a=a, b=b, t=thing, u=unit, n=rng.choice(load().words["zhname"]))
    else:
        change, after = (LESS, LEFT) if sign == "-" else (MORE, TOTAL)
        form = rng.choice(SHARED if sign == "/" else EACH)
        if sign in "+-":
            joint = rng.choice([" and ", ", ", ". Then I ", ", then "])
            form = f"{rng.choice(OWN)} {{a}} {{t}}{joint}{rng.choice(change)}. {rng.choice(after)}?"
        things = rng.choice([rng.choice(THINGS.split()), rng.choice(load().words["fruit.pl"])])
        names = {"n": rng.choice(load().words["name"]), "c": rng.choice(GROUPS), "d": rng.choice(ONES)}
        user = form.format(a=a, b=b, t=things, **names)
    answer, must = answer_of(a, sign, b, chinese)
    return ask(user[0].upper() + user[1:], answer, "word_problem", must)


ADD = ["Add {up |}{x}.", "What is {x} together?", "The sum of {x}?", "How much is {x} in all?", "Total of {x}, please."]
ADD += ["Can you add {up |}{x} for me?", "Sum {x}.", "I spent {x}. How much is that?", "{x}: what is the total?"]
ADD_ZH = ["{x}加起来是多少？", "求{x}的和。", "把{x}加起来。", "{x}一共是多少？"]


def series(rng: random.Random) -> Case:
    """Three or four numbers to add, step by step."""
    numbers = [rng.randint(1, rng.choice([20, 99, 150])) for _ in range(rng.choice([3, 3, 4]))]
    node: int | tuple = numbers[0]
    for number in numbers[1:]:
        node = ("+", node, number)
    chinese = rng.random() < 0.25
    shown = [str(n) for n in numbers]
    if chinese:
        text = "、".join(shown) if rng.random() < 0.5 else "、".join(shown[:-1]) + "和" + shown[-1]
    else:
        text = ", ".join(shown[:-1]) + rng.choice([" and ", ", and ", ", "]) + shown[-1]
    form = rng.choice(ADD_ZH if chinese else ADD).replace("{up |}", rng.choice(["up ", ""]))
    answer = worked(node) + ("。" if chinese else ".")
    return ask(form.replace("{x}", text), answer, "word_problem", ends_with(value(node)))
