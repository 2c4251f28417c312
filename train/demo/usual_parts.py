"""Usual tools in composed words. Owns: orders for what assistants are asked for most, and their tools. Knows no task.

A taxi, a lamp, an alarm, a list: each act is a template of choices, an argument stands in it or is added as a phrase or
a sentence of its own, and the names of tool and arguments are drawn. Nothing that the evaluation asks is made.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import lru_cache

from authored_data import rows
from grammar import expand, parse
from held_out import is_order
from scene_parts import field_of, usable
from scenes import Field, Scene
from vocabulary import is_held, word

SLOT = re.compile(r"\[(\w+)\]|<(\w+):")
FREE_END = re.compile(r"\[text\]\W*$")
ASKED = re.compile(r"(?i)(could|can|would|will|is|are|do|does|has|how|what|when|where|which|am|any)\b")
FRAMES = ["{A}"] * 9 + ["Please {a}", "Could you {a}", "Can you {a}", "Would you {a}", "Will you {a}", "please {a}"]
FRAMES += ["I want you to {a}", "I'd like you to {a}", "I need you to {a}", "Be so kind as to {a}", "Go and {a}"]
FRAMES += ["Do me a favour and {a}", "It would help if you could {a}", "If you can, {a}", "Before I forget: {a}"]
FRAMES += ["Next, {a}", "Now {a}", "Quick, {a}", "Hey, {a}", "One thing: {a}", "Is it possible to {a}", "Try to {a}"]
FRAMES += ["My wife says: {a}", "When you have a minute, {a}", "Somebody has to {a}", "You have to {a}", "So, {a}"]
FRAMES_ZH = ["{a}"] * 4 + [
    "请{a}",
    "帮我{a}",
    "麻烦你{a}",
    "能不能{a}",
    "可以{a}吗",
    "你好，{a}",
    "快{a}",
    "现在{a}",
    "{a}吧",
]


@dataclass(frozen=True)
class Usual:
    """A usual tool: how it is called and described, how it is asked for, and what it must not be offered beside."""

    key: str
    group: str
    names: tuple[str, ...]
    does: tuple[str, ...]
    acts: tuple[str, ...]
    says: tuple[str, ...]
    why: tuple[str, ...]
    fields: dict[str, Field]
    stands: dict[str, tuple[str, ...]]
    near: tuple[str, ...]
    avoid: frozenset[str]


def _field(text: str, names: list[str]) -> Field:
    kind, _, rest = text.partition(":")
    if kind != "enum":
        return field_of(text, names)
    pairs = (pair.partition("=") for pair in rest.split(","))
    return Field(kind, usable(names), tuple((value, said) for value, _, said in pairs))


def _usual(row: dict) -> Usual:
    names = tuple(n for n in row["names"].split("|") if not any(map(is_held, n.split(" "))))
    fields = {key: _field(arg["kind"], arg["names"].split("|")) for key, arg in row["args"].items()}
    stands = {key: tuple(arg["stands"]) for key, arg in row["args"].items()}
    texts = (tuple(row[key]) for key in ("acts", "says", "why"))
    return Usual(
        row["tool"], row["group"], names, tuple(row["does"]), *texts, fields, stands, tuple(row["near"]),
        frozenset(row["avoid"]),
    )  # fmt: skip


@lru_cache(maxsize=1)
def usual_tools() -> dict[bool, dict[str, Usual]]:
    """The usual tools by language: those that are asked for in Chinese, and the others."""
    made = [(row["lang"] == "zh", _usual(row)) for row in rows("usual_tools.jsonl")]
    return {zh: {tool.key: tool for lang, tool in made if lang == zh} for zh in (False, True)}


def _filled(rng: random.Random, text: str) -> str:
    """A template without its choices; slots stay."""
    return re.sub(r"\s+", " ", expand(parse(text), rng, lambda name: f"[{name}]")).strip()


def _upper(text: str) -> str:
    return text if text[0] in "[<" else text[0].upper() + text[1:]


def _framed(rng: random.Random, act: str, chinese: bool) -> str:
    if chinese:
        return rng.choice(FRAMES_ZH if not act.endswith("[text]") else FRAMES_ZH[:8]).replace("{a}", act)
    return rng.choice(FRAMES).replace("{A}", act if rng.random() < 0.2 else _upper(act)).replace("{a}", act)


def _order(rng: random.Random, tool: Usual, chinese: bool) -> str:
    """An order as a template over the tool's arguments: an act in a frame, or a sentence that says what is needed."""
    act = rng.random() > 0.33
    core = _filled(rng, rng.choice(tool.acts if act else tool.says))
    told = {a or b for a, b in SLOT.findall(core)}
    more = [key for key in tool.fields if key not in told and tool.stands[key] and rng.random() < 0.45]
    picked = [rng.choice(tool.stands[key]).replace("[x]", f"[{key}]") for key in more]
    rng.shuffle(picked)
    closed = bool(FREE_END.search(core))
    inside = [text for text in picked if not text.startswith("S ") and not closed]
    apart = [_upper(text[2:]) + "." for text in picked if text.startswith("S ")]
    if chinese:
        core = "".join([*(t for t in inside if t[0] != "，"), core, *(t for t in inside if t[0] == "，")])
        return _framed(rng, core, True) if act else core
    front = inside.pop() if inside and rng.random() < 0.15 else ""
    core = " ".join([core, *inside])
    whole = _framed(rng, core, False) if act else _upper(core)
    whole = f"{_upper(front)}, {whole}" if front else whole
    if tool.why and rng.random() < 0.2:
        apart.append(rng.choice(tool.why))
    if not apart:
        return whole
    mark = "?" if ASKED.match(whole) else "."
    return " ".join([*apart, whole]) if closed or rng.random() < 0.35 else " ".join([whole + mark, *apart])


def as_scene(rng: random.Random, tool: Usual, order: str = "") -> Scene:
    """A usual tool as a scene: with its order, or without one as a tool beside another."""
    names = [rng.choice(tool.names)]
    if rng.random() < 0.12:
        names = [f"{word(rng, 'any', False)} {names[0]}"]
    return Scene("usual", tool.fields, [], [order] if order else [], (names, [rng.choice(tool.does)]))


def usual_of(rng: random.Random, key: str) -> Scene:
    """An English order for a given usual tool."""
    tool = usual_tools()[False][key]
    order = _order(rng, tool, False)
    return usual_of(rng, key) if is_order(order) else as_scene(rng, tool, order)


def usual_order(rng: random.Random, chinese: bool) -> tuple[Scene, list[Scene], frozenset[str]]:
    """An order for a usual tool, other usual tools beside it, and the fixed tools that would do the same."""
    table = usual_tools()[chinese]
    tool = rng.choice(list(table.values()))
    order = _order(rng, tool, chinese)
    while is_order(order):
        order = _order(rng, tool, chinese)
    beside = [table[key] for key in tool.near if rng.random() < 0.5]
    beside += [other for other in rng.sample(list(table.values()), rng.choice([0, 0, 1, 2, 3])) if other not in beside]
    near = [as_scene(rng, other) for other in beside if other.group != tool.group or other.key in tool.near]
    return as_scene(rng, tool, order), near, tool.avoid
