"""Chinese stories with all that was asked for. Owns: happenings as topics, names, places, sentences, endings."""

from __future__ import annotations

import random
import re

from authored_data import fill, load
from render import Case
from skill_facts import ask
from skill_zh import MADE, rows_zh
from story_parts_zh import LIVING, PLACE, THING, beats_zh, dressed_zh, wide_noun
from vocabulary import any_sign

VERBS = "找到 丢了 买了 卖掉 捡到 修好 画 打开 藏起 发现"
VERBS += " 喜欢 想要 做了 带来 忘了 拿走 洗了 弄坏 送来 保护 种下 看见 借走 得到 寻找 害怕"
COUNTS = "一两三四五六七八"
ENDINGS = [
    (["结局要快乐", "最后大家都很高兴", "要有好的结局", "结尾要开心"], ["最后，大家都很高兴。", "结局很快乐。"]),
    (["结局要悲伤", "最后很难过", "结尾要伤心"], ["最后，大家都很难过。", "结局很悲伤。"]),
    (["最后他们成了朋友", "结尾他们做了朋友"], ["最后，他们成了朋友。"]),
    (["最后大家回家了", "结尾要回家"], ["最后，大家回家了。"]),
    (["最后睡着了", "结尾是睡觉"], ["最后，大家都睡着了。"]),
]
HEADS = [
    "写一个故事：[t]",
    "讲一个故事，[t]",
    "请写一个[t]的故事",
    "编个故事，说的是[t]",
    "给我讲个[t]的故事",
    "我想听[t]的故事",
]
HEADS += [
    "来一个童话：[t]",
    "写一篇小故事，内容是[t]",
    "能讲个[t]的故事吗",
    "故事里要有[t]",
    "编一个[t]的童话",
    "说说[t]，写成故事",
]
STARTS = ["有一天，[t]。", "从前，[t]。", "这是[t]的故事。", "很久以前，[t]。", "一天早上，[t]。"]


def _deed(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return any_sign(rng) + any_sign(rng)
    return rng.choice(VERBS.split())


def _happening(rng: random.Random, kind: str, thing: str, place: str) -> str:
    """Who does what, and where."""
    deed = _deed(rng)
    extra = rng.choice(["", "", "红色的", "旧", "小小的", "会唱歌的", "金色的"])
    forms = ["[k][v]一个[o]", "一个[k][v][o]", "[k]在[p][v][o]", "一个[k]在[p][v]一个[o]", "[k]不小心弄坏了[o]"]
    forms += [
        "[k]去[p][v][o]",
        "一个[k]为了[o]来到[p]",
        "[k]想[v][o]",
        "[k]和[o]在[p]",
        "[k]教[o]唱歌",
        "[k]从[p]带走[o]",
    ]
    text = rng.choice(forms).replace("了了", "了")
    return text.replace("[k]", kind).replace("[v]", deed).replace("[o]", extra + thing).replace("[p]", place)


def asked_story_zh(rng: random.Random) -> Case:
    """A story on what happens, with a name, a place, a number of sentences or an ending that was asked for."""
    kind, thing = wide_noun(rng, LIVING), wide_noun(rng, THING)
    place, far = wide_noun(rng, PLACE), wide_noun(rng, PLACE)
    told = _happening(rng, kind, thing, place)
    name = rng.choice(load().words["zhname"]) if rng.random() < 0.45 else ""
    if name and rng.random() < 0.2:
        name = any_sign(rng) + any_sign(rng)
    count = rng.randint(2, 7) if rng.random() < 0.4 else 0
    lines, must, extras = [rng.choice(STARTS).replace("[t]", told)], [told], []
    room = count - 1 if count else 9
    if name and room:
        forms = ["主角叫[n]", "[k]叫[n]", "主人公的名字是[n]", "[k]的名字叫[n]", "名字用[n]", "主角名叫[n]"]
        extras.append(rng.choice(forms).replace("[n]", name).replace("[k]", kind))
        lines.append(
            rng.choice(["[k]名叫[n]。", "[k]的名字是[n]。", "大家叫[k][n]。"]).replace("[k]", kind).replace("[n]", name)
        )
        must.append(name)
        room -= 1
    if rng.random() < 0.3 and room > 1:
        extras.append(
            rng.choice(["发生在[p]", "故事在[p]发生", "地点是[p]", "背景在[p]", "要发生在[p]"]).replace("[p]", far)
        )
        lines.append(rng.choice(["这件事发生在[p]。", "故事发生在[p]。", "那是在[p]。"]).replace("[p]", far))
        must.append(far)
        room -= 1
    last = ""
    if rng.random() < 0.33 and room:
        asks, tells = rng.choice(ENDINGS)
        extras.append(rng.choice(asks))
        last = rng.choice(tells)
        room -= 1
    if count:
        number = COUNTS[count - 1] if rng.random() < 0.6 else str(count)
        extras.append(
            rng.choice(["用[n]句话", "只要[n]句", "一共[n]句话", "[n]句话", "写[n]句", "正好[n]句话"]).replace(
                "[n]", number
            )
        )
    other = rng.choice(load().words["zhname"])
    values = {"k": kind, "l": wide_noun(rng, LIVING), "o": thing, "p": place, "c": "个", "n": name or kind}
    values |= {"m": other, "t": rng.choice(load().words["zhtrait"])}
    pools = rng.choice(rows_zh())["beats"][1:]
    if rng.random() < MADE:
        given = {"k": kind, "o": thing, "p": place} | ({"n": name} if name else {})
        values, pools = dressed_zh(rng, given, False) | {"n": name or kind}, beats_zh(rng)[1:]
    beats = [fill(rng.choice(beat), rng, values) for beat in pools]
    beats = [beat for beat in beats if not re.search("[。！？]”?.", beat)] if count else beats
    if count and len(beats) < room:
        return asked_story_zh(rng)
    lines += [beats[at] for at in sorted(rng.sample(range(len(beats)), room))] if count else beats
    rng.shuffle(extras)
    user = "，".join([rng.choice(HEADS).replace("[t]", told), *extras]) + rng.choice(["。", "。", "", "，谢谢。"])
    check = "".join(rf"(?=[\s\S]*{re.escape(w)})" for w in must)
    answer = "".join(lines) + last
    return ask(user, answer, "story_asked_zh", check, check="story", tag=str(count))
