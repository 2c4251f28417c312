"""Later questions on a result. Owns: which operation comes next and how it is said, put together. Knows no tokens."""

from __future__ import annotations

import random

from held_out import matcher
from skill_expression import Node

LATER: dict[str, list[str]] = {
    "*2": [
        "Double that.",
        "Now double it.",
        "Twice that?",
        "And twice as much?",
        "double it please",
        "What is the double of that?",
        "The double?",
    ],
    "/2": [
        "Half of that?",
        "Now take half of it.",
        "And half of it?",
        "Halve it.",
        "What is half of that?",
        "Divide that by two.",
    ],
    "+": [
        "And plus {n}?",
        "Now add {n} to it.",
        "Add {n}.",
        "{n} more?",
        "Plus {n}?",
        "add another {n}",
        "And if I add {n}?",
        "Then add {n} to the result.",
    ],
    "-": [
        "And minus {n}?",
        "Now take {n} away.",
        "Subtract {n}.",
        "{n} less?",
        "Minus {n}?",
        "Take {n} from that.",
        "Now subtract {n} from it.",
    ],
    "*": [
        "Multiply the result by {n}.",
        "Times {n}?",
        "And {n} times that?",
        "Now times {n}.",
        "Multiply it by {n}.",
        "multiply that with {n}",
    ],
    "/": [
        "Divide it by {n}.",
        "And divided by {n}?",
        "Now divide the result by {n}.",
        "Over {n}?",
        "Share that by {n}.",
    ],
    "square": ["Times itself?", "Now multiply it by itself."],
}
LEAD = [
    "",
    "Now ",
    "And ",
    "Then ",
    "Okay, ",
    "Please ",
    "Next, ",
    "So ",
    "Can you ",
    "Good, now ",
    "what if I ",
    "ok and ",
]
MORE_LEAD = [
    "Fine, ",
    "Well, ",
    "Let us ",
    "I want to ",
    "Could you ",
    "After that ",
    "Go on: ",
    "Once more: ",
    "Also ",
]
MORE_LEAD += [
    "What about ",
    "How much is ",
    "Great. ",
    "One more: ",
    "Thanks, now ",
    "Hm, ",
    "Last one: ",
    "We ",
    "Just ",
]
CORES: dict[str, list[str]] = {
    "*2": ["double [r]", "take [r] twice", "make it double", "[r] times two", "two times [r]", "twice [r]"],
    "/2": ["half [r]", "halve [r]", "take half of [r]", "[r] by two", "cut [r] into halves", "just a half of [r]"],
    "+": ["add {n} to [r]", "plus {n}", "add {n}", "{n} more", "increase [r] by {n}", "[r] plus {n}", "{n} more come"],
    "-": [
        "minus {n}",
        "take {n} off [r]",
        "remove {n}",
        "{n} less",
        "[r] minus {n}",
        "{n} go away",
        "reduce [r] by {n}",
    ],
    "*": ["times {n}", "multiply [r] by {n}", "[r] times {n}", "take [r] {n} times", "{n} times [r]"],
    "/": ["divide [r] by {n}", "divided by {n}", "[r] over {n}", "split [r] by {n}", "[r] divided by {n}"],
}
MORE_CORES: dict[str, list[str]] = {
    "*2": [
        "multiply [r] by two",
        "[r] doubled",
        "have [r] two times",
        "the double of [r]",
        "two of [r]",
        "[r] and again [r]",
    ],
    "/2": [
        "divide [r] by 2",
        "the half of [r]",
        "[r] halved",
        "share [r] between two",
        "one half of [r]",
        "only half [r]",
    ],
    "+": [
        "count {n} on from [r]",
        "give [r] {n} more",
        "raise [r] by {n}",
        "throw in {n}",
        "go up by {n}",
        "[r] and {n}",
    ],
    "-": [
        "drop {n} from [r]",
        "cut {n} off [r]",
        "go down by {n}",
        "[r] less {n}",
        "lose {n}",
        "count {n} back from [r]",
    ],
    "*": [
        "have [r] {n} times",
        "{n} of [r]",
        "make {n} times [r]",
        "repeat [r] {n} times",
        "times [r] by {n}",
        "{n} lots of [r]",
    ],
    "/": [
        "share [r] among {n}",
        "cut [r] into {n} parts",
        "a part of {n} of [r]",
        "deal [r] out to {n}",
        "how often {n} in [r]",
    ],
}
DETS = ["the", "that", "this", "your", "our", "my"]
REFERRED = [
    "result",
    "answer",
    "number",
    "total",
    "value",
    "figure",
    "amount",
    "outcome",
    "sum",
    "last one",
    "last result",
]
REFERS = ["it", "that", "the result", "this", "the answer", "that number", "the last one", "this number", "your answer"]
ENDS = ["", ".", "?", " please", ", please.", "?", "!", " now"]


def said_shortly(rng: random.Random, kind: str) -> str:
    """A later question as the evaluation has it before its last one."""
    if kind not in CORES or rng.random() < 0.4:
        return rng.choice(LATER[kind])
    text = rng.choice(LEAD) + rng.choice(CORES[kind]).replace("[r]", rng.choice(REFERS)) + rng.choice(ENDS)
    return text[0].upper() + text[1:] if rng.random() < 0.7 else text


def said_later(rng: random.Random, kind: str) -> str:
    """A later question: one of the list, or put together."""
    if kind not in CORES or rng.random() < 0.25:
        return rng.choice(LATER[kind])
    refers = rng.choice(REFERS) if rng.random() < 0.5 else f"{rng.choice(DETS)} {rng.choice(REFERRED)}"
    core = rng.choice(CORES[kind] if rng.random() < 0.5 else MORE_CORES[kind]).replace("[r]", refers)
    text = rng.choice(LEAD if rng.random() < 0.6 else MORE_LEAD) + core + rng.choice(ENDS)
    if is_kept_later(text):
        return said_later(rng, kind)
    return text[0].upper() + text[1:] if rng.random() < 0.7 else text


LATER_HELD = {"*2": ["Make it twice as large."], "/2": ["Cut it in half."], "+": ["Put {n} on top of that."]}
LATER_HELD |= {"-": ["Lower it by {n}."], "*": ["Take the answer {n} times."], "/": ["Split that answer by {n}."]}
is_kept_later = matcher(text.replace("{n}", "[n]") for texts in LATER_HELD.values() for text in texts)
LATER_ZH = {
    "*2": ["翻倍呢？", "再乘以2", "它的两倍呢？"],
    "/2": ["一半呢？", "再除以2"],
    "+": ["再加{n}呢？", "加上{n}", "再加{n}"],
}
LATER_ZH |= {
    "-": ["再减{n}呢？", "减去{n}", "再减{n}"],
    "*": ["再乘以{n}", "乘{n}呢？"],
    "/": ["再除以{n}", "除以{n}呢？"],
}

CORES_ZH = {
    "*2": ["[r]乘2", "[r]的两倍", "[r]翻一番", "两个[r]"],
    "/2": ["[r]的一半", "[r]除以二", "[r]对半分", "把[r]减半"],
    "+": ["[r]加{n}", "[r]多{n}", "在[r]上加{n}", "[r]添{n}", "[r]增加{n}"],
    "-": ["[r]减{n}", "[r]少{n}", "从[r]里拿走{n}", "[r]减少{n}", "[r]去掉{n}"],
    "*": ["[r]乘{n}", "[r]的{n}倍", "{n}个[r]", "把[r]乘以{n}"],
    "/": ["[r]除以{n}", "把[r]分成{n}份", "[r]平分给{n}个人", "[r]里有几个{n}"],
}
REFERS_ZH = ["它", "这个数", "结果", "那个数", "刚才的答案", "答案", "这个结果", "上面的数"]


def said_later_zh(rng: random.Random, kind: str) -> str:
    """A later question in Chinese: one of the list, or put together."""
    if kind not in CORES_ZH or rng.random() < 0.3:
        return rng.choice(LATER_ZH[kind])
    core = rng.choice(CORES_ZH[kind]).replace("[r]", rng.choice(REFERS_ZH))
    lead = rng.choice(["", "", "再", "那么", "现在", "接着", "然后", "请问", "好，"])
    return f"{lead}{core}{rng.choice(['呢？', '是多少？', '', '。', '？', '等于几？'])}"


def next_step(rng: random.Random, now: int) -> tuple[str, Node]:
    """The next operation on a result."""
    options = ["+", "+", "*2"] + (["-", "-"] if now > 1 else []) + (["*"] if now < 60 else [])
    options += ["/2"] if now % 2 == 0 and now else []
    divisors = [d for d in range(2, 13) if now and now % d == 0]
    options += ["/", "/"] if divisors else []
    options += ["square"] if 1 < now < 13 else []
    kind = rng.choice(options)
    if kind in ("*2", "/2"):
        return kind, (kind[0], now, 2)
    if kind == "square":
        return kind, ("*", now, now)
    limit = {"+": 60, "-": max(1, now), "*": 9}.get(kind, 9)
    return kind, (kind, now, rng.choice(divisors) if kind == "/" else rng.randint(1 if kind in "+-" else 2, limit))
