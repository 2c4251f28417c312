"""How people put a request. Owns: openings, closings and slips around any text. Knows no task."""

from __future__ import annotations

import random
import re

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
        return rng.choice(CONTEXTS) + " " + text
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
