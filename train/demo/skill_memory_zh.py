"""Everyday memory in Chinese. Owns: what people tell of themselves and theirs, and how they ask. Knows no tokens."""

from __future__ import annotations

import random
import re

from authored_data import load
from render import Case
from skill_memory import Told
from vocabulary import any_sign

KIN = ["妹妹", "姐姐", "弟弟", "哥哥", "妈妈", "爸爸", "奶奶", "爷爷", "儿子", "女儿", "叔叔", "阿姨", "外婆", "表哥"]
OTHERS = ["老师", "同学", "邻居", "老板", "同事", "好朋友", "室友", "医生", "教练", "男朋友", "女朋友", "丈夫", "妻子"]
PETS = ["狗", "猫", "兔子", "仓鼠", "乌龟", "鹦鹉", "马", "金鱼", "小狗", "小猫", "宠物", "鸟"]
THINGS = ["车", "自行车", "书包", "帽子", "雨伞", "外套", "手机", "房子", "杯子", "裙子", "门", "围巾"]
COLOURS = ["红色", "蓝色", "绿色", "黄色", "黑色", "白色", "紫色", "粉色", "灰色", "橙色", "棕色"]
LOST = ["钥匙", "眼镜", "手机", "钱包", "书", "雨伞", "护照", "车票", "帽子", "手表", "相机", "地图"]
SPOTS = ["抽屉里", "桌子上", "床下", "厨房里", "书架上", "门后", "车里", "包里", "沙发上", "窗边", "盒子里", "办公室"]
FAVOURITES = {
    "颜色": COLOURS,
    "水果": ["苹果", "香蕉", "梨", "葡萄", "西瓜", "桃子", "橙子", "草莓"],
    "季节": ["春天", "夏天", "秋天", "冬天"],
    "动物": ["熊猫", "老虎", "大象", "兔子", "海豚", "猴子", "长颈鹿", "企鹅"],
    "运动": ["足球", "篮球", "游泳", "跑步", "乒乓球", "羽毛球", "滑雪"],
    "科目": ["数学", "语文", "英语", "历史", "音乐", "美术", "地理"],
    "食物": ["饺子", "面条", "米饭", "包子", "豆腐", "火锅", "烤鸭"],
    "饮料": ["茶", "咖啡", "牛奶", "果汁", "可乐", "豆浆"],
}
DAYS = ["星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期天", "明天", "后天", "下周"]


def person_zh(rng: random.Random) -> str:
    """A name: of the list, two common signs, or Latin letters."""
    pick = rng.random()
    if pick < 0.5:
        return rng.choice(load().words["zhname"])
    if pick < 0.8:
        return rng.choice(["小", "阿", "大", "老"]) + any_sign(rng)
    return any_sign(rng) + any_sign(rng) if pick < 0.93 else rng.choice(load().words["name"])


def _called(rng: random.Random) -> Told:
    pet = rng.random() < 0.45
    r, n = rng.choice(PETS if pet else KIN + OTHERS), person_zh(rng)
    says = [
        f"我的{r}叫{n}",
        f"我{r}叫{n}",
        f"我{r}的名字是{n}",
        f"我的{r}名叫{n}",
        f"我有{'一只' if pet else '一个'}{r}叫{n}",
    ]
    says += [f"我家的{r}叫{n}", f"我养了一只{r}，叫{n}"] if pet else [f"{n}是我的{r}", f"{n}是我{r}"]
    asks = [f"我的{r}叫什么？", f"我的{r}叫什么名字？", f"我{r}叫什么名字？", f"我{r}的名字是什么？", f"我的{r}叫啥？"]
    asks += [f"我家{r}叫什么？"] if pet else [f"我的{r}是谁？", f"谁是我的{r}？"]
    return Told(says, asks, [f"我的{r}叫什么", f"我{r}的名字"], [], f"你的{r}叫{n}。", n, r)


def _aged(rng: random.Random) -> Told:
    r, v = rng.choice([*KIN, *PETS]), str(rng.randint(2, 79))
    says = [f"我{r}今年{v}岁", f"我的{r}{v}岁了", f"我{r}{v}岁"]
    asks = [f"我{r}多大了？", f"我的{r}几岁？", f"我{r}今年几岁？", f"我{r}多少岁？"]
    return Told(says, asks, [f"我{r}几岁", f"我{r}的年龄"], [], f"你的{r}{v}岁。", v, r + "岁")


def _lives(rng: random.Random) -> Told:
    c = rng.choice(load().countries)["capital_zh" if rng.random() < 0.6 else "zh"]
    if rng.random() < 0.5:
        r = rng.choice(KIN + OTHERS)
        says = [f"我{r}住在{c}", f"我的{r}住在{c}", f"我{r}在{c}生活"]
        asks = [f"我{r}住在哪里？", f"我{r}住哪儿？", f"我的{r}在哪里生活？", f"我{r}家在哪里？"]
        return Told(says, asks, [f"我{r}住在哪里"], [], f"你的{r}住在{c}。", c, r + "家")
    if rng.random() < 0.5:
        says = [f"我们搬到了{c}", f"我去年搬到{c}了", f"我家搬到{c}了", f"我刚搬到{c}"]
        asks = ["我搬到哪里了？", "我们搬到了哪里？", "我搬去哪儿了？", "我现在住在哪里？"]
        return Told(says, asks, ["我搬到了哪里"], [], f"你搬到了{c}。", c, "家")
    says = [f"我来自{c}", f"我是{c}人", f"我从{c}来"]
    asks = ["我来自哪里？", "我是哪里人？", "我从哪里来？", "我是从哪儿来的？"]
    return Told(says, asks, ["我来自哪里", "我是哪里人"], [], f"你来自{c}。", c, "家")


def _works(rng: random.Random) -> Told:
    r, w = rng.choice(KIN + OTHERS), load().words
    if rng.random() < 0.5:
        j = rng.choice(w["zhjob"])
        asks = [f"我{r}是做什么的？", f"我{r}做什么工作？", f"我{r}的工作是什么？", f"我{r}的职业是什么？"]
        return Told(
            [f"我{r}是{j}", f"我的{r}是一名{j}"], asks, [f"我{r}做什么工作"], [], f"你的{r}是{j}。", j, r + "工作"
        )
    h = rng.choice(w["zhhobby"])
    asks = [f"我{r}喜欢什么？", f"我{r}的爱好是什么？", f"我的{r}爱做什么？"]
    return Told([f"我{r}喜欢{h}", f"我{r}爱{h}"], asks, [f"我{r}喜欢什么"], [], f"你的{r}喜欢{h}。", h, r + "喜")


def _favourite(rng: random.Random) -> Told:
    k = rng.choice(list(FAVOURITES))
    v = rng.choice(FAVOURITES[k])
    says = [f"我最喜欢的{k}是{v}", f"我喜欢的{k}是{v}", f"{v}是我最喜欢的{k}", f"我最爱的{k}是{v}"]
    asks = [f"我最喜欢的{k}是什么？", f"我喜欢什么{k}？", f"我最爱的{k}是什么？", f"我最喜欢哪种{k}？"]
    return Told(says, asks, [f"我最喜欢什么{k}", f"我喜欢的{k}"], [], f"你最喜欢的{k}是{v}。", v, k)


def _things(rng: random.Random) -> Told:
    if rng.random() < 0.5:
        t, v = rng.choice(THINGS), rng.choice(COLOURS)
        says = [f"我的{t}是{v}的", f"我的{t}是{v}", f"我买了{v}的{t}"]
        asks = [f"我的{t}是什么颜色？", f"我的{t}什么颜色？", f"我{t}的颜色是什么？"]
        return Told(says, asks, [f"我的{t}是什么颜色"], [], f"你的{t}是{v}的。", v, t + "色")
    t, v = rng.choice(LOST), rng.choice(SPOTS)
    says = [f"我的{t}在{v}", f"我把{t}放在{v}了", f"{t}在{v}", f"我把{t}忘在{v}了"]
    asks = [f"我的{t}在哪里？", f"我把{t}放哪儿了？", f"我的{t}在哪儿？", f"{t}在哪里？", f"我找不到{t}了，在哪里？"]
    return Told(says, asks, [f"我的{t}在哪里"], [], f"你的{t}在{v}。", v, t)


def _dated(rng: random.Random) -> Told:
    if rng.random() < 0.5:
        r = rng.choice(["", "", *KIN])
        v = f"{rng.randint(1, 12)}月" + ("" if rng.random() < 0.4 else f"{rng.randint(1, 28)}日")
        asks = [f"我{r}的生日是什么时候？", f"我{r}的生日是几月？", f"我{r}什么时候过生日？", f"我{r}生日是哪天？"]
        says = [f"我{r}的生日是{v}", f"我{r}{v}过生日", f"我{r}生日在{v}"]
        return Told(says, asks, [f"我{r}的生日"], [], f"你{'的' if r else ''}{r}的生日是{v}。", v, r + "生日")
    e, v = rng.choice(["会议", "考试", "聚会", "比赛", "钢琴课", "旅行"]), rng.choice(DAYS)
    asks = [f"我的{e}是什么时候？", f"我什么时候有{e}？", f"{e}在哪天？", f"我的{e}在什么时候？"]
    return Told(
        [f"我的{e}在{v}", f"{v}我有{e}", f"我{v}有{e}"], asks, [f"我的{e}是什么时候"], [], f"你的{e}在{v}。", v, e
    )


def _counted(rng: random.Random) -> Told:
    n = str(rng.randint(1, 9)) if rng.random() < 0.5 else rng.choice("一两三四五六七八九")
    unit, t = rng.choice(
        [("只", "猫"), ("只", "狗"), ("个", "孩子"), ("个", "妹妹"), ("本", "书"), ("辆", "车"), ("个", "哥哥")]
    )
    asks = [f"我有几{unit}{t}？", f"我有多少{unit}{t}？", f"我家有几{unit}{t}？"]
    return Told(
        [f"我有{n}{unit}{t}", f"我家有{n}{unit}{t}"], asks, [f"我有几{unit}{t}"], [], f"你有{n}{unit}{t}。", n, "数" + t
    )


MAKERS = [
    _called,
    _called,
    _called,
    _aged,
    _lives,
    _lives,
    _works,
    _favourite,
    _favourite,
    _things,
    _things,
    _dated,
    _counted,
]
CLAUSE = [
    "你记得[c]吗？",
    "你知道[c]吗？",
    "你还记得[c]吗？",
    "告诉我[c]。",
    "请说出[c]。",
    "我忘了[c]。",
    "我说过[c]吗？",
]
CLAUSE += ["说说[c]。", "能告诉我[c]吗？", "请提醒我[c]。", "还知道[c]吗？"]
BEFORE = ["", "", "", "请问", "那么", "那", "问一下，", "猜猜", "对了，"]
INTRO = ["", "", "", "你好，", "告诉你，", "记住，", "对了，", "请记住：", "我想告诉你，"]


def question_zh(rng: random.Random, told: Told) -> str:
    """One way to ask for it."""
    if rng.random() < 0.3:
        return rng.choice(CLAUSE).replace("[c]", rng.choice(told.clauses))
    return rng.choice(BEFORE) + rng.choice(told.asks)


def everyday_memory_zh(rng: random.Random) -> Case:
    """Things told in one breath or over several turns, then asked for."""
    told: list[Told] = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        new = (_any_zh if rng.random() < 0.4 else rng.choice(MAKERS))(rng)
        if not any(new.subject in t.subject or t.subject in new.subject for t in told):
            told.append(new)
    name = person_zh(rng) if rng.random() < 0.3 else ""
    target = rng.choice(told)
    asked, answer, value = question_zh(rng, target), target.answer, target.value
    if name and rng.random() < 0.3:
        asked, answer, value = rng.choice(["我叫什么名字？", "我叫什么？", "我是谁？"]), f"你叫{name}。", name
    messages: list[dict] = []
    if rng.random() < 0.45:
        parts = [f"我叫{name}"] * bool(name) + [rng.choice(t.says) for t in told]
        text = rng.choice(["", "", "你好，"]) + rng.choice(["，", "。"]).join(parts) + "。"
        messages.append({"role": "user", "content": text + asked})
    else:
        if name:
            hello = rng.choice([f"我叫{name}。", f"你好，我叫{name}。", f"我是{name}。", f"叫我{name}吧。"])
            messages += [
                {"role": "user", "content": hello},
                {"role": "assistant", "content": f"你好，{name}！很高兴认识你。"},
            ]
        for t in told:
            messages.append({"role": "user", "content": rng.choice(INTRO) + rng.choice(t.says) + "。"})
            reply = rng.choice(["好的，我记住了。", "我记住了：[y]", "好的，[y]", "知道了，[y]", "[y]我记住了。"])
            messages.append({"role": "assistant", "content": reply.replace("[y]", t.answer)})
        messages.append({"role": "user", "content": asked})
    messages.append({"role": "assistant", "content": answer})
    return Case(suite="memory_everyday_zh", messages=messages, must=re.escape(value))


DEEDS = "买 卖 修 画 找 借 送 丢 做 洗 吃 学 看 拿 写 拍 种 养 藏 换 听 捡 挑 搬 喝 选 收 订"


def _thing_zh(rng: random.Random) -> str:
    """A thing of the list, or signs that no list holds, with or without an adjective."""
    words = load().words
    made = "".join(any_sign(rng) for _ in range(rng.randint(1, 3)))
    head = made if rng.random() < 0.4 else rng.choice(words["zhthing"] + words["zhfood"])
    return rng.choice(["", "", "红色的", "旧", "新", "很大的", "妈妈的", "一个", "两个"]) + head


def _any_zh(rng: random.Random) -> Told:
    """Any deed with any object, or anything of one's own that is something."""
    pick, what = rng.random(), _thing_zh(rng)
    if pick < 0.45:
        who = rng.choice(
            [
                "我",
                "我",
                "我",
                *(f"我{r}" for r in ["爸爸", "妈妈", "姐姐", "哥哥", "朋友", "老师", "同事"]),
                person_zh(rng),
            ]
        )
        whose = "你" + who[1:] if who[0] == "我" else who
        when = rng.choice(["", "", "昨天", "今天", "上周", "去年", "早上"])
        deed = rng.choice(DEEDS.split())
        asks = [
            f"{who}{when}{deed}了什么？",
            f"{who}{deed}了什么？",
            f"{who}{when}{deed}了什么东西？",
            f"{who}{deed}的是什么？",
        ]
        answer = f"{whose}{when}{deed}了{what}。"
        return Told([f"{who}{when}{deed}了{what}"], asks, [f"{who}{when}{deed}了什么"], [], answer, what, deed)
    if pick < 0.6:
        place = rng.choice(load().words["zhplace"]) if rng.random() < 0.6 else any_sign(rng) + any_sign(rng)
        asks = [f"{what}在哪里？", f"{what}放在哪儿？", f"我把{what}放在哪里了？"]
        says = [f"{what}在{place}", f"我把{what}放在{place}"]
        return Told(says, asks, [f"{what}在哪里"], [], f"{what}在{place}。", place, what)
    label = rng.choice(
        ["密码", "房间", "车牌", "编号", "网名", "学校", "公司", "老板", "会员号", "外号", "店", "座位", "目标", "梦想"]
    )
    label = any_sign(rng) + any_sign(rng) if rng.random() < 0.35 else label
    value = rng.choice([str(rng.randint(1, 99999)), any_sign(rng) + any_sign(rng), _thing_zh(rng), person_zh(rng)])
    asks = [f"我的{label}是什么？", f"我的{label}是？", f"什么是我的{label}？", f"我的{label}呢？"]
    return Told([f"我的{label}是{value}"], asks, [f"我的{label}是什么"], [], f"你的{label}是{value}。", value, label)
