"""Values of usual orders. Owns: messages, machines, moneys and sums as people tell them. Knows no task."""

from __future__ import annotations

import random
from collections.abc import Callable

from authored_data import load
from skill_chat import person
from vocabulary import any_sign, copied, word

MONEY = [
    "euros",
    "dollars",
    "pounds",
    "yen",
    "francs",
    "crowns",
    "rupees",
    "pesos",
    "roubles",
    "yuan",
    "lira",
    "won",
    "zloty",
    "dinars",
    "reals",
    "rand",
]
MONEY_ZH = ["欧元", "美元", "人民币", "日元", "英镑", "法郎", "卢布", "韩元", "泰铢", "港币"]
LANGS_ZH = ["英语", "法语", "德语", "日语", "韩语", "俄语", "西班牙语", "意大利语", "阿拉伯语", "泰语"]
PLANS_ZH = [
    "开会",
    "体检",
    "聚餐",
    "上课",
    "考试",
    "面试",
    "比赛",
    "看牙",
    "家长会",
    "生日会",
    "旅行",
    "游泳课",
    "搬家",
    "培训",
]
DEVICES = "fan heater radio printer television speaker router vacuum pump kettle camera toaster freezer mixer dryer"
WHO = ["I", "we", "they", "Mum", "the boss", "the driver", "nobody", "everybody", "you", "the children", "Dad"]
DO = [
    "will come",
    "cannot come",
    "will need",
    "forgot",
    "found",
    "liked",
    "lost",
    "must bring",
    "wanted",
    "broke",
    "sold",
]
WHEN = [
    "",
    "",
    " today",
    " tomorrow",
    " at noon",
    " on Friday",
    " tonight",
    " next week",
    " soon",
    " again",
    " at last",
]
TEXTS = ["the [w] is [v]", "bring [w] and [v]", "no [w] today", "meet me at the [w]", "[v] [w] [v]", "where is the [w]"]
TEXTS += ["I am late", "happy birthday", "thank you for the [w]", "call me about the [w]", "see you at the [w]", "[w]!"]
TEXTS += [
    "the [w] leaves at [n]",
    "we are [n] now",
    "the code is [n]",
    "[n] [w], please",
    "dinner is at [n]",
    "ok, [w]",
]
TEXTS_ZH = [
    "我[v]了",
    "记得带[w]",
    "[w]在[v]",
    "明天见",
    "[w]没有了",
    "请给我[w]",
    "[n]点见",
    "谢谢你的[w]",
    "我在[w]等你",
]


def message(rng: random.Random) -> str:
    """A short text to be passed on, of any words: each must be copied letter by letter."""
    if rng.random() < 0.35:
        what = f"the {copied(rng)}" if rng.random() < 0.7 else person(rng, False)
        done = rng.choice(DO)
        # Who comes brings something or somebody along.
        what = f"with {what}" if done.endswith("come") else what
        text = f"{rng.choice(WHO)} {done} {what}{rng.choice(WHEN)}"
    else:
        text = rng.choice(TEXTS)
        for mark in ("[w]", "[v]", "[v]", "[v]"):
            text = text.replace(mark, copied(rng), 1)
        text = text.replace("[n]", str(rng.randint(1, 99)))
    return text[0].upper() + text[1:] if rng.random() < 0.3 else text


def message_zh(rng: random.Random) -> str:
    """A short Chinese text of usual things or any signs."""
    words = load().words
    text = rng.choice(TEXTS_ZH).replace("[n]", str(rng.randint(1, 12)))
    thing = rng.choice(words["zhthing"]) if rng.random() < 0.6 else any_sign(rng) + any_sign(rng)
    return text.replace("[w]", thing).replace("[v]", any_sign(rng) + any_sign(rng))


def device(rng: random.Random) -> str:
    """A machine at home, or any word."""
    return rng.choice(DEVICES.split(" ")) if rng.random() < 0.6 else word(rng, "noun", False)


def sum_of(rng: random.Random) -> str:
    """An expression that is copied sign by sign."""
    parts = [str(rng.randint(1, rng.choice([9, 99, 9999]))) for _ in range(rng.choice([2, 2, 3]))]
    text = parts[0]
    for part in parts[1:]:
        text += f" {rng.choice('+-*/')} {part}"
    return text if rng.random() < 0.8 else text.replace(" ", "")


USUAL_KINDS: dict[str, Callable[[random.Random], str]] = {
    "message": message,
    "zh_message": message_zh,
    "device": device,
    "money_name": lambda r: r.choice(MONEY),
    "zh_money_name": lambda r: r.choice(MONEY_ZH),
    "zh_lang": lambda r: r.choice(LANGS_ZH),
    "zh_plan": lambda r: r.choice(PLANS_ZH),
    "zh_clock": lambda r: r.choice(["早上", "下午", "晚上", ""]) + f"{r.randint(1, 12)}点{r.choice(['', '半', ''])}",
    "sum": sum_of,
}
"""Further kinds of the arguments of usual tools."""
