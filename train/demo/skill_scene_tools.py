"""Calls for happenings. Owns: tools made of scenes and free orders for them. Knows no tokens.

An order may share no word with its tool: the description tells what it does, each argument's name what it is. The
types are those of real tools: numbers, true or false, one of some codes, lists, and options that nobody must give.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from held_out import is_happening, is_order
from phrasing import framed, is_chinese, occasion
from render import Case, call_text
from scene_parts import composed_order, composed_tool
from scene_parts_zh import composed_order_zh
from scenes import Field, Scene, Told, Value, keyed, scenes, tell
from skill_refusals import NO_TOOL, NO_TOOL_ZH
from skill_tools import Tool, offered, others, result_of, unique
from twins import keep, kept
from usual_parts import usual_order
from vocabulary import invented, is_held, joined, word

MADE_NAMES = frozenset(("made", "zh_made", "usual"))
"""Scenes that are put together."""
FREE_TEXT = re.compile(r"\[text\]\W*$|\[what\]$|\[topic\]$|\[label\]$|\[about\]$")
"""Where a free text ends an order, nothing may follow it."""


def _property(rng: random.Random, field: Field, value: Value | None) -> dict:
    """The schema of one argument."""
    if field.kind == "enum":
        return {"type": "string", "enum": [code for code, _ in field.options]}
    if field.kind == "flag":
        return {"type": "boolean"}
    if field.kind.startswith("list:"):
        return {"type": "array", "items": {"type": "string"}}
    if field.kind in ("money", "kg", "deg") or isinstance(value, float):
        return {"type": "number"}
    if field.kind in ("int", "num", "year"):
        return {"type": rng.choice(["integer", "integer", "integer", "number"])}
    return {"type": "string"}


def _named(rng: random.Random, names: list[str], held: bool) -> list[str]:
    """The words of a tool's name; training leaves out those of the held-out vocabulary."""
    words = rng.choice(names).split(" ")
    return words if held else [w for w in words if not is_held(w)] or [word(rng, "any", False)]


def _tool(rng: random.Random, told: Told, keys: dict[str, str], held: bool, strange: bool = False) -> Tool:
    """The schema for an order: an argument for each field it tells, and others that are optional."""
    scene = told.scene
    properties = {key: _property(rng, scene.fields[field], told.values.get(field)) for field, key in keys.items()}
    for field, key in keys.items():
        named = rng.choice(scene.fields[field].names)
        if key not in scene.fields[field].names and re.sub("[_-]", " ", key).lower() not in scene.fields[field].names:
            # A name that says nothing is explained.
            properties[key]["description"] = rng.choice([named, f"The {named}.", named.capitalize()])
        elif rng.random() < 0.15:
            properties[key]["description"] = rng.choice([named, f"The {named}."])
    required = list(properties)
    rest = [field for field in scene.fields if field not in keys]
    if rest and rng.random() < 0.3:
        for field, key in keyed(rng, told, rng.sample(rest, 1), True).items():
            if key not in properties:
                properties[key] = _property(rng, scene.fields[field], None)
    names, does = scene.tool
    words = _named(rng, names, held)
    if strange:
        words = [word(rng, "any", False) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.1:
        words = [word(rng, "any", False), *words]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": joined(rng, words), "description": rng.choice(does), "parameters": parameters}


def _decoy(rng: random.Random, scene: Scene, held: bool) -> Tool:
    """The tool of another scene with some of its arguments."""
    told = Told(scene, "", {})
    fields = rng.sample(list(scene.fields), min(len(scene.fields), rng.randint(1, 3))) if scene.fields else []
    return _tool(rng, told, keyed(rng, told, fields, True), held, rng.random() < 0.15)


def _made_decoys(rng: random.Random, near: list[Scene]) -> list[Tool]:
    """Tools beside one that is put together: those that are near it, and others of the same making."""
    others = rng.choice([0, 0, 1, 2, 3])
    picked = [rng.choice(scenes(False, True)) if rng.random() < 0.3 else composed_tool(rng) for _ in range(others)]
    return [_decoy(rng, s, False) for s in (*near, *picked)]


def _decoys(rng: random.Random, scene: Scene, held: bool) -> list[Tool]:
    """Tools that do something else; the one that is nearest comes often."""
    pool = [s for s in scenes(held, True) if s.name != scene.name]
    near = [s for s in pool if s.name == scene.near or s.near == scene.name]
    picked = rng.sample(pool, min(len(pool), rng.choice([0, 0, 1, 1, 2, 3, 4])))
    if near and rng.random() < 0.7:
        picked = [*near[:1], *(s for s in picked if s.name not in {n.name for n in near})]
    elif not scene.fields:
        picked = [s for s in picked if s.fields]
    return [_decoy(rng, s, held) for s in picked]


def _text(rng: random.Random, template: str, text: str) -> str:
    """The order as somebody says it."""
    if is_chinese(template):
        text += "？" if template.endswith(("吗", "呢")) else rng.choice(["。", "。", "", "！", "，谢谢。"])
        return framed(rng, text, ending=False) if rng.random() < 0.15 else text
    text = text[0].upper() + text[1:] if template[0] not in "[<" and rng.random() < 0.85 else text
    closed = FREE_TEXT.search(template)
    last = re.split(r"(?<=[.!?]) ", text)[-1]
    asking = re.match("(?i)(is|are|what|how|who|where|which|can|could|would|do|does|has|will|am|should|any)\\b", last)
    if not closed and text[-1] not in ".!?":
        text += rng.choice(["?", "?", "?", ""]) if asking else rng.choice([".", ".", "", "!", ", please.", ". Thanks."])
    pick = rng.random()
    if pick < 0.12:
        return framed(rng, text, ending=False)
    if pick < 0.2:
        return f"{occasion(rng)} {text}"
    return f"{text} {occasion(rng)}" if pick < 0.24 and not closed and text[-1] in ".!?" else text


MADE = 0.72
"""Share of the training orders that are put together."""
USUAL = 0.45
"""Share of them for usual tools."""
ZH = 0.15
"""Share of the others in Chinese."""
MISSING = 0.087
"""Share of the made orders that are drawn without their tool; each comes again with it, so that they are 8 %."""


@dataclass
class _Order:
    """An order with the tool for it and the tools beside it."""

    text: str
    tool: Tool
    beside: list[Tool]
    arguments: dict


def _beside(rng: random.Random, scene: Scene, near: list[Scene], held: bool) -> list[Tool]:
    """Tools that do something else: those near the one that is wanted, and any others."""
    if scene.name == "usual":
        picked = [composed_tool(rng) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        return [_decoy(rng, other, held) for other in (*near, *picked)]
    return _made_decoys(rng, near) if scene.name in MADE_NAMES else _decoys(rng, scene, held)


def _drawn(rng: random.Random, held: bool) -> tuple[Scene, list[Scene], frozenset[str]]:
    """A scene to order from, scenes near it, and the names of tools that would do the same."""
    if held or rng.random() >= MADE:
        scene = rng.choice(scenes(held, True))
        if not scene.fields and rng.random() < 0.4:
            scene = rng.choice([s for s in scenes(held, True) if s.fields])
        return scene, [], frozenset()
    if rng.random() < USUAL:
        return usual_order(rng, rng.random() < 0.2)
    return (*(composed_order_zh(rng) if rng.random() < ZH else composed_order(rng)), frozenset())


def _ordered(rng: random.Random, held: bool) -> tuple[_Order, bool]:
    """An order of any kind, and whether it is put together."""
    scene, near, same = _drawn(rng, held)
    made = scene.name in MADE_NAMES
    template = rng.choice(scene.asks)
    told = tell(rng, scene, template, coded=True)
    if made and (is_happening(told.text) or is_order(told.text)):
        return _ordered(rng, held)
    keys = keyed(rng, told, list(told.values), True)
    strange = not held and rng.random() < 0.12
    if strange and keys:
        field = rng.choice(list(keys))
        keys[field] = invented(rng)
    tool = _tool(rng, told, keys, held, strange)
    text = told.text if held else _text(rng, template, told.text)
    beside = _beside(rng, scene, near, held)
    if not held and rng.random() < 0.2:
        beside += others(rng, 1, {tool["name"], *same}, tool["description"])
    arguments = {keys[field]: value for field, value in told.values.items() if field in keys}
    return _Order(text, tool, [t for t in beside if t["name"] != tool["name"]], arguments), made


def _refused(rng: random.Random, order: _Order) -> Case:
    """The order without its tool."""
    beside = order.beside or [_decoy(rng, composed_tool(rng), False)]
    said = NO_TOOL_ZH if is_chinese(order.text) else NO_TOOL
    messages = [{"role": "user", "content": order.text}, {"role": "assistant", "content": said}]
    shown = offered(rng, False, unique(beside))
    return Case(suite="tool_none", messages=messages, tools=shown, must="no tool|工具", check="no_call")


def _called(rng: random.Random, order: _Order, held: bool) -> Case:
    """The order with its tool, and the call."""
    tools = unique([order.tool, *order.beside])
    rng.shuffle(tools)
    calls = [{"name": order.tool["name"], "arguments": order.arguments}]
    messages = [{"role": "user", "content": order.text}, {"role": "assistant", "content": call_text(calls)}]
    if not held and rng.random() < 0.25:
        result, sentence = result_of(rng, order.tool, order.arguments)
        messages += [{"role": "tool", "content": result}, {"role": "assistant", "content": sentence}]
    return Case(suite="tool_own", messages=messages, tools=offered(rng, held, tools), check="tool", expect=calls)


def scene_tool(rng: random.Random, held: bool = False) -> Case:
    """An order and its call. Now and then its tool is missing, and the same order comes with it as the next case."""
    if not held and (twin := kept(rng, "scene_tool")):
        return twin
    order, made = _ordered(rng, held)
    if held or rng.random() >= (MISSING if made else 0.05):
        return _called(rng, order, held)
    keep(rng, "scene_tool", _called(rng, order, False))
    return _refused(rng, order)
