"""Where no tool is called. Owns: requests without tools or with other ones, questions that need none."""

from __future__ import annotations

import random
import re

from authored_data import wording
from phrasing import is_chinese
from render import Case, call_text
from skill_chat import memory, small_talk
from skill_decline import DECLINED, decline
from skill_expression import answer_of, expression, shown, value, worked
from skill_extract import json_record
from skill_facts import fact, fact_zh, joke_text
from skill_math import arithmetic
from skill_tools import (
    NAMED,
    WEATHER_NAMES,
    Request,
    Tool,
    invented_request,
    near_misses,
    offered,
    others,
    request,
    unique,
)
from twins import keep, kept
from vocabulary import word

NO_TOOL, NO_TOOL_ZH = "I have no tool for that.", "我没有做这件事的工具。"
NO_TOOLS = "I am a tiny demo model and I have no tool for that."
NO_TOOLS_ZH = "我只是一个很小的演示模型，没有做这件事的工具。"
UNNAMED = [
    "You are an assistant with tools.",
    "You can call tools.",
    "Use tools when they are needed.",
    "You are a helpful assistant. Call functions if you can.",
    "You are an agent.",
    "No tools are available.",
    "You have no tools.",
    "Answer with a tool call when a tool fits.",
]
"""System prompts that speak of tools and name none."""
UNNAMED_HELD = ["You are an assistant that may call functions.", "Make use of your tools where they help."]
SYNTAX = ["Call the function {t}. ", "Use {t}: ", "Use the tool {t}. ", "Run {t} now. ", "[{t}] ", "Please call {t}. "]
SYNTAX_HELD = ["Invoke {t} for this: "]


def _missing(rng: random.Random, text: str) -> str:
    return NO_TOOL_ZH if is_chinese(text) else NO_TOOL


SPEECH = frozenset(("search_story", "translate_text", "count_words", "save_note"))
"""Tools whose requests the model answers by itself: it tells, translates, counts and repeats."""


def unoffered(rng: random.Random, held: bool) -> Case:
    """A request that needs a tool where none is offered: sums are done by head, the rest is declined in plain words."""
    pick = rng.random()
    system = rng.choice(UNNAMED_HELD if held else UNNAMED) if rng.random() < 0.35 else ""
    must = f"tool|{DECLINED}|工具"
    if pick < 0.25:
        case = decline(rng, held, rng.choice(["en", "en", "zh"]), rng.choice(["weather", "act", "news"]))
        messages = case.messages
    elif pick < 0.37:
        node = expression(rng)
        user = wording("calc", rng, held, {"e": shown(node)})
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": worked(node) + "."}]
        must = re.escape(str(value(node)))
    elif pick < 0.43:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        user = wording("calc", rng, held, {"e": f"{a * b} / {b}"})
        messages = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer_of(a * b, "/", b, False)[0]},
        ]
        must = str(a)
    else:
        tool, text, _ = request(
            rng, held, [], rng.choice(["weather", "fixed", "fixed", "fixed", "invented", "invented"])
        )
        if tool["name"] in SPEECH:
            return unoffered(rng, held)
        if rng.random() < 0.2:
            text = rng.choice(SYNTAX_HELD if held else SYNTAX).replace("{t}", tool["name"]) + text
        answer = NO_TOOLS_ZH if is_chinese(text) else NO_TOOLS
        if tool["name"] in WEATHER_NAMES:
            # The answer is the usual one to such a question.
            answer = decline(rng, False, "zh" if is_chinese(text) else "en", "weather", 0).messages[-1]["content"]
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    return Case(suite="tool_unoffered", messages=messages, must=must, check="no_call")


def no_call(rng: random.Random, held: bool, jokes: list[dict]) -> Case:
    """Tools are there but none fits: answer plainly or say that no tool fits; half of these come again with theirs."""
    if not held and (twin := kept(rng, "no_call")):
        return twin
    tools = others(rng, rng.randint(1, 4), set())
    names = {t["name"] for t in tools}
    pick = rng.random()
    must = ""
    if pick < (0.3 if held else 0.17):
        kind = rng.choice(["capital", "opposite", "sound", "colour", "capital"])
        messages = fact(rng, held, kind, "", chat=True).messages
    elif pick < (0.45 if held else 0.28):
        messages = small_talk(rng, held).messages
    elif pick < (0.5 if held else 0.32):
        messages = [
            {"role": "user", "content": wording("joke", rng, held, {})},
            {"role": "assistant", "content": joke_text(rng, jokes)},
        ]
    elif pick < (0.6 if held else 0.42):
        messages = _without_tools(rng, held, names)
    else:
        wanted = request(rng, held, [], rng.choice(["weather", "calc", "fixed", "fixed", "invented"]))
        tool, text, _ = wanted
        near = "weather" in tool["name"] and any("weather" in n for n in names)
        if tool["name"] == "calculator" or tool["name"] in names or near:
            return no_call(rng, held, jokes)
        if tool["name"] not in {t["name"] for t in NAMED} and not held and rng.random() < 0.5:
            verb, noun = word(rng, "verb", False), word(rng, "noun", False)
            tool, text, _ = wanted = invented_request(rng, False, verb, noun)
            tools = unique([*near_misses(rng, verb, noun, False, rng.randint(1, 2)), *tools[:2]])
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": _missing(rng, text)}]
        must = "no tool|工具"
        if not held and rng.random() < 0.5:
            keep(rng, "no_call", _with_its_tool(rng, wanted, tools))
    return Case(suite="tool_none", messages=messages, must=must, tools=offered(rng, held, tools), check="no_call")


def _with_its_tool(rng: random.Random, wanted: Request, beside: list[Tool]) -> Case:
    """The same request with the same tools and the one that fits."""
    tool, text, arguments = wanted
    tools = unique([tool, *beside])
    rng.shuffle(tools)
    calls = [{"name": tool["name"], "arguments": arguments}]
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": call_text(calls)}]
    return Case(suite="tool_any", messages=messages, tools=offered(rng, False, tools), check="tool", expect=calls)


def _without_tools(rng: random.Random, held: bool, names: set[str]) -> list[dict]:
    """A question that no tool is needed for: a memory, a record, a Chinese fact, a sum without a calculator."""
    pick = rng.random()
    if pick < 0.3:
        return memory(rng, held, turns=rng.randint(1, 3)).messages
    if pick < 0.5:
        return json_record(rng, held).messages
    if pick < 0.65 or "calculator" in names:
        return _capital_zh(rng, held)
    if pick < 0.85:
        return arithmetic(rng, held, rng.choice([0, 1, 2]), chat=True).messages
    node = expression(rng)
    user = wording("expr", rng, held, {"e": shown(node)})
    return [{"role": "user", "content": user}, {"role": "assistant", "content": worked(node) + "."}]


def _capital_zh(rng: random.Random, held: bool) -> list[dict]:
    """The messages of a Chinese capital asked for in a chat."""
    while True:
        case = fact_zh(rng, held, "capital_zh")
        if case.messages:
            return case.messages
