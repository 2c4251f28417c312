"""Multiplication, division and expressions. Owns: trees of numbers, their steps and wordings. Knows no tokens.

A division with a remainder is answered `3 r 2` (Chinese: `3 余 2`), never with decimals. An expression is answered by
its steps, one operation each, so that no step is harder than a plain sum, product or quotient.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from authored_data import load, wording
from phrasing import amid, amid_zh
from render import Case
from skill_facts import ask, plain
from vocabulary import word

Node = int | tuple  # (sign, left, right)
SIGNS = {
    "+": ["+", "+", "plus"],
    "-": ["-", "-", "minus", "−"],
    "*": ["*", "*", "x", "×", "times", "multiplied by"],
    "/": ["/", "/", "÷", "divided by", "over"],
}
SIGNS_ZH = {"+": ["+", "加", "加上"], "-": ["-", "减", "减去"], "*": ["×", "*", "乘以", "乘"], "/": ["÷", "/", "除以"]}
NUMBER_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
ZERO, ZERO_ZH = "A number cannot be divided by zero.", "不能除以零。"


def value(node: Node) -> int:
    """The value of a tree whose divisions are exact."""
    if isinstance(node, int):
        return node
    sign, left, right = node[0], value(node[1]), value(node[2])
    if sign == "/":
        assert right and left % right == 0
        return left // right
    return left + right if sign == "+" else left - right if sign == "-" else left * right


def shown(node: Node, signs: dict[str, str] | None = None, outer: str = "", right: bool = False) -> str:
    """A tree as text, with brackets only where they are needed."""
    if isinstance(node, int):
        return f"({node})" if node < 0 and right else str(node)
    sign, a, b = node
    mark = (signs or {}).get(sign, sign)
    text = f"{shown(a, signs, sign, right)} {mark} {shown(b, signs, sign, True)}"
    high = outer in ("*", "/")
    if (high and sign in ("+", "-")) or (right and outer == "-" and sign in "+-") or (right and high):
        return f"({text})"
    return text


def reduced(node: Node) -> Node:
    """The tree after its leftmost operation on two numbers."""
    if isinstance(node, int):
        return node
    sign, a, b = node
    if isinstance(a, int) and isinstance(b, int):
        return value(node)
    return (sign, reduced(a), b) if not isinstance(a, int) else (sign, a, reduced(b))


def worked(node: Node) -> str:
    """`2 + 3 * 4 = 2 + 12 = 14`."""
    parts = [shown(node)]
    while not isinstance(node, int):
        node = reduced(node)
        parts.append(shown(node))
    return " = ".join(parts)


def ends_with(result: int) -> str:
    """The expression for an answer whose last number is `result`."""
    return rf"(?<!\d)-{-result}[.。]?\s*$" if result < 0 else rf"(?<![\d.-]){result}[.。]?\s*$"


def _number(rng: random.Random) -> int:
    return rng.randint(1, rng.choice([9, 20, 50, 99, 99, 200]))


def product(rng: random.Random) -> Node:
    """A product that is one step: of the table, or two digits by one."""
    if rng.random() < 0.6:
        return ("*", rng.randint(1, 12), rng.randint(1, 12))
    pair = [rng.randint(10, 99), rng.randint(2, 9)]
    rng.shuffle(pair)
    return ("*", *pair)


def quotient(rng: random.Random, large: bool = False) -> Node:
    """A division without remainder."""
    if large and rng.random() < 0.5:
        b = rng.randint(2, 12)
        return ("/", b * rng.randint(10, 999 // b), b)
    if large and rng.random() < 0.25:
        b, q = rng.choice([10, 15, 20, 25, 30, 40, 50, 60, 100, rng.randint(11, 49)]), rng.randint(1, 12)
        return ("/", b * q, b)
    b = rng.randint(1, 12)
    return ("/", b * rng.randint(1, 12), b)


def _bracket(rng: random.Random, most: int) -> Node:
    total = rng.randint(2, most)
    if rng.random() < 0.5:
        a = rng.randint(1, total - 1)
        return ("+", a, total - a)
    b = rng.randint(1, 40)
    return ("-", total + b, b)


def _exact_bracket(rng: random.Random) -> Node:
    b, q = rng.randint(2, 12), rng.randint(1, 12)
    total = b * q
    if rng.random() < 0.5 and total > 1:
        a = rng.randint(1, total - 1)
        return ("/", ("+", a, total - a), b)
    c = rng.randint(1, 50)
    return ("/", ("-", total + c, c), b)


def _bracket_product(rng: random.Random) -> Node:
    c = rng.randint(2, 12)
    inner = _bracket(rng, 12 if c > 9 or rng.random() < 0.5 else 99)
    return ("*", inner, c) if rng.random() < 0.5 else ("*", c, inner)


def _under_bracket(rng: random.Random) -> Node:
    inner = _bracket(rng, 12)
    return ("/", value(inner) * rng.randint(1, 12), inner)


def _sign(rng: random.Random) -> str:
    return rng.choice("+-")


N = _number
SHAPES: list[Callable[[random.Random], Node]] = [
    lambda r: (_sign(r), N(r), product(r)),
    lambda r: (_sign(r), N(r), product(r)),
    lambda r: (_sign(r), product(r), N(r)),
    lambda r: (_sign(r), N(r), quotient(r)),
    lambda r: (_sign(r), quotient(r), N(r)),
    lambda r: (_sign(r), product(r), product(r)),
    lambda r: (_sign(r), product(r), quotient(r)),
    lambda r: (_sign(r), (_sign(r), N(r), product(r)), N(r)),
    lambda r: (_sign(r), (_sign(r), N(r), N(r)), product(r)),
    lambda r: (_sign(r), (_sign(r), product(r), N(r)), quotient(r)),
    lambda r: _bracket_product(r),
    lambda r: _bracket_product(r),
    lambda r: _exact_bracket(r),
    lambda r: _under_bracket(r),
    lambda r: ("-", N(r), (_sign(r), N(r), N(r))),
    lambda r: ("-", N(r), (_sign(r), N(r), N(r))),
    lambda r: (_sign(r), (_sign(r), N(r), N(r)), N(r)),
    lambda r: (_sign(r), (_sign(r), N(r), N(r)), N(r)),
    lambda r: ("*", _bracket(r, 12), _bracket(r, 12)),
    lambda r: (_sign(r), N(r), _bracket_product(r)),
    lambda r: (_sign(r), _bracket_product(r), N(r)),
    lambda r: ("*", quotient(r), r.randint(2, 9)),
    lambda r: ("*", ("*", r.randint(1, 9), r.randint(1, 9)), r.randint(1, 9)),
]


def _bounds(node: Node) -> tuple[int, int]:
    """The least and the largest value of a tree's parts."""
    own = value(node)
    if isinstance(node, int):
        return own, own
    low, high = zip(_bounds(node[1]), _bounds(node[2]), strict=True)
    return min(own, *low), max(own, *high)


def expression(rng: random.Random) -> Node:
    """A tree of two or three operations on numbers up to three digits; one result in eight may be negative."""
    while True:
        node = rng.choice(SHAPES)(rng)
        low, high = _bounds(node)
        if high <= 999 and (low >= 0 or (rng.random() < 0.3 and low >= -300)):
            return node


NUMERALS = "零一二三四五六七八九"


def numeral(n: int) -> str:
    """A number of up to three digits in Chinese signs: 105 is 一百零五."""
    hundreds, rest = divmod(n, 100)
    tens, ones = divmod(rest, 10)
    if n < 10:
        return NUMERALS[n]
    text = f"{NUMERALS[hundreds]}百" if hundreds else ""
    if tens:
        text += ("" if tens == 1 and not hundreds else NUMERALS[tens]) + "十"
    elif ones:
        text += "零"
    return text + (NUMERALS[ones] if ones else "")


def _spelled(rng: random.Random, node: Node, chinese: bool, held: bool = False) -> str:
    if chinese and not held and rng.random() < 0.1:
        words = {s: rng.choice(forms[1:]) if s in "+-" else forms[-1] for s, forms in SIGNS_ZH.items()}
        return re.sub(r"\d+", lambda m: numeral(int(m[0])) if int(m[0]) < 1000 else m[0], shown(node, words)).replace(
            " ", ""
        )
    signs = {s: rng.choice(forms) for s, forms in (SIGNS_ZH if chinese else SIGNS).items()}
    if rng.random() < 0.6:
        # Calculators and keyboards: one family of signs.
        signs = {"*": rng.choice("*×x") if not chinese else rng.choice("×*"), "/": rng.choice("/÷")}
    text = shown(node, signs)
    pick = rng.random()
    if pick < 0.25 and not any(c.isalpha() and c != "x" for c in text):
        return text.replace(" ", "")
    if chinese and pick < 0.6:
        text = text.replace(" ", "")
        return text.replace("(", "（").replace(")", "）") if rng.random() < 0.5 else text
    if pick > 0.93 and not chinese:
        return " ".join(NUMBER_WORDS[int(p)] if p.isdigit() and int(p) <= 20 else p for p in text.split(" "))
    return text


def _asked(rng: random.Random, held: bool, node: Node, chinese: bool) -> str:
    spelled = _spelled(rng, node, chinese, held)
    if not held and rng.random() < 0.15:
        return amid_zh(rng, spelled) if chinese else amid(rng, spelled)
    user = wording("expr_zh" if chinese else "expr", rng, held, {"e": spelled})
    return user[0].upper() + user[1:] if user[0].isalpha() and rng.random() < 0.7 else user


def precedence(rng: random.Random, held: bool, chinese: bool = False, chat: bool = False) -> Case:
    """An expression of several operations, answered step by step."""
    node = expression(rng)
    result, text = value(node), worked(node)
    must = ends_with(result)
    pick = rng.random()
    if held or chat or pick < 0.85:
        return ask(_asked(rng, held, node, chinese), text + ("。" if chinese else "."), "precedence", must)
    if pick < 0.92:
        case = ask(
            _asked(rng, False, node, False), f"<think>\n{text}\n</think>\n\n{shown(node)} = {result}.", "think", must
        )
        case.think = True
        return case
    return plain(f"{shown(node)} =", text[len(shown(node)) + 2 :] + ".", "precedence", must)


def _pair(rng: random.Random, sign: str) -> tuple[int, int]:
    if sign == "*":
        node = product(rng)
        return node[1], node[2]
    if rng.random() < 0.62:
        node = quotient(rng, True)
        return node[1], node[2]
    b = rng.randint(2, 12)
    return (rng.randint(1, 12 * b) if rng.random() < 0.7 else rng.randint(1, 999)), b


def answer_of(a: int, sign: str, b: int, chinese: bool) -> tuple[str, str]:
    """The answer of one operation, and the expression that it must match."""
    stop = "。" if chinese else "."
    if sign == "/" and b == 0:
        return (ZERO_ZH, "零") if chinese else (ZERO, "zero")
    if sign == "/" and a % b:
        mark = "余" if chinese else "r"
        return f"{a} / {b} = {a // b} {mark} {a % b}{stop}", rf"(?<!\d){a // b} {mark} {a % b}[.。]?\s*$"
    result = value((sign, a, b))
    return f"{a} {sign} {b} = {result}{stop}", ends_with(result)


PART = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 8: "an eighth", 10: "a tenth"}
PARTS = ["What is [p] of [a]?", "[p] of [a]?", "How much is [p] of [a]?", "Tell me [p] of [a].", "What's [p] of [a]?"]
EVEN = ["equally", "evenly", "fairly", "in equal parts", "in equal shares", "equally, please"]
ANY_QUOTIENT = [
    "[w] [a] among [b] [e].",
    "[w] [a] across [b] [e].",
    "[w] [a] between [b] [e].",
    "[w] [a] to [b] [e].",
    "[w] [a] over [b] people [e].",
    "[w] [a] into [b] heaps [e].",
    "How many [b]s [w] in [a]?",
    "How many [b]s can [w] in [a]?",
    "How many [b]s do we [w] from [a]?",
    "In [a], how many [b]s are there to [w]?",
]
"""Divisions in which any word may be the verb: what stands around the numbers tells the task."""


def any_quotient(rng: random.Random, a: int, b: int) -> str:
    """A division asked for with a verb that means nothing."""
    text = rng.choice(ANY_QUOTIENT).replace("[e]", rng.choice(EVEN)).replace("[w]", word(rng, "verb", False))
    text = text.replace("[a]", str(a)).replace("[b]", str(b))
    return text[0].upper() + text[1:]


NAMED = {"+": "sum_of", "-": "difference_of", "*": "product_of", "/": "quotient_of"}


def named(rng: random.Random, held: bool, sign: str, chinese: bool = False, chat: bool = False) -> Case:
    """One operation, said with signs or in words (`the product of`, `split into equal parts`)."""
    a, b = _pair(rng, sign) if sign in "*/" else (rng.randint(1, 200), rng.randint(1, 99))
    if sign == "/" and rng.random() < 0.015:
        b = 0
    answer, must = answer_of(a, sign, b, chinese)
    pick = rng.random()
    if pick < 0.08 and not (held or chat or chinese) and b:
        return plain(f"{a} {sign} {b} =", answer.split("=", 1)[1], "division", must)
    if pick < 0.55 or b == 0:
        user = _asked(rng, held, (sign, a, b), chinese)
    else:
        values = {"a": str(a), "b": str(b), "t": rng.choice(load().words["fruit.pl"])}
        if sign == "/" and b in PART and not (held or chinese) and rng.random() < 0.25:
            user = rng.choice(PARTS).replace("[p]", PART[b]).replace("[a]", str(a))
            return ask(user, answer, "division", must)
        if sign == "/" and not (held or chinese) and rng.random() < 0.2:
            return ask(any_quotient(rng, a, b), answer, "division", must)
        user = wording(NAMED[sign] + ("_zh" if chinese else ""), rng, held, values)
    return ask(user, answer, {"/": "division"}.get(sign, "operation"), must)


def division(rng: random.Random, held: bool, chinese: bool = False, chat: bool = False) -> Case:
    """A division, a third of them with a remainder."""
    return named(rng, held, "/", chinese, chat)


def long_product(rng: random.Random) -> Case:
    """Two digits by two, or three by one, in parts."""
    if rng.random() < 0.6:
        a, b = rng.randint(11, 99), rng.randint(11, 99)
    else:
        a, b = rng.randint(2, 9), rng.randint(101, 999)
    tens, ones = b - b % 10, b % 10
    chinese = rng.random() < 0.2
    parts = f"{a} * {tens} + {a} * {ones} = {a * tens} + {a * ones} = " if ones and b < 100 else ""
    if b > 100:
        hundreds, b, a = b // 100 * 100, a, b
        rest = a - hundreds
        parts = f"{hundreds} * {b} + {rest} * {b} = {hundreds * b} + {rest * b} = " if rest else ""
    text = f"{a} * {b} = {parts}{a * b}"
    return ask(_asked(rng, False, ("*", a, b), chinese), text + ("。" if chinese else "."), "product", ends_with(a * b))


STORIES = [
    ("{n} has {a} {t} and shares them equally among {b} friends. How many {t} does each friend get?", "/"),
    ("There are {a} {t} in {b} equal bags. How many {t} are in one bag?", "/"),
    ("{n} puts {a} {t} into boxes of {b}. How many boxes are full?", "/"),
    ("{b} children share {a} {t}. How many does each child get?", "/"),
    ("{a} {t} are packed {b} to a basket. How many baskets does {n} need?", "/"),
    ("{n} buys {a} bags with {b} {t} each. How many {t} is that?", "*"),
    ("A box holds {b} {t}. How many {t} are in {a} boxes?", "*"),
    ("{n} eats {b} {t} a day. How many in {a} days?", "*"),
    ("One of the {t} costs {b} euros. What do {a} cost?", "*"),
    ("There are {a} rows of {b} chairs. How many chairs are there?", "*"),
]
STORIES_ZH = [
    ("{n}有{a}个苹果，平均分给{b}个小朋友，每人几个？", "/"),
    ("把{a}本书平均放在{b}个书架上，每个书架放几本？", "/"),
    ("{a}颗糖，每{b}颗装一袋，可以装几袋？", "/"),
    ("每盒有{b}支笔，{a}盒一共有多少支？", "*"),
    ("{n}每天读{b}页书，{a}天读多少页？", "*"),
    ("一个本子{b}元，{a}个本子多少元？", "*"),
    ("{n}有{a}个梨，又买了{b}个，现在有几个？", "+"),
    ("{n}有{a}元，花了{b}元，还剩多少元？", "-"),
    ("教室里有{a}个学生，又来了{b}个，一共有多少个？", "+"),
    ("树上有{a}只鸟，飞走了{b}只，还有几只？", "-"),
]


def story_sum(rng: random.Random) -> Case:
    """A one-step problem on sharing, packing and repeating, in English or Chinese."""
    chinese = rng.random() < 0.4
    text, sign = rng.choice(STORIES_ZH if chinese else STORIES)
    if sign == "/":
        node = quotient(rng)
        a, b = node[1], max(2, node[2])
        a -= a % b
        a = a or 2 * b
    elif sign == "*":
        a, b = rng.randint(2, 12), rng.randint(2, 20)
        a, b = (a, b) if b <= 12 or a <= 9 else (9, b)
    else:
        a, b = sorted((rng.randint(1, 60), rng.randint(1, 60)), reverse=True)
    name = rng.choice(["小明", "小红", "李华", "小丽", "小刚"]) if chinese else rng.choice(load().words["name"])
    result = value((sign, a, b))
    user = text.format(n=name, a=a, b=b, t=rng.choice(load().words["fruit.pl"]))
    tail = f"，答案是{result}。" if chinese else f", so the answer is {result}."
    return ask(user, f"{a} {sign} {b} = {result}{tail}", "word_problem", rf"(?<!\d){result}(?!\d)")
