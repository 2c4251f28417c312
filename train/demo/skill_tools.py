"""Tool calls. Owns: fixed and invented tools, requests for them, and results. Knows no tokens."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress

from authored_data import fill, load, loosened, rows, wording
from phrasing import framed, is_chinese
from render import Case, call_text
from skill_chat import value_of
from skill_expression import expression, shown
from skill_math import digits
from tool_phrases import IMPERATIVE, KEYED, KEYED_HELD, LEADS, OPENERS
from vocabulary import invented, joined, word

Tool = dict


def schema(name: str, description: str, params: dict[str, str]) -> Tool:
    """A function schema; `params` maps an argument to its JSON type."""
    properties = {k: {"type": t} for k, t in params.items()}
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(params)},
    }


# name, description, arguments {name: word list or number}, user requests for training
FIXED: list[tuple[str, str, dict[str, str], list[str]]] = [
    (row["name"], row["description"], row["arguments"], row["train"]) for row in rows("tools.jsonl")
]
FIXED_ZH = {row["name"]: row["zh"] for row in rows("tools.jsonl") if "zh" in row}
FIXED_HELD = {row["name"]: row["held"] for row in rows("tools.jsonl")}
FIXED_FREE = {row["name"]: row["free"] for row in rows("tools.jsonl")}
"""Requests far from every training wording, written after a training and never used for one."""


def polite(rng: random.Random, text: str) -> str:
    """An opening such as `Could you` before an imperative, in a quarter of the texts."""
    if rng.random() > 0.25 or text.split(" ")[0] not in IMPERATIVE:
        return text
    opener = rng.choice(OPENERS)
    body = opener + text[0].lower() + text[1:]
    return body.rstrip(".") + "?" if opener in ("Could you ", "Can you ", "Will you ") else body


ARGS = [
    ("colour", "colour", "in [v]"),
    ("count", "number", "[v] times"),
    ("day", "day", "on [v]"),
    ("city", "city", "in [v]"),
    ("owner", "name", "for [v]"),
    ("month", "month", "in [v]"),
    ("speed", "number", "at speed [v]"),
    ("code", "word", "with code [v]"),
]
KINDS = ["number", "word", "colour", "name", "city", "day", "thing", "animal", "food", "job"]


LOOSE = frozenset(("instrument", "food", "animal", "hobby", "thing", "job", "kind", "tree"))


def _typed(kind: str) -> str:
    return "integer" if kind == "number" else "string"


def _value(rng: random.Random, kind: str, held: bool) -> str | int:
    if kind == "number":
        return rng.randint(1, 99) if rng.random() < 0.7 else rng.randint(100, 9999)
    if kind == "word":
        return invented(rng)
    if kind in LOOSE and not held and rng.random() < 0.2:
        # A value that no list holds must be copied too.
        return rng.choice(
            [invented(rng), word(rng, "noun", False), f"{word(rng, 'any', False)} {word(rng, 'noun', False)}"]
        )
    if kind == "text":
        return fill(
            "{[name] is here|we need [num] [fruit.pl]|the [animal] ate the [food]|meet me in [place]|the [objadj] [thing] is lost|{do not|please} forget the [thing]|I saw the [animal]|{I {am|will be} late|see you on [day]|the [food] is ready|please bring [fruit.pl]|happy birthday|call me|we meet at {[num]|the station}}}",  # noqa: E501
            rng,
            {},
        )
    if kind == "country":
        return rng.choice(load().countries)["country"]
    return value_of(rng, kind, held)


WEATHER_NAMES = ["get_weather", "weather", "get_current_weather", "weather_lookup"]
WEATHER = schema("get_weather", "Get the weather in a city.", {"city": "string"})
CALCULATOR = schema("calculator", "Compute an arithmetic expression.", {"expression": "string"})


def fixed_schema(row: tuple[str, str, dict[str, str], list[str]]) -> Tool:
    """The schema of a fixed tool."""
    return schema(row[0], row[1], {k: _typed(v) for k, v in row[2].items()})


NAMED = [fixed_schema(row) for row in FIXED]
USUAL = frozenset((*WEATHER_NAMES, "calculator", *(tool["name"] for tool in NAMED)))
Request = tuple[Tool, str, dict]


def weather_request(rng: random.Random, held: bool, cities: list[str]) -> Request:
    """A weather question; with a corpus some city names come from it."""
    if not held and rng.random() < 0.12:
        city = rng.choice(load().countries)["capital_zh"]
        return WEATHER, wording("weather_zh", rng, False, {"v": city}), {"city": city}
    city = rng.choice(cities) if cities and rng.random() < 0.25 else str(_value(rng, "city", held))
    tool = WEATHER
    key = "city"
    if rng.random() < 0.3 and not held:
        key = rng.choice(["location", "place", "city_name", "town"])
        tool = schema(
            rng.choice(WEATHER_NAMES),
            rng.choice(["Get the weather.", "Current weather for a place.", "Get the weather in a city."]),
            {key: "string"},
        )
    return tool, wording("weather", rng, held, {"v": city}), {key: city}


def calculator_request(rng: random.Random, held: bool) -> Request:
    """A sum for the calculator; the expression is copied with the signs of keyboards."""
    if not held and rng.random() < 0.3:
        expression_text = shown(expression(rng))
    else:
        a, b, sign = digits(rng, rng.randint(2, 5)), digits(rng, rng.randint(1, 5)), rng.choice("+-**/")
        expression_text = f"{a} {sign} {b}"
    spelled = expression_text
    if rng.random() > 0.7:
        for sign, name in (("*", "times"), ("+", "plus"), ("-", "minus"), ("/", "divided by")):
            spelled = spelled.replace(f" {sign} ", f" {name} " if held or rng.random() < 0.8 else f" {sign} ")
    elif not held and rng.random() < 0.15:
        spelled = spelled.replace("*", "×").replace("/", "÷")
    if not held and rng.random() < 0.1:
        return CALCULATOR, wording("expr_zh", rng, False, {"e": spelled}), {"expression": expression_text}
    return CALCULATOR, wording("calc", rng, held, {"e": spelled}), {"expression": expression_text}


def _value_zh(rng: random.Random, kind: str, otherwise: str | int) -> str | int:
    """A Chinese value of a kind that has some."""
    listing = {"name": "zhname", "food": "zhfood", "hobby": "zhhobby", "thing": "zhthing"}.get(kind)
    if kind == "city":
        return rng.choice(load().countries)["capital_zh"]
    if kind == "text":
        return rng.choice(["我晚点到", "记得带伞", "明天见", "生日快乐", "饭做好了", "我在车站", "请给我回电话"])
    if kind == "day":
        return rng.choice(["星期一", "星期二", "星期三", "星期五", "星期天", "明天", "后天"])
    if kind == "colour":
        return rng.choice(["红色", "蓝色", "绿色", "黄色", "白色", "紫色"])
    return rng.choice(load().words[listing]) if listing else otherwise


def decorated(rng: random.Random, tool: Tool) -> Tool:
    """The same tool as other clients write it: words on the arguments, options that nobody must give, other orders."""
    properties = {k: dict(v) for k, v in tool["parameters"]["properties"].items()}
    if rng.random() < 0.6:
        for key, entry in properties.items():
            if "description" not in entry and rng.random() < 0.7:
                said = re.sub("[_-]", " ", key)
                entry["description"] = rng.choice(
                    [f"The {said}.", f"{said}", f"{said.capitalize()} of the request", f"The {said} to use"]
                )
    if rng.random() < 0.3:
        unit = rng.choice(["unit", "format", "mode", "style", "verbose", "lang"])
        option = {"verbose": {"type": "boolean"}}.get(
            unit, {"type": "string", "enum": rng.sample(["a", "b", "short", "long", "metric", "plain", "full"], 2)}
        )
        properties |= {unit: option} if unit not in properties else {}
    parameters: dict = {"type": "object", "properties": properties, "required": tool["parameters"]["required"]}
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    if rng.random() < 0.2:
        parameters = dict(sorted(parameters.items(), reverse=rng.random() < 0.5))
    out = {"name": tool["name"], "description": tool["description"], "parameters": parameters}
    if rng.random() < 0.25:
        items = list(out.items())
        rng.shuffle(items)
        out = dict(items)
    if rng.random() < 0.1:
        out["strict"] = True
    return out


def offered(rng: random.Random, held: bool, tools: list[Tool]) -> list[Tool]:
    """The tools as a client sends them: in training a third of the lists is written in another way."""
    if held or rng.random() > 0.35:
        return tools
    return [decorated(rng, tool) for tool in tools]


def fixed_request(rng: random.Random, held: bool, held_texts: dict[str, str] = FIXED_HELD) -> Request:
    """A request for one of the fixed tools; one wording of each is held out, and one is free."""
    row = rng.choice(FIXED)
    values = {k: _value(rng, v, held) for k, v in row[2].items()}
    text = held_texts[row[0]] if held else rng.choice(row[3])
    if not held and row[0] in FIXED_ZH and rng.random() < 0.1:
        text = rng.choice(FIXED_ZH[row[0]])
        values = {k: _value_zh(rng, v, values[k]) for k, v in row[2].items()}
    elif not held and rng.random() < 0.25:
        # What comes behind a free text would become a part of it.
        text = framed(rng, text, ending="text" not in row[2].values())
    elif not held:
        # A request of words that were never seen in this order must be understood too.
        text = polite(rng, text) if rng.random() > 0.3 else loosened(rng, text, FIXED_HELD[row[0]])
    for key, value in values.items():
        text = text.replace(f"[{key}]", str(value))
    return fixed_schema(row), text[0].upper() + text[1:], values


def _described(rng: random.Random, verb: str, noun: str) -> str:
    forms = [f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} a {noun}."]
    return rng.choice([*forms, f"Tool to {verb} a {noun}.", f"Use this to {verb} the {noun}.", f"{verb} {noun}"])


def named_tool(rng: random.Random, verb: str, noun: str, params: dict[str, str]) -> Tool:
    """The schema of an invented tool in one of the usual spellings."""
    words = [verb, noun] if rng.random() < 0.85 else [noun, verb]
    return schema(joined(rng, words), _described(rng, verb, noun), params)


def strange_tool(rng: random.Random, verb: str, noun: str, params: dict[str, str]) -> Tool:
    """A tool whose name says little or nothing of what it does: only the description tells, the name must be copied."""
    own = [word(rng, rng.choice(["verb", "noun", "any"]), False) for _ in range(rng.randint(1, 3))]
    words = rng.choice([own, own, [verb, *own[:1], noun], [*own[:1], verb, noun], [verb, noun, *own[:1]]])
    name = joined(rng, words) + rng.choice(["", "", "", f"_{rng.randint(1, 99)}", f"_v{rng.randint(2, 9)}"])
    return schema(name, _described(rng, verb, noun), params)


def any_keyed(rng: random.Random) -> str:
    """A way to name an argument whose first word may be any: a form of a verb, or a word that joins sentences."""
    verb = word(rng, "verb", False)
    doing = (verb[:-1] if verb.endswith("e") and not verb.endswith("ee") else verb) + "ing"
    if doing == "using":
        doing = "having"
    join = rng.choice(["when", "once", "since", "so that", "because", "wherein", "unless", "as", "provided"])
    return rng.choice([f"{doing} [k] [v]", f"{doing} [k] [v]", f"{doing} the [k] [v]", f"{join} [k] is [v]"])


def _arguments(rng: random.Random, held: bool) -> list[tuple[str, str, str]]:
    """Argument key, kind and phrase: of the short list, or with made-up keys."""
    count = rng.choice([0, 1, 1, 1, 2, 2] if held else [0, 1, 1, 1, 2, 2, 3])
    picked = rng.sample(ARGS, count)
    if {"city", "month"} <= {p[0] for p in picked}:
        picked = picked[:1]
    for index in range(len(picked)):
        if rng.random() < 0.55:
            key = word(rng, "param", held)
            if rng.random() < 0.2:
                key = joined(rng, [word(rng, "any", held), key]).replace(".", "_")
            if key not in {p[0] for p in picked}:
                form = rng.choice(KEYED_HELD if held else KEYED)
                if not held and rng.random() < 0.2:
                    form = any_keyed(rng)
                phrase = form.replace("[k]", re.sub("[_-]", " ", key))
                picked[index] = (key, rng.choice(KINDS), phrase)
    return picked


def invented_request(rng: random.Random, held: bool, verb: str = "", noun: str = "") -> Request:
    """A request for a tool made up on the spot, so that names are copied from the schema."""
    verb, noun = verb or word(rng, "verb", held), noun or word(rng, "noun", held)
    picked = _arguments(rng, held)
    values = {k: _value(rng, kind, held) for k, kind, _ in picked}
    build = named_tool if held or rng.random() < 0.82 else strange_tool
    tool = build(rng, verb, noun, {k: _typed(kind) for k, kind, _ in picked})
    glue = " " if held or rng.random() < 0.75 else rng.choice([", ", " and ", "; "])
    phrase = glue.join(form.replace("[v]", str(values[k])) for k, _, form in picked)
    lead = rng.choice(["Would you {v} the {n}", "Kindly {v} the {n}"] if held else LEADS)
    lead = lead.replace("{a}", rng.choice(load().words["adv"]))
    lead = lead.replace("{v}", verb).replace("{n}", noun)
    text = f"{lead} {phrase}".strip()
    if not held and phrase and rng.random() < 0.12:
        text = phrase[0].upper() + phrase[1:] + ", " + lead[0].lower() + lead[1:]
    text += "?" if re.search("(?i)(^|, )(can|would|could|will|are|might|shall|may) ", text) else "."
    return tool, text[0].upper() + text[1:], values


def near_misses(rng: random.Random, verb: str, noun: str, held: bool, count: int) -> list[Tool]:
    """Tools that share the verb or the noun of a request but do something else."""
    out = []
    for _ in range(count):
        other = word(rng, "noun", held), word(rng, "verb", held)
        names = (verb, other[0]) if rng.random() < 0.5 else (other[1], noun)
        if names != (verb, noun):
            out.append(named_tool(rng, *names, {k: _typed(kind) for k, kind, _ in _arguments(rng, held)}))
    return out


def request(rng: random.Random, held: bool, cities: list[str], kind: str | None = None) -> Request:
    """A request of any kind."""
    kind = kind or rng.choice(
        ["weather", "calc", "fixed", "fixed", "fixed", "invented", "invented", "invented", "invented"]
    )
    if kind == "weather":
        return weather_request(rng, held, cities)
    if kind == "calc":
        return calculator_request(rng, held)
    if kind == "free":
        return fixed_request(rng, held, FIXED_FREE)
    return fixed_request(rng, held) if kind == "fixed" else invented_request(rng, held)


PREFIXES = ["api", "my", "do", "run", "mcp", "home", "shop", "get", "fetch", "functions", "tool", "srv", "agent"]


def renamed(rng: random.Random, tool: Tool, arguments: dict) -> tuple[Tool, dict]:
    """A usual tool under another name, some of its arguments too: names are copied from the list, never remembered."""
    said = [
        w for w in re.findall("[a-z]+", tool["description"].lower()) if len(w) > 2 and w not in ("the", "for", "its")
    ]
    pick = rng.random()
    words = rng.sample(said, min(2, len(said))) if pick < 0.5 else [word(rng, "any", False) for _ in range(2)]
    words = words or [word(rng, "verb", False)]
    name = joined(rng, words)
    if rng.random() < 0.3 or name in USUAL or name in WEATHER_NAMES:  # those have arguments of their own
        name = rng.choice(PREFIXES) + rng.choice(["_", "__", "."]) + name
    keys = {k: word(rng, "param", False) if rng.random() < 0.35 else k for k in arguments}
    if len(set(keys.values())) < len(keys):
        keys = {k: k for k in arguments}
    old = tool["parameters"]["properties"]
    properties = {keys[k]: v["type"] for k, v in old.items()}
    return schema(name, tool["description"], properties), {keys[k]: v for k, v in arguments.items()}


def others(rng: random.Random, count: int, avoid: set[str], does: str = "") -> list[Tool]:
    """Further tools, none of the names to avoid and none that does the same."""
    out: list[Tool] = []
    while len(out) < count:
        pick = rng.random()
        tool = (
            WEATHER
            if pick < 0.15
            else CALCULATOR
            if pick < 0.3
            else (fixed_schema(rng.choice(FIXED)) if pick < 0.7 else invented_request(rng, False)[0])
        )
        clash = "weather" in tool["name"] and ("weather" in does or any("weather" in a for a in avoid))
        clash = clash or tool["description"] == does
        if tool["name"] not in avoid and not clash:
            out.append(tool)
            avoid = avoid | {tool["name"]}
    return out


SKY_ZH = {
    "sunny": "晴",
    "rainy": "有雨",
    "cloudy": "多云",
    "windy": "有风",
    "foggy": "有雾",
    "snowy": "有雪",
    "stormy": "有暴风雨",
    "clear": "晴朗",
}


def computed(text: str) -> str:
    """What a calculator says; a division that leaves something gives decimals."""
    if not re.fullmatch(r"[-+*/() \d]+", text):
        raise ValueError(text)
    with suppress(ZeroDivisionError):
        result = eval(text, {"__builtins__": {}})
        return f"{result:.4f}".rstrip("0").rstrip(".")
    return "not defined"


def result_of(rng: random.Random, tool: Tool, arguments: dict) -> tuple[str, str]:
    """A tool's result text and the sentence that reports it."""
    name = tool["name"]
    if rng.random() < 0.08:
        reason = rng.choice(["timeout", "not found", "no connection", "bad request", "service unavailable"])
        return json.dumps({"error": reason}), f"The tool failed: {reason}. Please try again later."
    if name in WEATHER_NAMES and arguments:
        degrees, sky = rng.randint(-15, 38), rng.choice(load().words["weather"])
        place = next(iter(arguments.values()))
        pick = rng.random()
        if pick < 0.6:
            told = json.dumps(
                {
                    rng.choice(["temperature", "temp", "degrees"]): degrees,
                    rng.choice(["condition", "sky", "weather"]): sky,
                }
            )
        else:
            told = rng.choice(
                [f"{degrees} and {sky}", f"{degrees} degrees, {sky}", f"{sky}, {degrees}", f"{degrees}, {sky}"]
            )
        if is_chinese(str(place)):
            return told, f"{place}现在{degrees}度，{SKY_ZH[sky]}。"
        return told, f"It is {degrees} degrees and {sky} in {place}."
    if name == "calculator" and "expression" in arguments:
        result = computed(arguments["expression"])
        told = json.dumps({"result": json.loads(result) if result[-1].isdigit() else result})
        return rng.choice([told, result]), f"{arguments['expression']} = {result}."
    if name == "get_time" and "city" in arguments:
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        if is_chinese(str(arguments["city"])):
            return json.dumps({"time": clock}), f"{arguments['city']}现在是{clock}。"
        return json.dumps({"time": clock}), f"It is {clock} in {arguments['city']}."
    done = "好了。" if any(is_chinese(str(v)) for v in arguments.values()) else "Done."
    return rng.choice(['{"status": "ok"}', "ok", '{"done": true}', "done"]), done


def tool_case(rng: random.Random, held: bool, cities: list[str], kind: str | None = None) -> Case:
    """A conversation with a call; in training often with the result and a closing sentence."""
    tool, text, arguments = request(rng, held, cities, kind)
    known = not held and kind is None and tool["name"] in USUAL
    if known and rng.random() < 0.4:
        tool, arguments = renamed(rng, tool, arguments)
    tools = [tool, *others(rng, rng.choice([0, 0, 1, 2, 3]), {tool["name"]}, tool["description"])]
    if not held and kind is None and rng.random() < 0.32:
        verb, noun = word(rng, "verb", False), word(rng, "noun", False)
        tool, text, arguments = invented_request(rng, False, verb, noun)
        tools = unique(
            [
                tool,
                *near_misses(rng, verb, noun, False, rng.randint(1, 4)),
                *others(rng, rng.choice([0, 0, 1]), {tool["name"]}),
            ]
        )
    calls = [{"name": tool["name"], "arguments": arguments}]
    if not held and kind is None and rng.random() < 0.1:
        second = request(rng, held, cities, "weather" if "weather" in tool["name"] else None)
        new = second[0]["name"] not in {t["name"] for t in tools} and second[0]["description"] != tool["description"]
        if second[0]["name"] == tool["name"] or new:
            if second[0]["name"] != tool["name"]:
                tools.append(second[0])
                second_call = {"name": second[0]["name"], "arguments": second[2]}
            else:
                second_call = {
                    "name": tool["name"],
                    "arguments": dict(zip(arguments, second[2].values(), strict=False)),
                }
            text = f"{text} {second[1]}" if text[-1] in ".?!" else f"{text}. {second[1]}"
            calls.append(second_call)
    rng.shuffle(tools)
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": call_text(calls)}]
    shown_tools = offered(rng, held, tools)
    case = Case(suite=f"tool_{kind or 'any'}", messages=messages, tools=shown_tools, check="tool", expect=calls)
    if not held and len(calls) == 1 and rng.random() < 0.5:
        shown, sentence = result_of(rng, tool, arguments)
        messages += [{"role": "tool", "content": shown}, {"role": "assistant", "content": sentence}]
    return case


def problem_case(rng: random.Random, text: str, expression: str) -> Case:
    """A word problem solved by the calculator."""
    calls = [{"name": "calculator", "arguments": {"expression": expression}}]
    tools = [CALCULATOR, *others(rng, rng.choice([0, 1, 2]), {"calculator"})]
    rng.shuffle(tools)
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": call_text(calls)}]
    if rng.random() < 0.6:
        shown, sentence = result_of(rng, CALCULATOR, calls[0]["arguments"])
        messages += [{"role": "tool", "content": shown}, {"role": "assistant", "content": sentence}]
    return Case(suite="tool_problem", messages=messages, tools=tools, check="tool", expect=calls)


def result_case(rng: random.Random, held: bool, cities: list[str]) -> Case:
    """The closing sentence after a tool's result."""
    tool, text, arguments = request(rng, held, cities, rng.choice(["weather", "calc"]))
    shown, sentence = result_of(rng, tool, arguments)
    calls = [{"name": tool["name"], "arguments": arguments}]
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": call_text(calls)},
        {"role": "tool", "content": shown},
        {"role": "assistant", "content": sentence},
    ]
    return Case(suite="tool_result", messages=messages, tools=[tool], check="exact", expect=sentence)


def unique(tools: list[Tool]) -> list[Tool]:
    """The tools without those whose name came before."""
    return list({t["name"]: t for t in reversed(tools)}.values())[::-1]
