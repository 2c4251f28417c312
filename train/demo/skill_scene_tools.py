"""Calls for happenings. Owns: tools made of scenes and free orders for them. Knows no tokens.

An order may share no word with its tool: the description tells what it does, each argument's name what it is. The
types are those of real tools: numbers, true or false, one of some codes, lists, and options that nobody must give.
"""

from __future__ import annotations

import random
import re

from held_out import is_happening
from phrasing import framed, is_chinese, occasion
from render import Case, call_text
from scene_parts import composed_order, composed_tool
from scene_parts_zh import composed_order_zh
from scenes import Field, Scene, Told, Value, keyed, scenes, tell
from skill_refusals import NO_TOOL
from skill_tools import Tool, offered, others, result_of, unique
from vocabulary import invented, is_held, joined, word

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
    asking = re.match("(?i)(is|are|what|how|who|where|which|can|do|has|will|am|should)\\b", text)
    if not closed:
        text += rng.choice(["?", "?", "?", ""]) if asking else rng.choice([".", ".", "", "!", ", please.", ". Thanks."])
    pick = rng.random()
    if pick < 0.12:
        return framed(rng, text, ending=False)
    if pick < 0.2:
        return f"{occasion(rng)} {text}"
    return f"{text} {occasion(rng)}" if pick < 0.24 and not closed and text[-1] in ".!?" else text


MADE = 0.65
"""Share of the training orders that are put together."""
ZH = 0.15
"""Share of them in Chinese."""


def scene_tool(rng: random.Random, held: bool = False) -> Case:
    """An order and its call; its tool is missing now and then, or two orders come at once."""
    near: list[Scene] = []
    if made := not held and rng.random() < MADE:
        scene, near = composed_order_zh(rng) if rng.random() < ZH else composed_order(rng)
    else:
        scene = rng.choice(scenes(held, True))
        if not scene.fields and rng.random() < 0.4:
            scene = rng.choice([s for s in scenes(held, True) if s.fields])
    template = rng.choice(scene.asks)
    told = tell(rng, scene, template, coded=True)
    if made and is_happening(told.text):
        return scene_tool(rng, held)
    keys = keyed(rng, told, list(told.values), True)
    strange = not held and rng.random() < 0.12
    if strange and keys:
        field = rng.choice(list(keys))
        keys[field] = invented(rng)
    tool = _tool(rng, told, keys, held, strange)
    text = told.text if held else _text(rng, template, told.text)
    # An order that is put together comes without its tool as well: the tools decide, not whether it is known.
    missing = not held and rng.random() < (0.16 if made else 0.07)
    tools = [*([] if missing else [tool]), *(_made_decoys(rng, near) if made else _decoys(rng, scene, held))]
    if missing and not tools:
        tools = [
            _decoy(rng, rng.choice([s for s in scenes(held, True) if s.name not in (scene.name, scene.near)]), held)
        ]
    if not held and rng.random() < 0.2:
        tools += others(rng, 1, {tool["name"]}, tool["description"])
    tools = unique(tools)
    rng.shuffle(tools)
    messages = [{"role": "user", "content": text}]
    if missing:
        if tool["name"] in {t["name"] for t in tools}:
            return scene_tool(rng, held)
        messages.append({"role": "assistant", "content": NO_TOOL})
        shown = offered(rng, held, tools)
        return Case(suite="tool_none", messages=messages, tools=shown, must="no tool", check="no_call")
    arguments = {keys[field]: value for field, value in told.values.items() if field in keys}
    calls = [{"name": tool["name"], "arguments": arguments}]
    messages.append({"role": "assistant", "content": call_text(calls)})
    if not held and rng.random() < 0.25:
        result, sentence = result_of(rng, tool, arguments)
        messages += [{"role": "tool", "content": result}, {"role": "assistant", "content": sentence}]
    return Case(suite="tool_own", messages=messages, tools=offered(rng, held, tools), check="tool", expect=calls)
