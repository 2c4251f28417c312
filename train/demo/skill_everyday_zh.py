"""Small everyday questions in Chinese. Owns: calendar, numbers, kinds of things, greetings. Knows no tokens."""

from __future__ import annotations

import random

from authored_data import fill, load
from render import Case
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
FACTS: list[tuple[str, str]] = [
    ("一{个星期|周}有{几|多少}天", "一个星期有七天。"),
    ("一年有{几|多少}个月", "一年有十二个月。"),
    ("一天有{几|多少}个小时", "一天有24个小时。"),
    ("一{个|}小时有多少分钟", "一小时有60分钟。"),
    ("一分钟有多少秒", "一分钟有60秒。"),
    ("一年有{几个|哪些|哪四个}季节", "一年有春天、夏天、秋天和冬天四个季节。"),
    ("{天空|晴天的天空}是什么颜色{的|}", "天空是蓝色的。"),
    ("{草|小草}是什么颜色{的|}", "草是绿色的。"),
    ("{雪|白雪}是什么颜色{的|}", "雪是白色的。"),
    ("太阳从{哪里|哪边|哪个方向}{升起|出来}", "太阳从东边升起。"),
    ("太阳从{哪里|哪边|哪个方向}落下", "太阳从西边落下。"),
    ("{狗|猫|马|牛}有几条腿", "它有四条腿。"),
    ("{鸟|鸡|鸭子}有几条腿", "它有两条腿。"),
    ("{鸟|小鸟}会飞吗", "会，大多数鸟会飞。"),
    ("{鱼|小鱼}会{游泳|游水}吗", "会，鱼会游泳。"),
    ("{猪|狗|马|牛}会飞吗", "不会，它不会飞。"),
    ("{冰|冰块}是{冷|热}的吗", "冰是冷的。"),
    ("{自行车}有几个轮子", "自行车有两个轮子。"),
    ("三角形有几{条边|个角}", "三角形有三条边和三个角。"),
    ("{红色和黄色|黄色和红色}{混在一起|混合}是什么颜色", "红色和黄色混在一起是橙色。"),
    ("{蓝色和黄色|黄色和蓝色}{混在一起|混合}是什么颜色", "蓝色和黄色混在一起是绿色。"),
    ("一只手有几个手指", "一只手有五个手指。"),
    ("蜜蜂{做|酿}什么", "蜜蜂酿蜂蜜。"),
]
TALK: list[tuple[str, str]] = [
    ("{早上好|上午好|晚上好|中午好|大家好|嗨|哈喽|你好啊|您好啊|你好你好}{，tokenmill|呀|！|}", "你好！有什么可以帮你？"),
    ("{你好，|嗨，|}{你今天好吗|你怎么样|你过得好吗|你最近好吗|今天过得怎么样|一切都好吗}", "我很好，谢谢！你呢？"),
    ("{谢谢|多谢|太感谢了|谢谢啦|非常感谢你|感谢你}{，你真好|，帮了大忙|，tokenmill|！|}", "不客气！"),
    ("{再见|拜拜|明天见|我先走了|晚安|下次再聊|回头再聊}{，tokenmill|啦|！|}", "再见！祝你愉快。"),
    ("{很高兴认识你|认识你很高兴|见到你很高兴}{！|。|}", "我也很高兴认识你！"),
    ("{对不起|抱歉|不好意思}{，我错了|！|。|}", "没关系！有什么可以帮你？"),
    ("{生日快乐|新年快乐|圣诞快乐|周末愉快|中秋快乐}{！|。|}", "谢谢！也祝你快乐。"),
    ("{好的|好|知道了|明白了|嗯|行|可以}{。|}", "好的。你想知道什么？"),
    ("{在吗|你在吗|有人吗|测试|测试一下|能听到吗|你在不在}{？|}", "我在。有什么可以帮你？"),
    ("{你能帮我做什么|你有什么功能|我可以问你什么|你都会些什么|你擅长什么|你能干什么}？", "我很小，但会讲小故事、说出首都、做简单的计算、记住你的名字、提取JSON，还会调用工具。"),
]  # fmt: skip


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
