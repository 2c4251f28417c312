"""Small everyday questions in Chinese. Owns: calendar, numbers, kinds of things, greetings. Knows no tokens."""

from __future__ import annotations

import random

from authored_data import fill, load
from render import Case
from skill_everyday import said
from skill_facts import ask

DAYS = ["星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期日"]
KINDS = {
    "水果": ["苹果", "香蕉", "梨", "葡萄", "西瓜", "桃子", "草莓", "橙子"],
    "动物": ["狗", "猫", "老虎", "大象", "兔子", "熊猫", "猴子", "马"],
    "蔬菜": ["白菜", "土豆", "萝卜", "黄瓜", "洋葱", "茄子"],
    "颜色": ["红色", "蓝色", "绿色", "黄色", "黑色", "白色"],
    "乐器": ["钢琴", "小提琴", "吉他", "笛子", "鼓"],
    "家具": ["桌子", "椅子", "床", "沙发", "柜子"],
    "交通工具": ["汽车", "火车", "飞机", "自行车", "公共汽车", "轮船"],
    "衣服": ["裤子", "外套", "裙子", "衬衫", "毛衣"],
    "季节": ["春天", "夏天", "秋天", "冬天"],
}
FACTS = said("fact", "zh")
TALK = said("talk", "zh")


def calendar_zh(rng: random.Random) -> Case:
    """The day or month before or after."""
    if rng.random() < 0.6:
        at = rng.randrange(7)
        shift, word = rng.choice([(1, "明天"), (-1, "昨天"), (2, "后天")])
        there = DAYS[(at + shift) % 7]
        forms = [
            "今天是[d]，[w]是星期几？",
            "如果今天是[d]，那么[w]是星期几？",
            "今天[d]，[w]星期几？",
            "今天是[d]的话，[w]呢？",
        ]
        user = rng.choice(forms).replace("[d]", DAYS[at]).replace("[w]", word)
        return ask(user, f"{word}是{there}。", "everyday_zh", there)
    at = rng.randint(1, 12)
    after = rng.random() < 0.6
    there = at % 12 + 1 if after else (at - 2) % 12 + 1
    side = "后面" if after else "前面"
    user = rng.choice(
        [f"{at}月{side}是几月？", f"{at}月的{side}是哪个月？", f"{at}月{'之后' if after else '之前'}是几月？"]
    )
    return ask(user, f"{at}月{side}是{there}月。", "everyday_zh", f"{there}月。")


def numbers_zh(rng: random.Random) -> Case:
    """Comparing, next and before, even and odd."""
    limit = rng.choice([10, 100, 1000])
    a, b = rng.sample(range(limit), 2)
    pick = rng.random()
    if pick < 0.5:
        big = rng.random() < 0.65
        best, rest = (max(a, b), min(a, b)) if big else (min(a, b), max(a, b))
        w = "大" if big else "小"
        forms = [
            "[a]和[b]哪个更[w]？",
            "[a]和[b]哪个[w]？",
            "[a]与[b]，谁[w]？",
            "哪个更[w]，[a]还是[b]？",
            "[a]还是[b]更[w]？",
        ]
        user = rng.choice(forms).replace("[a]", str(a)).replace("[b]", str(b)).replace("[w]", w)
        return ask(user, f"{best}比{rest}{w}。", "compare", f"^{best}比")
    if pick < 0.75:
        after = rng.random() < 0.6
        there, side = (a + 1, "后面") if after else (a + 1, "前面")
        here = a if after else a + 2
        user = rng.choice([f"{here}{side}是几？", f"{here}{side}的数是多少？", f"{here}的{side}是哪个数？"])
        return ask(user, f"{here}{side}是{there}。", "everyday_zh", f"是{there}。")
    kind = "双数" if a % 2 == 0 else "单数"
    user = rng.choice([f"{a}是单数还是双数？", f"{a}是双数还是单数？", f"{a}是单数吗？", f"{a}是双数吗？"])
    answer = f"{a}是{kind}。"
    if user.endswith("吗？"):
        answer = ("是的，" if kind in user else "不是，") + answer
    return ask(user, answer, "everyday_zh", f"{kind}")


def kinds_zh(rng: random.Random) -> Case:
    """What kind of thing something is."""
    kind = rng.choice(list(KINDS))
    thing = rng.choice(KINDS[kind])
    other = rng.choice([k for k in KINDS if k != kind])
    pick = rng.random()
    if pick < 0.5:
        asked = kind if rng.random() < 0.5 else other
        user = rng.choice(
            [f"{thing}是{asked}吗？", f"{thing}是不是{asked}？", f"{thing}算{asked}吗？", f"{thing}属于{asked}吗？"]
        )
        return ask(
            user, ("是的，" if asked == kind else "不是，") + f"{thing}是{kind}。", "everyday_zh", f"{thing}是{kind}"
        )
    if pick < 0.8:
        a, b = rng.sample([kind, other], 2)
        user = rng.choice(
            [f"{thing}是{a}还是{b}？", f"{thing}属于{a}还是{b}？", f"{thing}是什么？", f"{thing}是哪一类东西？"]
        )
        return ask(user, f"{thing}是{kind}。", "everyday_zh", f"是{kind}")
    user = rng.choice([f"说出三种{kind}。", f"请举三个{kind}的例子。", f"三种{kind}？", f"给我三个{kind}的名字。"])
    return ask(user, "、".join(KINDS[kind][:3]) + "。", "everyday_zh", KINDS[kind][0])


def known_zh(rng: random.Random) -> Case:
    """A small fact or an opposite."""
    if rng.random() < 0.6:
        question, answer = rng.choice(FACTS)
        return ask(fill(question, rng, {}) + "？", answer, "everyday_zh", answer)
    a, b = rng.choice(load().pairs["opposite_zh"])
    a, b = (a, b) if rng.random() < 0.5 else (b, a)
    forms = [
        "[a]的反面是什么？",
        "跟[a]相反的是什么？",
        "[a]的相反词是什么？",
        "说出[a]的反义词。",
        "“[a]”的反义词？",
        "和[a]意思相反的词是什么？",
    ]
    return ask(rng.choice(forms).replace("[a]", a), f"{a}的反义词是{b}。", "facts_zh", b)


def talk_zh(rng: random.Random) -> Case:
    """A greeting, thanks or another everyday remark."""
    user, answer = rng.choice(TALK)
    return ask(fill(user, rng, {}), answer, "small_talk", "")


def everyday_zh(rng: random.Random) -> Case:
    """Any task of this module, never in a held-out wording."""
    held = {h for row in load().chat for h in row["held"]}
    while True:
        case = rng.choice([calendar_zh, numbers_zh, kinds_zh, known_zh, talk_zh])(rng)
        if case.messages[0]["content"] not in held:
            return case
