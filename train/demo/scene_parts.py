"""Happenings put together. Owns: scenes of any verb, thing and roles, orders with tools of other words. Knows no task.

A scene of the list is learned by heart, with its names. Here the verb, the things and which parts are told are drawn,
and a part's name is made from its role in the sentence: `sold by`, `sold to`, `lamp count`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from authored_data import load, rows
from held_out import is_happening
from scenes import Field, Scene
from topics import plural
from verbs import VERBS, Verb
from vocabulary import is_held, word


@dataclass(frozen=True)
class Role:
    """A part of a sentence: its kind, how it stands there (at `[x]`), and its names (`{d}` is what was done)."""

    kind: str
    stands: tuple[str, ...]
    names: str


@dataclass(frozen=True)
class Action:
    """Verbs that mean the same: an order has one of them, the name of its tool another."""

    verbs: tuple[str, ...]


@lru_cache(maxsize=1)
def _table() -> dict[str, list[str]]:
    """The lists of texts: how orders and descriptions are put, adjectives, codes, names of who does it."""
    return {row["part"]: row["texts"] for row in rows("scene_parts.jsonl") if "texts" in row}


@lru_cache(maxsize=1)
def _roles() -> dict[str, list[Role]]:
    """What can stand behind a verb and its object, by group; of each group one is told at most."""
    out: dict[str, list[Role]] = {}
    for row in rows("scene_parts.jsonl"):
        if row["part"] == "role":
            out.setdefault(row["group"], []).append(Role(row["kind"], tuple(row["stands"]), row["names"]))
    return out


@lru_cache(maxsize=1)
def _actions() -> list[Action]:
    return [Action(tuple(row["verbs"])) for row in rows("scene_parts.jsonl") if row["part"] == "same"]


@lru_cache(maxsize=20_000)
def _is_usable(name: str) -> bool:
    return not any(map(is_held, name.split(" ")))


def usable(names: list[str]) -> tuple[str, ...]:
    """The names of a part without words kept for the evaluation."""
    return tuple(filter(_is_usable, names)) or ("value",)


def field_of(kind: str, names: list[str]) -> Field:
    """A field of a kind, `int:LOW-HIGH` and `list:KIND` too."""
    kind, _, rest = kind.partition(":")
    if kind == "int":
        low, _, high = rest.partition("-")
        return Field(kind, usable(names), (), int(low), int(high))
    return Field(f"list:{rest}" if kind == "list" else kind, usable(names))


def _options(rng: random.Random) -> tuple[tuple[str, str], ...]:
    """The values of an enumeration: codes for words, or any words."""
    if rng.random() < 0.4:
        return tuple((c, s) for c, _, s in (pair.partition("=") for pair in rng.choice(_table()["sizes"]).split(",")))
    made = list(dict.fromkeys(word(rng, "any", False) for _ in range(rng.randint(2, 5))))
    return tuple((w.upper() if rng.random() < 0.15 else w, w) for w in made)


def _thing(rng: random.Random) -> str:
    return word(rng, "noun", False)


@dataclass
class Draft:
    """The parts of a scene while it is put together."""

    fields: dict[str, Field]
    marks: dict[str, str]
    object: str
    noun: str


def _parts(rng: random.Random, done: str, people: bool = True) -> Draft:
    """An object and one to three parts behind it, with a field for each."""
    noun = _thing(rng)
    fields: dict[str, Field] = {}
    marks: dict[str, str] = {}
    pick = rng.random()
    look = ""
    if rng.random() < 0.25:
        # Beside a thing that is no value: where a value ends must be seen, not learned.
        look = "[look] "
        if rng.random() < 0.5:
            fields["look"] = field_of("colour", ["colour", "color", "shade", "paint"])
        else:
            names = usable(["kind", "type", "sort", "class", "category", "state"])
            fields["look"] = Field("enum", names, _options(rng))
    if pick < 0.35:
        kind = rng.choice(["broken", "thing", "food", "drink", "animal", "copied", "copied_two", "title"])
        fields["what"] = field_of(
            kind, ["item", "thing", "object", "product", "what", "article", f"{done} item", "piece"]
        )
        shown = rng.choice(["the [what]", "a [what]", "[what]", f"the [what] {noun}"])
        shown = shown if not look else f"the {look}[what]"
    elif pick < 0.6:
        fields["n"] = field_of(
            "int:2-60", ["count", "quantity", f"{noun} count", f"{noun}s", "how many", "number", "pieces"]
        )
        shown = f"[n] {look}{plural(noun)}"
    else:
        shown = f"{rng.choice(['the', 'a', 'our', 'this'])} {look}{noun}"
    order = rng.sample([k for k in _roles() if people or k != "whom"], rng.choice([1, 1, 2, 2, 3]))
    if not fields and len(order) == 1:
        order.append(rng.choice([k for k in _roles() if k != order[0] and (people or k != "whom")]))
    for kind in order:
        role = rng.choice(_roles()[kind])
        fields[kind] = field_of(role.kind, role.names.replace("{d}", done).split("|"))
        marks[kind] = rng.choice(role.stands).replace("[x]", f"[{kind}]")
    return Draft(fields, marks, shown, noun)


def _flagged(rng: random.Random, draft: Draft) -> str:
    """A clause that says whether something holds."""
    said = rng.choice(_table()["flags"]) if rng.random() < 0.6 else rng.choice(load().words["objadj"])
    draft.fields["flag"] = Field("flag", usable([said, f"is {said}", f"{said} or not", f"was {said}"]))
    forms = [f"<flag:it is {said}|it is not {said}>", f"the {draft.noun} <flag:is|is not> {said}"]
    return rng.choice([*forms, f"<flag:{said}|not {said}>"])


def _story(rng: random.Random, verb: Verb, draft: Draft) -> str:
    """A sentence over the parts: in any order, with the one who did it as subject."""
    draft.fields["who"] = field_of(
        "person" if rng.random() < 0.85 else "org", [name.replace("{d}", verb.past) for name in _table()["who"]]
    )
    job = rng.choice(load().words["job"])
    leads = [
        "[who]",
        "[who]",
        "[who]",
        f"the {job} [who]",
        f"[who], a {job},",
        "our neighbour [who]",
        "a certain [who]",
    ]
    marks = list(draft.marks.values())
    rng.shuffle(marks)
    kept = marks[: rng.randint(1, len(marks))] if rng.random() < 0.3 else marks
    front = kept.pop() if len(kept) > 1 and rng.random() < 0.25 and not kept[-1].startswith("(") else ""
    core = f"{rng.choice(leads)} {verb.past} {draft.object} {' '.join(kept)}".strip()
    text = f"{front}, {core}" if front else core
    if rng.random() < 0.2:
        text += f"{rng.choice([', and', ';', ', but', ' and'])} {_flagged(rng, draft)}"
    return text[0].upper() + text[1:] + "." if text[0] != "[" else text + "."


def _as_tool(rng: random.Random, action: Action, noun: str, said: str) -> tuple[list[str], list[str]]:
    """Name and description of a tool; in the name the verb is often another one than in the order."""
    others = [v for v in action.verbs if v != said] or list(action.verbs)
    called = rng.choice(others if rng.random() < 0.65 else action.verbs)
    name = f"{noun} {called.split(' ')[0]}" if rng.random() < 0.2 else f"{called} {noun}"
    verb, form = rng.choice(others if rng.random() < 0.5 else action.verbs), rng.choice(_table()["does"])
    while "{V}s" in form and " " in verb:
        form = rng.choice(_table()["does"])
    text = form.replace("{V}", verb[0].upper() + verb[1:]).replace("{v}", verb)
    text = text.replace("{a}", "an" if noun[0] in "aeiou" else "a")
    return [name], [text.replace("{n}s", plural(noun)).replace("{n}", noun)]


def _order(rng: random.Random, verb: str, draft: Draft) -> str:
    """An order over the parts."""
    marks = list(draft.marks.values())
    rng.shuffle(marks)
    form = rng.choice(_table()["asks"])
    while not marks and ("{p}:" in form or "that {p}" in form):
        form = rng.choice(_table()["asks"])
    text = form.replace("{v}", verb).replace("{o}", draft.object).replace("{p}", " ".join(marks)).strip()
    return text[0].upper() + text[1:] if text[0] not in "[<" else text


def composed_scene(rng: random.Random) -> Scene:
    """A happening that is told."""
    verb = rng.choice(VERBS)
    draft = _parts(rng, verb.past)
    said = _story(rng, verb, draft)
    return composed_scene(rng) if is_happening(said) else Scene("made", draft.fields, [said], [], ([], []))


def composed_tool(rng: random.Random, action: Action | None = None, noun: str = "") -> Scene:
    """A tool without an order: of an action on a thing, or of any."""
    action = action or rng.choice(_actions())
    draft = _parts(rng, action.verbs[0])
    return Scene("near", draft.fields, [], [], _as_tool(rng, action, noun or draft.noun, ""))


def composed_order(rng: random.Random) -> tuple[Scene, list[Scene]]:
    """An order with its tool, and tools that are near: the same verb with another thing, or another verb."""
    action, other = rng.sample(_actions(), 2)
    verb, draft = rng.choice(action.verbs), _parts(rng, action.verbs[0])
    ask = _order(rng, verb, draft)
    if is_happening(ask):
        return composed_order(rng)
    noun = draft.noun if draft.noun in draft.object else rng.choice(["item", "thing", "article", "object"])
    scene = Scene("made", draft.fields, [], [ask], _as_tool(rng, action, noun, verb))
    near = []
    if rng.random() < 0.6:
        near.append(composed_tool(rng, action, _thing(rng)))
    if rng.random() < 0.6:
        near.append(composed_tool(rng, other, noun))
    return scene, near
