"""Chinese happenings put together. Owns: scenes of any Chinese verb, thing and roles, orders with tools. Knows no task.

Keys are in Chinese or English, tools have English names and descriptions in either language, as people mix them.
"""

from __future__ import annotations

import random

from held_out import is_happening
from scene_parts import field_of
from scenes import Field, Scene
from story_parts_zh import THING, wide_noun

# Verb, and the same in English, by which a tool is named.
SAME = "买/buy purchase get order|卖/sell offer|订/book reserve|取消/cancel drop|寄/send mail post"
SAME += "|找/find search|删除/delete remove|添加/add enter|搬/move carry|启动/start launch|停止/stop halt"
SAME += "|付/pay settle|租/rent hire|修/repair fix|洗/clean wash|检查/check test inspect|数/count number"
SAME += "|复制/copy clone|打印/print|锁/lock close|打开/open unlock|记录/record note log|分享/share"
SAME += "|隐藏/hide|登记/register sign_up|送/deliver bring|取/collect pick_up fetch|借/lend borrow"
SAME += "|还/return give_back|安排/plan schedule arrange|推迟/delay put_off|关注/track follow"
SAME += "|拒绝/reject refuse|装/load fill|画/draw sketch|拍/film photograph|捐/donate give_away"
SAME += "|换/exchange swap|浇/water|喂/feed|加热/heat warm|保护/guard protect|拿/take fetch"
SAME += "|带/bring take_along"
ACTIONS = [
    (zh, tuple(v.replace("_", " ") for v in en.split(" "))) for zh, en in (a.split("/") for a in SAME.split("|"))
]
ROLES: dict[str, list[tuple[str, str, str]]] = {
    "when": [
        ("zh_day", "[x]", "日期|哪天|什么时候|时间|date|when|day"),
        ("zh_clock", "[x]", "时间|几点|什么时候|钟点|time|when|hour|at"),
    ],
    "where": [
        ("zhw_place|zh_shop", "在[x]", "地点|在哪里|位置|地方|place|where|location|spot"),
        ("zh_city", "在[x]", "城市|地点|在哪里|哪个城市|city|town|where|location"),
        ("zh_room", "在[x]", "房间|在哪里|位置|哪个房间|room|where|location"),
    ],
    "whom": [
        ("zhw_name", "给[x]", "给谁|收件人|接收人|对方|recipient|to|receiver"),
        ("zhw_name", "替[x]|为[x]", "替谁|为谁|受益人|for_whom|for|on_behalf_of"),
        ("zhw_name", "和[x]一起|跟[x]一起", "和谁|同伴|伙伴|一起的人|partner|with|companion"),
    ],
    "from": [("zhw_name", "从[x]那里|从[x]那儿", "从谁|来源|原主|from|source|from_whom")],
}
"""What stands before the verb: its kinds, how it stands there, and its names, which tell its role."""
MEASURES = "个 个 个 件 份 箱 盒 只 张 台 把"
NOUNS = {"what": "物品|东西|商品|名称|item|thing|product|what", "n": "数量|多少|几个|件数|count|quantity|number|amount"}
WHO = "姓名|谁|人|用户|顾客|负责人|name|who|person|user|customer"
COST = "价格|金额|费用|花费|多少钱|price|cost|sum|amount"


def _field(kinds: str, names: str, rng: random.Random) -> Field:
    return field_of(rng.choice(kinds.split("|")), names.split("|"))


def _parts(rng: random.Random) -> tuple[dict[str, Field], dict[str, str], str, str]:
    """Fields, how those before the verb stand, the object behind it, and what the object is."""
    fields: dict[str, Field] = {}
    marks: dict[str, str] = {}
    for key in [k for k in ROLES if rng.random() < (0.15 if k == "from" else 0.5)]:
        kinds, stands, names = rng.choice(ROLES[key])
        fields[key] = _field(kinds, names, rng)
        marks[key] = rng.choice(stands.split("|")).replace("[x]", f"[{key}]")
    noun = shown = wide_noun(rng, THING)
    if rng.random() < 0.65 or not fields:
        fields["what"] = _field("zhw_thing|zh_thing|zhw_beast", NOUNS["what"], rng)
        noun, shown = "东西", "[what]"
    if rng.random() < 0.45:
        fields["n"] = _field("int:2-60", NOUNS["n"], rng)
        shown = f"[n]{rng.choice(MEASURES.split())}{shown}"
    return fields, marks, shown, noun


ORDERS = [
    "帮我{p}{v}{o}",
    "请{p}{v}{o}",
    "我想{p}{v}{o}",
    "{p}{v}{o}",
    "能不能{p}{v}{o}",
    "我们要{p}{v}{o}",
    "麻烦你{p}{v}{o}",
]
ORDERS += [
    "别忘了{p}{v}{o}",
    "老板让我{p}{v}{o}",
    "该{p}{v}{o}了",
    "我答应{p}{v}{o}",
    "需要{p}{v}{o}",
    "把{o}{p}{v}好",
    "现在就{p}{v}{o}",
]
DOES = [
    "{v}{n}。",
    "用来{v}{n}。",
    "可以{v}{n}。",
    "{v}东西。",
    "{V} {e}.",
    "{V} a thing.",
    "To {e2}.",
    "帮用户{v}{n}。",
    "{v}一个{n}。",
]


def composed_scene_zh(rng: random.Random) -> Scene:
    """A happening that is told in Chinese."""
    verb, _ = rng.choice(ACTIONS)
    fields, marks, shown, _ = _parts(rng)
    fields["who"] = _field("zhw_name|zh_name", WHO, rng)
    cost = ""
    if rng.random() < 0.3:
        fields["sum"] = _field("money", COST, rng)
        cost = "花[sum]元"
    says = []
    for _ in range(2):
        kept = [mark for key, mark in marks.items() if key != "when"]
        rng.shuffle(kept)
        when = marks.get("when", "")
        front = rng.random() < 0.5
        said = f"{when if front else ''}[who]{'' if front else when}{''.join(kept)}{cost}{verb}了{shown}。"
        if rng.random() < 0.25:
            said = f"{when}{verb}{shown}的人是[who]{'，' + '，'.join(kept) if kept else ''}。"
        says.append(said)
    says = [text for text in says if not is_happening(text)]
    return Scene("zh_made", fields, says, [], ([], [])) if says else composed_scene_zh(rng)


def _as_tool(rng: random.Random, action: tuple[str, tuple[str, ...]], noun: str) -> tuple[list[str], list[str]]:
    verb, english = action
    names = [f"{rng.choice(english)} {rng.choice(['item', 'thing', 'object', 'goods', 'order'])}"]
    made = rng.choice(english)
    does = []
    for form in rng.sample(DOES, 1):
        text = form.replace("{v}", verb).replace("{n}", noun).replace("{V}", made.capitalize())
        does.append(text.replace("{e2}", f"{made} a thing").replace("{e}", "something"))
    return names, does


def composed_order_zh(rng: random.Random) -> tuple[Scene, list[Scene]]:
    """A Chinese order with its tool, and a scene whose tool has another verb."""
    action, other = rng.sample(ACTIONS, 2)
    fields, marks, shown, noun = _parts(rng)
    asks = []
    for _ in range(2):
        form = rng.choice([f for f in ORDERS if "{o}{p}" not in f or not marks])
        asks.append(form.replace("{v}", action[0]).replace("{o}", shown).replace("{p}", "".join(marks.values())))
    asks = [text for text in asks if not is_happening(text)]
    if not asks:
        return composed_order_zh(rng)
    beside = _parts(rng)[0]
    near = Scene("zh_near", beside, [], asks, _as_tool(rng, other, noun))
    return Scene("zh_made", fields, [], asks, _as_tool(rng, action, noun)), [near]
