"""Chinese remarks put together, and questions for them. Owns: what somebody does, has or is. Knows no tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from authored_data import load
from render import Case
from scenes import code, phone
from skill_everyday_zh import everyday_zh
from story_parts_zh import LIVING, PLACE, THING, looked, name_zh, wide_noun

KIN = "妈妈 爸爸 姐姐 妹妹 哥哥 弟弟 奶奶 爷爷 外婆 舅舅 姑姑 叔叔 阿姨 表哥 表妹 邻居 同事 老板"
KIN += " 同学 老师 室友 女儿 儿子 朋友 教练 房东 医生"
DID = "买卖修借找丢洗画送带做看拿换搬擦藏种拍寄订租养煮扔"
DAYS = "星期一 星期二 星期三 星期四 星期五 星期六 星期天 明天 后天 昨天 今天 下周 上周 周末"
COLOURS = "红色 蓝色 绿色 黄色 白色 黑色 紫色 灰色 粉色 金色"
Pair = tuple[str, str, str]


def turned_zh(text: str) -> str:
    """What the speaker says of himself, told back to him."""
    return text.replace("我", "你")


def _who(rng: random.Random) -> str:
    pick = rng.random()
    if pick < 0.35:
        return "我"
    if pick < 0.45:
        return "我们"
    if pick < 0.8:
        return f"我{rng.choice(KIN.split())}{name_zh(rng) if rng.random() < 0.25 else ''}"
    return name_zh(rng)


def when_zh(rng: random.Random) -> str:
    """A day or a time."""
    pick = rng.random()
    if pick < 0.4:
        return rng.choice(
            [
                "星期一",
                "星期二",
                "星期三",
                "星期四",
                "星期五",
                "星期六",
                "星期天",
                "明天",
                "后天",
                "昨天",
                "今天",
                "下周",
                "上周",
                "周末",
            ]
        )
    if pick < 0.75:
        return f"{rng.randint(1, 12)}月{rng.randint(1, 28)}{rng.choice('日号')}"
    return f"{rng.choice(['上午', '下午', '晚上', '早上'])}{rng.randint(1, 12)}点{rng.choice(['', '半'])}"


def _event(rng: random.Random) -> tuple[str, list[Pair]]:
    """Who did what, when, where, with whom, for how much."""
    who, verb, what = _who(rng), rng.choice(DID), looked(rng, wide_noun(rng, THING), THING, 0.2)
    parts: dict[str, str] = {}
    if rng.random() < 0.55:
        parts["when"] = when_zh(rng)
    if rng.random() < 0.4:
        parts["where"] = wide_noun(rng, PLACE)
    if rng.random() < 0.25:
        parts["whom"] = rng.choice([name_zh(rng), f"我{rng.choice(KIN.split())}"])
    cost = str(rng.randint(2, 900)) if rng.random() < 0.2 else ""
    place = f"在{parts['where']}" if "where" in parts else ""
    whom = f"和{parts['whom']}一起" if "whom" in parts else ""
    spent = f"花{cost}元" if cost else ""
    when = parts.get("when", "")
    front = rng.random() < 0.4
    act = f"{verb}了{what}"

    def told(when: str = "", whom: str = "", place: str = "", spent: str = "", act: str = act) -> str:
        return f"{when}{who}{whom}{place}{spent}{act}" if front else f"{who}{when}{whom}{place}{spent}{act}"

    asks = [(f"{who}{whom or place or when}{verb}了什么", told(act=act), what)]
    asks += [(f"谁{verb}了{what}", told(), who)] if who not in ("我", "我们") else []
    if when:
        exact = "几点" if "点" in when else "哪天"
        asks += [(f"{who}{ask}{act}", told(when=when), when) for ask in ("什么时候", exact)]
    asks += [(f"{who}在哪里{act}", told(place=place), parts["where"])] if place else []
    asks += [(f"{who}和谁一起{act}", told(whom=whom), parts["whom"])] if whom else []
    asks += [(f"{who}{act}花了多少钱", told(spent=spent), cost)] if cost else []
    return told(when, whom, place, spent), [(q, turned_zh(a), turned_zh(v)) for q, a, v in asks]


Trait = tuple[Callable[[random.Random], str], list[str], list[str]]
TRAITS: list[Trait] = [
    (lambda r: str(r.randint(2, 999)), ["[n]的号码是[v]", "[n]是[v]号"], ["[n]的号码是多少", "[n]是几号"]),
    (
        lambda r: r.choice(COLOURS.split()),
        ["[n]是[v]的", "[n]的颜色是[v]"],
        ["[n]是什么颜色", "[n]的颜色是什么"],
    ),
    (name_zh, ["[n]叫[v]", "[n]的名字是[v]"], ["[n]叫什么", "[n]的名字是什么"]),
    (lambda r: str(r.randint(2, 90)), ["[n][v]岁了", "[n]今年[v]岁"], ["[n]几岁了", "[n]今年多大"]),
    (lambda r: str(r.randint(2, 999)), ["[n]的价格是[v]元", "[n]要[v]元"], ["[n]多少钱", "[n]的价格是多少"]),
    (lambda r: str(r.randint(2, 90)), ["[n]重[v]公斤", "[n]有[v]公斤"], ["[n]有多重", "[n]多少公斤"]),
    (lambda r: wide_noun(r, PLACE), ["[n]在[v]", "[n]放在[v]"], ["[n]在哪里", "[n]放在哪儿"]),
    (when_zh, ["[n][v]到", "[n][v]能修好"], ["[n]什么时候到", "[n]什么时候能修好"]),
    (lambda r: code(r), ["[n]的密码是[v]", "打开[n]要输入[v]"], ["[n]的密码是什么", "怎么打开[n]"]),
    (name_zh, ["[n]是[v]的", "[n]是[v]借给我的"], ["[n]是谁的", "谁借给我[n]"]),
    (phone, ["[n]的电话是[v]"], ["[n]的电话是多少"]),
    (lambda r: wide_noun(r, THING), ["[n]里有[v]", "[n]里放着[v]"], ["[n]里有什么", "[n]里放着什么"]),
    (lambda r: wide_noun(r, LIVING), ["[n]最喜欢[v]", "[n]养了[v]"], ["[n]最喜欢什么", "[n]养了什么"]),
    (
        lambda r: r.choice(load().words["zhfood.more"]),
        ["[n]不能吃[v]", "[n]爱吃[v]", "[n]对[v]过敏"],
        ["[n]不能吃什么", "[n]爱吃什么", "[n]对什么过敏"],
    ),
]


def _trait(rng: random.Random) -> tuple[str, list[Pair]]:
    """Something told of a thing or of somebody."""
    make, says, asks = rng.choice(TRAITS)
    living = "岁" in says[0] or "养" in says[-1] or "吃" in says[0]
    if living:
        named = _who(rng)
    else:
        head = looked(rng, wide_noun(rng, THING), THING, 0.25)
        named = f"{rng.choice(['我的', '我的', '我们的', f'我{rng.choice(KIN.split())}的', f'{name_zh(rng)}的'])}{head}"
    at, value = rng.randrange(len(says)), make(rng)
    said = says[at].replace("[n]", named).replace("[v]", value)
    # What is told in one way is asked for in this way, but for those that mean the same.
    same = len(asks) == 2 and not ("什么时候" in asks[0] or "最喜欢" in asks[0])
    pairs = [(ask.replace("[n]", named), said, value) for ask in (asks if same else [asks[at]])]
    return said, [(q, turned_zh(a), v) for q, a, v in pairs]


SAID = ["", "", "", "记住，", "请记住：", "告诉你，", "对了，", "你知道吗，", "我想说，", "记一下："]
HEARD = ["好的", "知道了", "嗯", "明白了", "谢谢你告诉我", "收到", "没问题", "好"]
HEARD_REST = ["，我记住了", "，我会记住的", "，我不会忘记", "", "，记下了", "，需要时问我"]
LEAD = ["", "", "", "请问", "那么，", "我忘了，", "你还记得", "告诉我，", "再说一遍，", "现在问你，"]


def notes_zh(rng: random.Random) -> Case:
    """One to three things told, over turns or at once, and questions for them."""
    told: list[tuple[str, list[Pair]]] = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        said, pairs = _event(rng) if rng.random() < 0.5 else _trait(rng)
        known = {question for _, others in told for question, _, _ in others}
        if not known & {question for question, _, _ in pairs}:
            told.append((said, pairs))
    messages: list[dict] = []
    once = rng.random() < 0.25
    for said, pairs in [] if once else told:
        reply = f"{rng.choice(HEARD)}{rng.choice(HEARD_REST)}。"
        if rng.random() < 0.3:
            reply = f"{rng.choice(['好的，', '知道了，', ''])}{rng.choice(pairs)[1]}。"
        messages += [
            {"role": "user", "content": f"{rng.choice(SAID)}{said}{rng.choice(['。', '。', '！', ''])}"},
            {"role": "assistant", "content": reply},
        ]
        if rng.random() < 0.4:
            messages += [dict(m) for m in everyday_zh(rng).messages[-2:]]
    question, answer, value = rng.choice(rng.choice(told)[1])
    asked = f"{rng.choice(LEAD)}{question}{rng.choice(['？', '？', '', '?'])}"
    if once:
        asked = "".join(f"{said}。" for said, _ in told) + asked
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": f"{answer}。"}]
    must = rf"(?<![A-Za-z\d]){re.escape(value)}(?![A-Za-z\d])"
    return Case(suite="memory_note_zh", messages=messages, must=must)
