"""Free requests for tools. Owns: requests in any words, arguments as people tell them. Knows no tokens.

A request shares words with the name or the description of its tool, and nothing else is fixed: the order, what stands
around, and how an argument is told. Values are copied from the request, and their JSON types follow the schema.
"""

from __future__ import annotations

import random
import re

from authored_data import load
from phrasing import any_words, framed, occasion
from render import Case, call_text
from skill_chat import person
from skill_free_json import clock, code_of, span
from skill_refusals import NO_TOOL
from skill_tools import PREFIXES, offered, others, result_of, schema, unique
from twins import keep, kept
from verbs import thing
from vocabulary import any_sign, invented, is_held, joined, word

# What an argument may be called, and how its value is told; `S` marks what may stand as a sentence of its own.
WAYS: dict[str, list[tuple[list[str], list[str]]]] = {
    "count": [
        (["minutes", "duration", "mins"], ["for [v] minutes", "in [v] minutes", "S [v] minutes should do", "[v] min"]),
        (["percent", "level", "value", "brightness"], ["to [v] percent", "at [v] %", "S [v] percent would be right"]),
        (["count", "quantity", "n", "copies", "times"], ["[v] of them", "[v] times", "S I need [v]", "S make it [v]"]),
        (
            ["people", "guests", "seats", "persons"],
            ["for [v] people", "S we are [v]", "S there are [v] of us", "for [v]"],
        ),
        (
            ["amount", "sum", "price", "euros"],
            ["for [v] euros", "with [v] dollars", "S it may cost [v]", "of [v] euros"],
        ),
        (["degrees", "temperature", "celsius"], ["to [v] degrees", "S [v] degrees, please", "at [v] degrees"]),
        (["page", "floor", "room", "line", "gate"], ["on [k] [v]", "at [k] [v]", "in [k] [v]", "S it is [k] [v]"]),
        (["days", "nights", "weeks", "hours"], ["for [v] [k]", "in [v] [k]", "S [v] [k] are enough", "within [v] [k]"]),
        (["size", "speed", "volume", "rate", "weight"], ["with [k] [v]", "S [k] [v]", "at a [k] of [v]", "to [k] [v]"]),
    ],
    "name": [
        (["name", "person", "user", "contact", "who"], ["for [v]", "S it is for [v]", "S [v] asked for it", "to [v]"]),
        (["recipient", "to", "receiver"], ["to [v]", "S [v] should get it", "S send it to [v]", "for [v]"]),
        (["guest", "friend", "partner", "player"], ["with [v]", "S [v] comes too", "S [v] is with me", "for [v]"]),
        (["owner", "author", "artist"], ["of [v]", "by [v]", "S it belongs to [v]", "from [v]"]),
    ],
    "city": [
        (
            ["city", "location", "place", "town"],
            ["in [v]", "near [v]", "S I am in [v]", "S [v] is the place", "around [v]"],
        ),
        (["destination", "to_city", "target"], ["to [v]", "S I want to go to [v]", "towards [v]", "bound for [v]"]),
        (["origin", "from_city", "start"], ["from [v]", "S we start in [v]", "leaving [v]", "out of [v]"]),
    ],
    "day": [(["day", "date", "when", "weekday"], ["on [v]", "for [v]", "S it must be [v]", "this [v]", "by [v]"])],
    "time": [
        (["time", "at", "start_time", "hour"], ["at [v]", "by [v]", "S [v] would be good", "before [v]", "from [v]"])
    ],
    "colour": [(["colour", "color", "shade"], ["in [v]", "S it should be [v]", "make it [v]", "coloured [v]"])],
    "text": [
        (
            ["text", "message", "body", "content"],
            [": [v]", 'saying "[v]"', 'with the words "[v]"', 'S write "[v]"', "'[v]'"],
        ),
        (
            ["title", "label", "subject", "heading"],
            ["called [v]", "titled '[v]'", "S name it [v]", 'with the [k] "[v]"'],
        ),
        (["query", "topic", "keyword", "term"], ["about [v]", "on [v]", "S I mean [v]", "for [v]", "S the [k] is [v]"]),
    ],
    "code": [
        (["code", "id", "number", "reference", "key"], ["number [v]", "S the [k] is [v]", "with [k] [v]", "([v])"])
    ],
    "email": [(["email", "address", "mail"], ["to [v]", "S the address is [v]", "at [v]", "for [v]"])],
}
MADE = [
    "with [k] [v]",
    "with [v] as [k]",
    "S the [k] is [v]",
    "S [k]: [v]",
    "[k] [v]",
    "where the [k] is [v]",
    "([k] [v])",
]
MADE += ["S use [v] for the [k]", "S [v] is the [k]", "the [k] being [v]", "[k] = [v]", "S let the [k] be [v]"]

CORES = ["{v} the {n}", "{v} a {n}", "{v} {n}", "could you {v} the {n}", "can you {v} a {n}", "I want to {v} the {n}"]
CORES += ["I'd like to {v} a {n}", "the {n} has to be {d}", "somebody should {v} the {n}", "any chance to {v} a {n}"]
CORES += [
    "let's get the {n} {d}",
    "time to {v} the {n}",
    "how about a {n} to {v}",
    "please {v} our {n}",
    "go {v} the {n}",
]
CORES += [
    "the {n} is waiting, {v} it",
    "I have a {n}, {v} it",
    "there is a {n} we must {v}",
    "help, I cannot {v} the {n}",
]
CORES += [
    "it would help me to {v} the {n}",
    "my {n} should be {d}",
    "is it possible to {v} the {n}",
    "we need to {v} that {n}",
]
CORES += [
    "don't forget to {v} the {n}",
    "you may {v} the {n} now",
    "get the {n} {d}",
    "a {n} has to be {d}",
    "{v} me a {n}",
]
CORES += [
    "I wonder if you could {v} the {n}",
    "I still have to {v} the {n}",
    "would you mind to {v} the {n}",
    "{n}: {v} it",
]
CORES += ["make sure that the {n} is {d}", "see to it that my {n} gets {d}", "we want the {n} {d}", "I need a {n} {d}"]
CORES += [
    "your job is to {v} the {n}",
    "it's the {n} again, {v} it",
    "{v} some {n}",
    "just {v} the {n}",
    "the {n}? {v} it",
]
VAGUE = [
    "a {n}, please",
    "I need a {n}",
    "the {n}, quickly",
    "we have no {n} yet",
    "what about the {n}",
    "a {n} would be great",
]
VAGUE += ["it is about the {n}", "{n}", "give me the {n}", "I want the {n}", "something with the {n}", "show me a {n}"]
VAGUE += [
    "is there a {n}",
    "do you have a {n}",
    "how is the {n}",
    "tell me the {n}",
    "which {n} is there",
    "find me a {n}",
]
REAL = "book/hotel taxi flight room table ticket seat|order/pizza lunch taxi book coffee flowers|play/song"
REAL += " movie game video playlist|turn on/lamp heater radio fan|turn off/lamp heater radio alarm|send/email"
REAL += " letter invoice photo file message|check/calendar stock balance traffic order|cancel/order meeting"
REAL += " flight subscription|create/event task list user folder|search/recipe hotel article photo"
REAL += " song|find/doctor restaurant parking flight job|start/timer oven backup engine|stop/timer engine"
REAL += " recording pump|open/door window file garage gate|close/door blinds account window|lock/door car"
REAL += " screen|call/taxi doctor plumber office|convert/currency unit file|calculate/tax route loan"
REAL += " tip|read/news email page|delete/file photo note user|rename/file folder pet|share/photo location"
REAL += " screen|print/page label ticket|track/parcel flight run|buy/ticket stamp share|rent/car boat"
REAL += " flat|pay/bill invoice fine|water/garden lawn|feed/cat fish hens|clean/room pool car|charge/phone"
REAL += " car|plan/trip meal party|measure/distance noise room|record/video song call|update/address profile"
REAL += " price|list/users tasks files|draw/map circle chart|count/steps calories visitors|translate/sentence"
REAL += " menu letter|summarise/article report|resize/image window|set/alarm reminder thermostat|raise/blinds"
REAL += " volume|lower/volume price shelf|report/problem bug fault|invite/guest colleague"
PAST = {"send": "sent", "find": "found", "buy": "bought", "read": "read", "pay": "paid", "feed": "fed", "draw": "drawn"}
PAST |= {
    "set": "set",
    "rent": "rented",
    "turn on": "turned on",
    "turn off": "turned off",
    "plan": "planned",
    "get": "got",
}
PAST |= {"stop": "stopped", "make": "made", "take": "taken", "write": "written", "give": "given", "build": "built"}


def _real() -> list[tuple[str, str]]:
    """Usual verbs with what they are done to; none is a word kept for the evaluation."""
    pairs = [(v, n) for row in REAL.split("|") for v, rest in [row.split("/")] for n in rest.split(" ")]
    return [(v, n) for v, n in pairs if not any(map(is_held, [*v.split(" "), n]))]


PAIRS = _real()


def done(verb: str) -> str:
    """What something is after it: `booked`, `sent`."""
    if verb in PAST:
        return PAST[verb]
    return verb + "d" if verb.endswith("e") else verb[:-1] + "ied" if re.search("[^aeo]y$", verb) else verb + "ed"


def _value(rng: random.Random, kind: str) -> tuple[str | int | float, str]:
    """A value with its JSON type."""
    if kind == "count":
        if rng.random() < 0.08:
            return round(rng.randint(1, 99) + rng.choice([0.5, 0.25, 0.75]), 2), "number"
        return rng.randint(1, rng.choice([9, 60, 100, 5000])), rng.choice(["integer", "integer", "number"])
    made = {
        "name": lambda: person(rng, False),
        "city": lambda: rng.choice(load().countries)["capital"] if rng.random() < 0.7 else invented(rng).capitalize(),
        "day": lambda: rng.choice(
            [*load().words["day"], "tomorrow", f"{rng.randint(1, 28)} {rng.choice(load().words['month'])}"]
        ),
        "time": lambda: clock(rng),
        "colour": lambda: rng.choice(load().words["colour"]),
        "code": lambda: code_of(rng),
        "email": lambda: f"{invented(rng)}@{invented(rng)}.{rng.choice(['com', 'org', 'net'])}",
        "text": lambda: (
            span(rng) if rng.random() < 0.6 else f"{rng.choice(['I saw', 'we need', 'bring', 'it is'])} {thing(rng)}"
        ),
    }
    return made[kind](), "string"


Argument = tuple[str, object, str, str]  # key, value, JSON type, how it is told


def _arguments(rng: random.Random) -> list[Argument]:
    out: list[Argument] = []
    for kind in rng.sample(list(WAYS), rng.choice([0, 1, 1, 1, 2, 2, 3])):
        value, typed = _value(rng, kind)
        keys, ways = rng.choice(WAYS[kind])
        key, way = rng.choice(keys), rng.choice(ways)
        if is_held(key) or rng.random() < 0.3:
            key = word(rng, "param", False)
            key = joined(rng, [word(rng, "any", False), key]).replace(".", "_") if rng.random() < 0.25 else key
            way = rng.choice(MADE)
        if key not in [a[0] for a in out]:
            out.append((key, value, typed, way.replace("[k]", re.sub("[_-]", " ", key)).replace("[v]", str(value))))
    return out


def _free_text(rng: random.Random, core: str, told: list[str], values: tuple[str, ...]) -> str:
    """The order and its arguments, in any order, as phrases of one sentence or sentences of their own."""
    inside = [t for t in told if not t.startswith("S ")]
    apart = [t[2:] for t in told if t.startswith("S ")]
    rng.shuffle(inside)
    inside.sort(key=lambda t: t[0] == ":")
    last = bool(inside) and inside[-1][0] == ":"
    if inside and not last and rng.random() < 0.15:
        core = f"{inside[0]}, {core}"
        inside = inside[1:]
    text = core + "".join(t if t[0] == ":" else f" {t}" for t in inside)
    if rng.random() < 0.12 and not last:
        text = " ".join(any_words(rng, rng.randint(1, 4))) + rng.choice([", ", ": ", " "]) + text
    text = text[0].upper() + text[1:] if rng.random() < 0.8 else text
    mark = "?" if re.match("(?i)(can|could|would|any|is|how|do|what|which|the [^ ]+[?])", core) else rng.choice("...!")
    parts = [text + ("" if last else mark)]
    for extra in apart:
        # A value at the start stays as it is, since it is copied.
        said = (extra if extra.startswith(values) else extra[0].upper() + extra[1:]) + "."
        parts = [said, *parts] if last or rng.random() < 0.3 else [*parts, said]
    return " ".join(parts)


def _named(rng: random.Random, verb: str, noun: str) -> str:
    """A name that says what the tool does, a part of it, or nothing."""
    words = [*verb.split(" "), noun] if rng.random() < 0.75 else [noun, *verb.split(" ")]
    pick = rng.random()
    if pick < 0.12:
        words = [rng.choice(PREFIXES), *words]
    elif pick < 0.22:
        words = [noun, rng.choice(["service", "api", "tool", "manager", "helper"])]
    elif pick < 0.32:
        words = [word(rng, "any", False) for _ in range(rng.randint(1, 2))]
    return joined(rng, [w for w in words if not is_held(w)] or words)


def _described(rng: random.Random, verb: str, noun: str) -> str:
    forms = [
        "{V} the {n}.",
        "{V} a {n}.",
        "{V} a {n} for the user.",
        "Tool to {v} a {n}.",
        "{V} {n}",
        "Lets the user {v} a {n}.",
    ]
    forms += [
        "{V} the {n} and return the result.",
        "Use this to {v} a {n}.",
        "Can {v} any {n}.",
        "{V} one {n} at a time.",
    ]
    return rng.choice(forms).format(v=verb, V=verb.capitalize(), n=noun)


def _tool(rng: random.Random, verb: str, noun: str, arguments: list[Argument]) -> dict:
    return schema(_named(rng, verb, noun), _described(rng, verb, noun), {k: t for k, _, t, _ in arguments})


def _about(rng: random.Random) -> tuple[str, str]:
    """A verb with its noun: usual ones, or any two words."""
    return rng.choice(PAIRS) if rng.random() < 0.45 else (word(rng, "verb", False), word(rng, "noun", False))


def _request(rng: random.Random, verb: str, noun: str, alone: bool) -> tuple[str, list[Argument]]:
    """What somebody wants done, in any words, and its arguments; `alone` names the noun and no verb."""
    arguments = _arguments(rng)
    core = rng.choice(VAGUE if alone else CORES).format(v=verb, n=noun, d=done(verb))
    text = _free_text(rng, core, [a[3] for a in arguments], tuple(str(a[1]) for a in arguments))
    last = any(a[3][0] == ":" for a in arguments)
    if rng.random() < 0.3:
        text = framed(rng, text, ending=False) if rng.random() < 0.6 else f"{occasion(rng)} {text}"
    elif rng.random() < 0.12 and not last:
        text = f"{text} {occasion(rng)}"
    return text, arguments


def _others(rng: random.Random, verb: str, noun: str, alone: bool) -> list[dict]:
    """Tools for other things; a request that names its verb may meet one that does something else with the same."""
    out = []
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        other = _about(rng)
        if other[1] != noun and (other[0] != verb or not alone):
            out.append(_tool(rng, *other, _arguments(rng)))
    second = word(rng, "verb", False)
    if not alone and rng.random() < 0.3 and second != verb:
        out.append(_tool(rng, second, noun, _arguments(rng)))
    return out


def free_tool(rng: random.Random) -> Case:
    """A free request and its call. Now and then its tool is missing, and the same request comes with it as the next."""
    if twin := kept(rng, "free_tool"):
        return twin
    verb, noun = _about(rng)
    alone = rng.random() < 0.25
    text, arguments = _request(rng, verb, noun, alone)
    tool = _tool(rng, verb, noun, arguments)
    missing = not alone and rng.random() < 0.08
    beside = [t for t in _others(rng, verb, noun, alone) if t["name"] != tool["name"]]
    more = rng.choice([1, 2] if missing and not beside else [0, 0, 1])
    beside += others(rng, more, {tool["name"]}, tool["description"])
    called = _called(rng, text, tool, {k: v for k, v, _, _ in arguments}, beside)
    if not missing:
        return called
    keep(rng, "free_tool", called)
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": NO_TOOL}]
    shown = offered(rng, False, unique(beside))
    return Case(suite="tool_none", messages=messages, tools=shown, must="no tool", check="no_call")


def _called(rng: random.Random, text: str, tool: dict, arguments: dict, beside: list[dict]) -> Case:
    """A request with its tool and the call, sometimes with the closing sentence."""
    tools = unique([tool, *beside])
    rng.shuffle(tools)
    calls = [{"name": tool["name"], "arguments": arguments}]
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": call_text(calls)}]
    if rng.random() < 0.3:
        shown, sentence = result_of(rng, tool, calls[0]["arguments"])
        messages += [{"role": "tool", "content": shown}, {"role": "assistant", "content": sentence}]
    return Case(suite="tool_any", messages=messages, tools=offered(rng, False, tools), check="tool", expect=calls)


VERBS_ZH = "打开 关闭 预订 发送 查询 取消 播放 创建 删除 翻译 购买 设置 搜索 记录 修理 清洗 租 支付 更新 打印"
NOUNS_ZH = "灯 窗户 酒店 机票 邮件 订单 音乐 会议 文件 闹钟 餐厅 照片 天线 账单 地址 汽车 空调 快递 报告 房间 门票 名单"
CORES_ZH = [
    "{v}{n}",
    "请{v}{n}",
    "帮我{v}{n}",
    "能{v}一下{n}吗",
    "我想{v}{n}",
    "该{v}{n}了",
    "{n}需要{v}",
    "麻烦{v}那个{n}",
    "我要{v}一个{n}",
]
WAYS_ZH = {
    "city": ["，在[v]", "，地点是[v]", "，我在[v]"],
    "name": ["，给[v]", "，是[v]要的", "，找[v]"],
    "count": ["，要[v]个", "，一共[v]", "，数量[v]"],
    "text": ["，内容是[v]", "，名字叫[v]", "：[v]"],
    "day": ["，时间是[v]", "，[v]的", "，定在[v]"],
}


def free_tool_zh(rng: random.Random) -> Case:
    """The same in Chinese: the tool described in Chinese or not, its arguments copied sign by sign."""
    verb, noun = rng.choice(VERBS_ZH.split()), rng.choice(NOUNS_ZH.split())
    if rng.random() < 0.3:
        noun = any_sign(rng) + any_sign(rng)
    name = joined(rng, [word(rng, "verb", False), word(rng, "noun", False)])
    values: dict[str, object] = {}
    types, text = {}, rng.choice(CORES_ZH).format(v=verb, n=noun)
    for kind in sorted(rng.sample(list(WAYS_ZH), rng.choice([0, 1, 1, 2])), key=lambda k: k == "text"):
        words = load().words
        value = {
            "city": rng.choice(load().countries)["capital_zh"],
            "name": rng.choice([rng.choice(words["zhname"]), any_sign(rng) + any_sign(rng)]),
            "count": rng.randint(1, 300),
            "text": rng.choice(words["zhthing"]) + any_sign(rng),
            "day": rng.choice(["星期一", "星期三", "星期六", "明天", "后天", "下周", "五月一号"]),
        }[kind]
        key = kind if rng.random() < 0.5 else word(rng, "param", False)
        if key not in values and not is_held(key):
            values[key] = value
            types[key] = "integer" if isinstance(value, int) else "string"
            text += rng.choice(WAYS_ZH[kind]).replace("[v]", str(value))
    tool = schema(name, rng.choice([f"{verb}{noun}。", f"用来{verb}{noun}的工具。", f"{verb}{noun}"]), types)
    tools = [tool, *others(rng, rng.choice([0, 1, 2]), {name}, tool["description"])]
    rng.shuffle(tools)
    calls = [{"name": name, "arguments": values}]
    messages = [{"role": "user", "content": text + rng.choice(["。", "", "！"])}]
    messages.append({"role": "assistant", "content": call_text(calls)})
    return Case(suite="tool_any", messages=messages, tools=offered(rng, False, tools), check="tool", expect=calls)
