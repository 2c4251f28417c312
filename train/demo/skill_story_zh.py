"""Chinese stories put together. Owns: requests for them in any form. Knows no tokens."""

from __future__ import annotations

import random
import re

from authored_data import wording
from held_out import is_story_wording
from render import Case
from skill_facts import ask, plain
from story_parts_zh import WHOLE, beats_zh, counts_as_animal, dressed_zh, told_zh, topic_zh

READ = [
    "讲",
    "写",
    "编",
    "说",
    "来",
    "给我讲",
    "请写",
    "请讲",
    "帮我编",
    "想听",
    "我想看",
    "能不能讲",
    "再讲",
    "现在写",
    "麻烦写",
]
ONE = ["一个", "个", "一篇", "一段", "一个小小的", "一个短短的", "一个好听的", "一个有趣的"]
ABOUT = ["关于", "有关", "讲", "说", "写", "围绕", "", ""]
KINDS = ["故事", "故事", "故事", "童话", "小故事", "睡前故事", "短文"]
CLOSED = ["。", "。", "吧。", "", "，谢谢。", "，好吗？", "！", "？"]


def _asked_zh(rng: random.Random, topic: str) -> str:
    """A request for a story, put together; the topic stands inside, in front or behind."""
    do, one, about, kind, end = (rng.choice(pool) for pool in (READ, ONE, ABOUT, KINDS, CLOSED))
    pick = rng.random()
    if pick < 0.6:
        return f"{do}{one}{about}{topic}的{kind}{end}"
    if pick < 0.7:
        return f"{do}{one}{kind}，{rng.choice(['要有', '里面有', '关于', '主角是', '说的是', '讲讲'])}{topic}{end}"
    if pick < 0.8:
        return f"{do}{one}{kind}：{topic}{rng.choice(['', '。'])}"
    if pick < 0.9:
        return f"{rng.choice(['', '我喜欢', '孩子喜欢', '题目是', '主题：', '关于'])}{topic}，{do}{one}{kind}{end}"
    return f"{topic}{rng.choice(['：', '，', '——', ' '])}{do}{one}{kind}{end}"


def made_story_zh(rng: random.Random) -> Case:
    """A story whose topic and beats are put together, so that only the request tells what comes next."""
    about = topic_zh(rng)
    values = dressed_zh(rng, about.given, counts_as_animal(about.given.get("k", "")))
    lines = [told_zh(rng, pool, values) for pool in beats_zh(rng)]
    if rng.random() < 0.6:
        lines.insert(0, rng.choice(WHOLE).replace("[t]", about.phrase))
    text = "".join(lines)
    for word in about.must:
        if word not in text:
            lines.insert(rng.randint(1, 3), rng.choice(THERE).replace("[w]", word).replace("[n]", values["n"]))
            text = "".join(lines)
    check = "".join(rf"(?=[\s\S]*{re.escape(w)})" for w in about.must)
    if rng.random() < 0.08:
        return plain("", text, "story_zh", check)
    asked = _asked_zh(rng, about.phrase)
    if rng.random() < 0.3 or is_story_wording(asked):
        asked = wording("story_zh", rng, False, {"t": about.phrase})
    return ask(asked, text, "story_zh", check, check="story")


THERE = [
    "那里还有[w]。",
    "大家都知道[w]。",
    "故事要从[w]说起。",
    "[n]常常想起[w]。",
    "不远的地方就是[w]。",
    "[n]没有忘记[w]。",
]
