"""How people put a request. Owns: openings, closings and slips around any text. Knows no task."""

from __future__ import annotations

import random
import re

from authored_data import load
from vocabulary import any_sign, word

GREETS = [
    "hi",
    "hello",
    "hey",
    "hi there",
    "good morning",
    "good evening",
    "ok",
    "okay",
    "so",
    "well",
    "alright",
    "yo",
    "um",
    "now",
]
REASONS = [
    "quick question",
    "one question",
    "a question",
    "another one",
    "just wondering",
    "I was wondering",
    "my kid asks",
    "for my homework",
    "for a quiz",
    "I forgot this",
    "help me with this",
    "I need this fast",
    "next",
    "next question",
    "tell me",
    "please tell me",
    "I would like to know",
    "I have a question",
    "a small thing",
    "can you help",
    "be honest",
    "my friend wants to know",
    "one more thing",
    "if you can",
    "in short",
    "this is for school",
    "I am curious",
    "last one",
    "you may know this",
    "my teacher asked me",
    "this is easy",
    "let me ask you something",
    "I bet you know this",
    "seriously",
]
ENDS = [
    "please",
    "thanks",
    "thank you",
    "thx",
    "pls",
    "thank you very much",
    "I need it now",
    "it is urgent",
    "for me",
    "ok?",
    "I forgot",
    "just asking",
    "no hurry",
    "if you don't mind",
    "be quick",
    "it is for my homework",
    "I am in a hurry",
]
CONTEXTS = [
    "I am in the kitchen.",
    "I am at home.",
    "We are on the way.",
    "My hands are full.",
    "I have guests.",
    "It is a busy day.",
    "I just woke up.",
    "I am on the train.",
    "My phone is old.",
    "We have a meeting soon.",
    "I am planning my week.",
    "My friends are here.",
    "I am a bit late.",
    "It has been a long day.",
    "I promised it to my family.",
    "I am new here.",
    "The children are asleep.",
    "I cannot do it myself.",
    "We talked about it yesterday.",
    "It came to my mind.",
]
WHO = ["I", "We", "My sister", "My neighbour", "The children", "They", "My uncle", "You", "Somebody", "My boss"]
DID = ["saw", "lost", "bought", "found", "painted", "forgot", "sold", "broke", "cleaned", "borrowed", "wanted", "hid"]
FEEL = ["I am", "I feel", "We are", "My son is", "My friend is", "I was", "I have been"]
ABOUT = ["", "", " about this", " today", " with it", " right now", " because of the [n]", " and need help", " again"]


def occasion(rng: random.Random) -> str:
    """A sentence that has nothing to do with the request: one of the list, or one put together."""
    pick = rng.random()
    if pick < 0.4:
        return rng.choice(CONTEXTS)
    thing = word(rng, "noun", False)
    if pick < 0.7:
        return f"{rng.choice(WHO)} {rng.choice(DID)} {rng.choice(['the', 'a', 'my'])} {thing}{rng.choice('..!')}"
    return f"{rng.choice(FEEL)} {rng.choice(load().words['trait'])}{rng.choice(ABOUT).replace('[n]', thing)}."


SMALL = "I you we my the a is it this that what so do can need get want tell me for with in on about how will your"
SMALL += " please now just there if then not know say find give show think am are was has them all here"
SMALLS = SMALL.split()
COUNTS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
COUNTS += " seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand half"
COUNTS += " twice double plus minus times over by divided multiplied third quarter first second once"
COUNTED = frozenset(COUNTS.split())
SMALL_ZH = "我你的了是请要想说吗呢这那给有在把会就快也不它他她们吧啊什么怎"
COUNTS_ZH = "一二三四五六七八九十零百千万亿壹贰叁肆伍陆柒捌玖拾佰仟两半倍分份加减乘除余和差积商共每平点负几多少数"


def _parted(rng: random.Random, words: list[str]) -> tuple[list[str], list[str]]:
    cut = rng.randint(0, len(words))
    return words[:cut], words[cut:]


def any_words(rng: random.Random, count: int) -> list[str]:
    """Words in no order: small ones that stand everywhere, and any others."""
    return [rng.choice(SMALLS) if rng.random() < 0.6 else word(rng, "any", False) for _ in range(count)]


def amid(rng: random.Random, text: str) -> str:
    """A text that says all by itself, among words that must not matter: none is a number or a sign."""
    before, behind = _parted(rng, [w for w in any_words(rng, rng.randint(0, 10)) if w not in COUNTED])
    front = " ".join(before) + rng.choice(["", "", "", ":", ",", ".", " -"]) + " " if before else ""
    back = rng.choice(["", "", ",", ";", ".", "?"]) + " " + " ".join(behind) if behind else ""
    front = front[0].upper() + front[1:] if front and rng.random() < 0.6 else front
    return front + text + back + rng.choice(["?", ".", "", "!"])


def amid_zh(rng: random.Random, text: str) -> str:
    """The same among Chinese signs."""
    signs = [rng.choice(SMALL_ZH) if rng.random() < 0.6 else any_sign(rng) for _ in range(rng.randint(0, 14))]
    before, behind = _parted(rng, [s for s in signs if s not in COUNTS_ZH])
    front, back = "".join(before) + rng.choice(["", "", "，", "："]), rng.choice(["", "", "，"]) + "".join(behind)
    return (front if before else "") + text + (back if behind else "") + rng.choice("？。！")


GREETS_ZH = [
    "你好，",
    "您好，",
    "请问，",
    "请问",
    "嗨，",
    "那么，",
    "对了，",
    "我想问一下，",
    "麻烦问一下，",
    "有个问题：",
    "老师问我，",
    "帮个忙，",
    "早上好，",
    "快告诉我，",
    "想请教一下，",
]
ENDS_ZH = [
    "谢谢",
    "谢谢！",
    "谢谢你。",
    "多谢！",
    "麻烦了。",
    "拜托了！",
    "我很急。",
    "急用。",
    "请快一点。",
    "请告诉我。",
]


def is_chinese(text: str) -> bool:
    """Whether a text holds Chinese signs."""
    return bool(re.search("[\u4e00-\u9fff]", text))


def framed(rng: random.Random, text: str, ending: bool = True) -> str:
    """A request with an opening, a closing or a sentence on the occasion; its own words stay as they are."""
    if is_chinese(text):
        text = rng.choice(GREETS_ZH) + text if rng.random() < 0.65 or not ending else text
        return text + rng.choice(ENDS_ZH) if ending and rng.random() < 0.4 else text
    pick = rng.random()
    first = (
        text[0].lower() + text[1:]
        if re.match("(What|How|Which|Who|Can|Could|Please|Tell|Give|Do|Is|Where)\\b", text)
        else text
    )
    if pick < 0.3:
        greet = rng.choice(GREETS)
        return (
            (greet.capitalize() if rng.random() < 0.6 else greet) + rng.choice([", ", "! ", " - ", ". ", " "]) + first
        )
    if pick < 0.55:
        reason = rng.choice(REASONS)
        reason = reason[0].upper() + reason[1:] if rng.random() < 0.6 else reason
        return reason + rng.choice([": ", ", ", ". ", " - "]) + text
    if pick < 0.75 or not ending:
        return occasion(rng) + " " + text
    return text.rstrip(".") + rng.choice([", ", " ", ". ", " - "]) + rng.choice(ENDS) + rng.choice(["", ".", "!"])


def slipped_letters(rng: random.Random, text: str) -> str:
    """One slip of the fingers in a longer lower-case word: a letter lost, doubled or exchanged."""
    words = list(re.finditer(r"(?<![\w<\[{_])[a-z]{5,}(?![\w\]}_])", text))
    if not words:
        return text
    spot = rng.choice(words)
    at = rng.randrange(spot.start() + 1, spot.end() - 1)
    pick = rng.random()
    if pick < 0.35:
        return text[:at] + text[at + 1 :]
    if pick < 0.6:
        return text[:at] + text[at] + text[at:]
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]


def noise(rng: random.Random, text: str) -> str:
    """One small disturbance of a user's text."""
    pick = rng.random()
    if pick < 0.2:
        return text.lower()
    if pick < 0.26 and len(text) < 120:
        return text.upper()
    if pick < 0.4:
        return text.rstrip(".?!。？！")
    if pick < 0.45:
        return text.rstrip(".?!。？！").lower()
    if pick < 0.52:
        return text + rng.choice([" ", "\n", " ???", "!", "?", "..", " :)"])
    if pick < 0.68:
        return slipped_letters(rng, text)
    return framed(rng, text)
