"""Tool calls. Owns: fixed and invented tools, requests for them, results and refusals. Knows no tokens."""

from __future__ import annotations

import json
import random

from authored_data import fill, load, rows, wording
from render import Case, call_text
from skill_chat import FALLBACKS, random_word, small_talk, value_of
from skill_facts import fact, joke_text
from skill_math import digits

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
FIXED_HELD = {row["name"]: row["held"] for row in rows("tools.jsonl")}
VERBS = list(
    dict.fromkeys(
        [
            "open",
            "close",
            "start",
            "stop",
            "check",
            "move",
            "paint",
            "clean",
            "lock",
            "count",
            "scan",
            "load",
            "reset",
            "fetch",
            "sell",
            "rent",
            "track",
            "measure",
            "print",
            "copy",
            "draw",
            "cut",
            "bake",
            "carry",
            "send",
            "test",
            "fill",
            "empty",
            "ship",
            "pack",
            "heat",
            "cool",
            "park",
            "hide",
            "find",
            "turn",
            "lift",
            "push",
            "pull",
            "dry",
            "grow",
            "book",
            "water",
            "test",
            "sign",
            "read",
            "cancel",
            "renew",
            "label",
            "burn",
            "freeze",
            "save",
            "delete",
            "update",
            "join",
            "split",
            "store",
            "charge",
            "mount",
            "tune",
            "ring",
            "feed",
        ]
    )
)
NOUNS = [
    "gate",
    "robot",
    "file",
    "door",
    "engine",
    "garden",
    "window",
    "printer",
    "server",
    "shelf",
    "room",
    "pump",
    "boat",
    "camera",
    "folder",
    "machine",
    "valve",
    "train",
    "box",
    "parcel",
    "lamp",
    "house",
    "report",
    "tower",
    "ticket",
    "account",
    "order",
    "car",
    "tent",
    "bench",
    "queue",
    "battery",
    "sensor",
    "oven",
    "tank",
    "wheel",
    "field",
    "bridge",
    "form",
    "cupboard",
    "playlist",
    "photo",
    "invoice",
    "basket",
    "pipe",
    "drone",
    "crane",
    "greenhouse",
]
LEADS = [
    "Please {v} the {n}",
    "{v} the {n}",
    "{v} the {n}",
    "Can you {v} the {n}",
    "I want you to {v} the {n}",
    "{v} the {n} now",
    "You should {v} the {n}",
    "Go and {v} the {n}",
    "Could you please {v} the {n}",
    "Could you {v} the {n}",
    "I need you to {v} the {n}",
    "It is time to {v} the {n}",
    "Help me {v} the {n}",
    "{v} my {n}",
    "Use the tool to {v} the {n}",
    "Will you {v} the {n}",
    "I would like you to {v} the {n}",
    "Be so kind and {v} the {n}",
    "Let us {v} the {n}",
    "Now {v} the {n}",
    "Hey, {v} the {n}",
    "We must {v} the {n}",
    "Do {v} the {n}",
    "Are you able to {v} the {n}",
]
OPENERS = [
    "Please ",
    "Could you ",
    "Can you ",
    "I want you to ",
    "I need you to ",
    "Hey, ",
    "Now ",
    "Will you ",
    "I would like you to ",
]


def polite(rng: random.Random, text: str) -> str:
    """An opening such as `Could you` before an imperative, in a quarter of the texts."""
    if rng.random() > 0.25 or text.split(" ")[0] not in IMPERATIVE:
        return text
    opener = rng.choice(OPENERS)
    body = opener + text[0].lower() + text[1:]
    return body.rstrip(".") + "?" if opener in ("Could you ", "Can you ", "Will you ") else body


IMPERATIVE = frozenset(
    [
        "Set",
        "Start",
        "Play",
        "Put",
        "Send",
        "Tell",
        "Order",
        "Get",
        "Book",
        "Reserve",
        "Convert",
        "Change",
        "Find",
        "Look",
        "Turn",
        "Make",
        "Add",
        "Buy",
        "Search",
        "Plant",
        "Heat",
        "Note",
        "Show",
    ]
)
HELD_VERBS = ["wash", "fold", "weigh", "polish"]
HELD_NOUNS = ["carpet", "fence", "kettle", "drawer"]
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


def _typed(kind: str) -> str:
    return "integer" if kind == "number" else "string"


def _value(rng: random.Random, kind: str, held: bool) -> str | int:
    if kind == "number":
        return rng.randint(1, 99)
    if kind == "word":
        return random_word(rng)
    if kind == "text":
        return fill(
            "{I {am|will be} late|see you on [day]|the [food] is ready|please bring [fruit.pl]|happy birthday|call me|we meet at {[num]|the station}}",  # noqa: E501
            rng,
            {},
        )
    if kind == "country":
        return rng.choice(load().countries)["country"]
    return value_of(rng, kind, held)


WEATHER = schema("get_weather", "Get the weather in a city.", {"city": "string"})
CALCULATOR = schema("calculator", "Compute an arithmetic expression.", {"expression": "string"})


def fixed_schema(row: tuple[str, str, dict[str, str], list[str]]) -> Tool:
    """The schema of a fixed tool."""
    return schema(row[0], row[1], {k: _typed(v) for k, v in row[2].items()})


Request = tuple[Tool, str, dict]


def weather_request(rng: random.Random, held: bool, cities: list[str]) -> Request:
    """A weather question; with a corpus some city names come from it."""
    city = rng.choice(cities) if cities and rng.random() < 0.25 else str(_value(rng, "city", held))
    tool = WEATHER
    key = "city"
    if rng.random() < 0.3 and not held:
        key = rng.choice(["location", "place", "city_name", "town"])
        tool = schema(
            rng.choice(["get_weather", "weather", "get_current_weather", "weather_lookup"]),
            rng.choice(["Get the weather.", "Current weather for a place.", "Get the weather in a city."]),
            {key: "string"},
        )
    return tool, wording("weather", rng, held, {"v": city}), {key: city}


def calculator_request(rng: random.Random, held: bool) -> Request:
    """A sum for the calculator; the expression is copied."""
    a, b, sign = digits(rng, rng.randint(2, 5)), digits(rng, rng.randint(1, 5)), rng.choice("+-**/")
    expression = f"{a} {sign} {b}"
    shown = (
        expression
        if rng.random() < 0.7
        else expression.replace("*", "times").replace("+", "plus").replace("-", "minus")
    )
    return CALCULATOR, wording("calc", rng, held, {"e": shown}), {"expression": expression}


def fixed_request(rng: random.Random, held: bool) -> Request:
    """A request for one of the fixed tools; one wording of each is held out."""
    row = rng.choice(FIXED)
    values = {k: _value(rng, v, held) for k, v in row[2].items()}
    text = FIXED_HELD[row[0]] if held else polite(rng, rng.choice(row[3]))
    for key, value in values.items():
        text = text.replace(f"[{key}]", str(value))
    return fixed_schema(row), text[0].upper() + text[1:], values


def invented_request(rng: random.Random, held: bool) -> Request:
    """A request for a tool made up on the spot, so that names are copied from the schema."""
    verb, noun = (rng.choice(HELD_VERBS), rng.choice(HELD_NOUNS)) if held else (rng.choice(VERBS), rng.choice(NOUNS))
    if not held and rng.random() < 0.5:
        noun = random_word(rng) if rng.random() < 0.6 else rng.choice(load().words["thing"]).split(" ")[-1]
    if not held and rng.random() < 0.35:
        verb = random_word(rng)
    picked = rng.sample(ARGS, rng.choice([0, 1, 1, 1, 2, 2]))
    if {"city", "month"} <= {p[0] for p in picked}:
        picked = picked[:1]
    values = {k: _value(rng, kind, held) for k, kind, _ in picked}
    name = f"{verb}_{noun}" if rng.random() < 0.8 else f"{verb}{noun.capitalize()}"
    tool = schema(name, f"{verb.capitalize()} the {noun}.", {k: _typed(kind) for k, kind, _ in picked})
    phrase = " ".join(form.replace("[v]", str(values[k])) for k, _, form in picked)
    lead = rng.choice(["Would you {v} the {n}", "Kindly {v} the {n}"] if held else LEADS)
    text = (lead.replace("{v}", verb).replace("{n}", noun) + " " + phrase).strip()
    text += "?" if text.lower().startswith(("can", "would", "could", "will", "are")) else "."
    return tool, text[0].upper() + text[1:], values


def request(rng: random.Random, held: bool, cities: list[str], kind: str | None = None) -> Request:
    """A request of any kind."""
    kind = kind or rng.choice(
        ["weather", "weather", "calc", "calc", "fixed", "fixed", "fixed", "invented", "invented", "invented"]
    )
    if kind == "weather":
        return weather_request(rng, held, cities)
    if kind == "calc":
        return calculator_request(rng, held)
    return fixed_request(rng, held) if kind == "fixed" else invented_request(rng, held)


def _others(rng: random.Random, count: int, avoid: set[str]) -> list[Tool]:
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
        clash = "weather" in tool["name"] and any("weather" in a for a in avoid)
        if tool["name"] not in avoid and not clash:
            out.append(tool)
            avoid = avoid | {tool["name"]}
    return out


def result_of(rng: random.Random, tool: Tool, arguments: dict) -> tuple[str, str]:
    """A tool's result text and the sentence that reports it."""
    name = tool["name"]
    if rng.random() < 0.08:
        reason = rng.choice(["timeout", "not found", "no connection", "bad request", "service unavailable"])
        return json.dumps({"error": reason}), f"The tool failed: {reason}. Please try again later."
    if "weather" in name:
        degrees, sky = rng.randint(-15, 38), rng.choice(load().words["weather"])
        place = next(iter(arguments.values()))
        pick = rng.random()
        if pick < 0.6:
            shown = json.dumps(
                {
                    rng.choice(["temperature", "temp", "degrees"]): degrees,
                    rng.choice(["condition", "sky", "weather"]): sky,
                }
            )
        else:
            shown = rng.choice(
                [f"{degrees} and {sky}", f"{degrees} degrees, {sky}", f"{sky}, {degrees}", f"{degrees}, {sky}"]
            )
        return shown, f"It is {degrees} degrees and {sky} in {place}."
    if name == "calculator":
        a, sign, b = arguments["expression"].split(" ")
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) // max(int(b), 1)}[sign]
        return rng.choice([json.dumps({"result": value}), str(value)]), f"{arguments['expression']} = {value}."
    if name == "get_time":
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        return json.dumps({"time": clock}), f"It is {clock} in {arguments['city']}."
    return rng.choice(['{"status": "ok"}', "ok", '{"done": true}', "done"]), "Done."


def tool_case(rng: random.Random, held: bool, cities: list[str], kind: str | None = None) -> Case:
    """A conversation with a call; in training often with the result and a closing sentence."""
    tool, text, arguments = request(rng, held, cities, kind)
    tools = [tool, *_others(rng, rng.choice([0, 0, 1, 2, 3]), {tool["name"]})]
    calls = [{"name": tool["name"], "arguments": arguments}]
    if not held and kind is None and rng.random() < 0.1:
        second = request(rng, held, cities, "weather" if "weather" in tool["name"] else None)
        if second[0]["name"] == tool["name"] or second[0]["name"] not in {t["name"] for t in tools}:
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
    case = Case(suite=f"tool_{kind or 'any'}", messages=messages, tools=tools, check="tool", expect=calls)
    if not held and len(calls) == 1 and rng.random() < 0.5:
        shown, sentence = result_of(rng, tool, arguments)
        messages += [{"role": "tool", "content": shown}, {"role": "assistant", "content": sentence}]
    return case


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


NO_TOOL = "I have no tool for that."


def no_call(rng: random.Random, held: bool, jokes: list[dict]) -> Case:
    """Tools are there but none fits: answer plainly or say that no tool fits."""
    tools = _others(rng, rng.randint(1, 4), set())
    names = {t["name"] for t in tools}
    pick = rng.random()
    if pick < 0.35:
        messages = fact(
            rng, held, rng.choice(["capital", "opposite", "sound", "colour", "capital"]), "", chat=True
        ).messages
    elif pick < 0.55:
        messages = small_talk(rng, held).messages
    elif pick < 0.65:
        messages = [
            {"role": "user", "content": wording("joke", rng, held, {})},
            {"role": "assistant", "content": joke_text(rng, jokes)},
        ]
    else:
        tool, text, _ = request(rng, held, [], rng.choice(["weather", "fixed", "fixed", "invented"]))
        if tool["name"] in names or ("weather" in tool["name"] and any("weather" in n for n in names)):
            return no_call(rng, held, jokes)
        bare = not held and rng.random() < 0.2
        messages = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": FALLBACKS[1] if bare else NO_TOOL},
        ]
        return Case(suite="tool_none", messages=messages, tools=None if bare else tools, check="no_call")
    return Case(suite="tool_none", messages=messages, tools=tools, check="no_call")
