"""Plots put together. Owns: a wish, what stands in its way, a helper, a turn and an end, as beats. Knows no request.

A written plot is a chain of sentences that a model learns by heart: told greedily, the likeliest chain swallows the
others, whatever the topic. Here each beat is drawn from its own pool, and nearly every sentence names the hero, the
thing, the place or the deed, which only the topic tells.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import lru_cache

from authored_data import rows
from topics import IDEAS, LIVING, THINGS, noun
from verbs import VERBS

ORDER = [
    ("day", 0.4),
    ("wish", 1.0),
    ("why", 0.4),
    ("block", 1.0),
    ("try", 0.8),
    ("fail", 0.45),
    ("helper", 0.85),
    ("talk", 0.45),
    ("plan", 0.5),
    ("turn", 1.0),
    ("gain", 1.0),
    ("thanks", 0.4),
    ("end", 0.8),
]
"""The beats in their order, and how often each is told."""


@lru_cache(maxsize=1)
def _parts() -> dict[str, list[str]]:
    return {row["part"]: row["texts"] for row in rows("story_parts.jsonl") if "texts" in row}


@lru_cache(maxsize=1)
def _blocks() -> list[dict]:
    return [row for row in rows("story_parts.jsonl") if row["part"] == "block" and "names" in row]


@lru_cache(maxsize=1)
def _own_blocks() -> list[dict]:
    """What stands in the way and is of the topic itself: of its thing, its place, its hero."""
    return [row for row in rows("story_parts.jsonl") if row["part"] == "own_block"]


@lru_cache(maxsize=1)
def _deed_verbs() -> list[tuple[str, str, str]]:
    """The verbs of the table that somebody can wish to do, with their past and their form with -ing."""
    wanted = next(row["verbs"] for row in rows("story_parts.jsonl") if row["part"] == "deeds")
    forms = {verb.base: (verb.base, verb.past, verb.doing) for verb in VERBS}
    return [forms[base] for base in wanted if base in forms]


GOING = [("get to", "got to", "getting to"), ("live at", "lived at", "living at"), ("see", "saw", "seeing")]
GOING += [("go all the way to", "went all the way to", "going all the way to"), ("visit", "visited", "visiting")]
GOING += [("run once round", "ran once round", "running once round"), ("sing at", "sang at", "singing at")]
GOING += [("spend a night at", "spent a night at", "spending a night at"), ("reach", "reached", "reaching")]
GOING += [("find the way to", "found the way to", "finding the way to"), ("fly over", "flew over", "flying over")]
TOWARDS = [("show [o] to", "showed [o] to", "showing [o] to"), ("thank", "thanked", "thanking")]
TOWARDS += [("bring [o] to", "brought [o] to", "bringing [o] to"), ("dance with", "danced with", "dancing with")]
TOWARDS += [
    ("be friends with", "was friends with", "being friends with"),
    ("share [o] with", "shared [o] with", "sharing [o] with"),
]
TOWARDS += [
    ("make a present for", "made a present for", "making a present for"),
    ("play with", "played with", "playing with"),
]


HOME = [("save", "saved", "saving"), ("leave", "left", "leaving"), ("decorate", "decorated", "decorating")]
HOME += [("know every corner of", "knew every corner of", "knowing every corner of")]
HOME += [("paint all of", "painted all of", "painting all of"), ("sing for", "sang for", "singing for")]
HOME += [("draw a map of", "drew a map of", "drawing a map of"), ("wake up", "woke up", "waking up")]
OF_KIND = [("meet another [k]", "met another [k]", "meeting another [k]")]
OF_KIND += [("be the best [k] of [p]", "was the best [k] of [p]", "being the best [k] of [p]")]
OF_KIND += [("be a [k] like no other", "was a [k] like no other", "being a [k] like no other")]
OF_KIND += [("give a feast for every [k]", "gave a feast for every [k]", "giving a feast for every [k]")]
OF_KIND += [("show [p] what a [k] can do", "showed [p] what a [k] can do", "showing [p] what a [k] can do")]
OF_KIND += [("write a book about a [k]", "wrote a book about a [k]", "writing a book about a [k]")]
OF_KIND += [("teach [n] to be a [k]", "taught [n] to be a [k]", "teaching [n] to be a [k]")]


def _wished(rng: random.Random, given: frozenset[str]) -> str:
    """What a wish is about: something that the topic names, or anything where there is no topic.

    A wish that goes with any topic is the likeliest one for each: told greedily, every hero learns to skate.
    """
    if "act" in given:
        return "act"
    kinds = [kind for key, kind in WISHES.items() if key in given]
    return rng.choice(kinds) if kinds else rng.choices(["thing", "far", "friend", "kind", "act"], [8, 4, 2, 3, 1])[0]


WISHES = {"thing": "thing", "far": "far", "place": "home", "fk": "friend", "kind": "kind"}
"""A part of a topic, and the wish that is about it."""


def _deed(rng: random.Random, who: dict[str, str], given: frozenset[str]) -> tuple[str, str, str]:
    """What the hero wants to do, with a word of the topic where it has one: base, past, and the form with -ing."""
    wish = _wished(rng, given)
    if wish == "thing":
        thing = who["obj.the"] if rng.random() < 0.75 else f"the {who['obj']}"
        base, past, doing = rng.choice(_deed_verbs())
        return f"{base} {thing}", f"{past} {thing}", f"{doing} {thing}"
    if wish == "act":
        act = who.get("act") or rng.choice(next(row for row in rows_of_topics() if row["role"] == "act")["train"])
        return f"learn to {act}", f"learned to {act}", f"learning to {act}"
    if wish == "kind":
        slots = {"[k]": who["kind"], "[p]": who["place"], "[n]": who["F"]}
        base, past, doing = (re.sub(r"\[\w\]", lambda m: slots[m[0]], form) for form in rng.choice(OF_KIND))
        return base, past, doing
    if wish == "friend":
        forms, end = rng.choice(TOWARDS), who["F"] if "fk" not in given or rng.random() < 0.5 else f"the {who['fk']}"
    else:
        forms, end = (rng.choice(GOING), who["place2"]) if wish == "far" else (rng.choice(HOME), who["place"])
    base, past, doing = (form.replace("[o]", who["obj.the"]) for form in forms)
    return f"{base} {end}", f"{past} {end}", f"{doing} {end}"


@lru_cache(maxsize=1)
def rows_of_topics() -> list[dict]:
    """The rows of the authored topics."""
    return rows("topics.jsonl")


DONE = {"saw": "seen", "drew": "drawn", "hid": "hidden", "wore": "worn", "rode": "ridden", "stole": "stolen"}
DONE |= {"chose": "chosen", "gave": "given", "sang": "sung", "went": "gone", "ran": "run", "flew": "flown"}
DONE |= {"was": "been", "wrote": "written", "knew": "known", "woke": "woken", "broke": "broken", "took": "taken"}
DONE |= {"drove": "driven", "forgot": "forgotten", "showed": "shown"}
"""Past forms whose form behind `had` is another one."""


def dressed(
    rng: random.Random, who: dict[str, str], slot: Callable[[str], str], given: frozenset[str]
) -> dict[str, str]:
    """The cast with a far place, a tool, a wish and what stands in its way; the topic tells the parts of `given`."""
    out = {
        "tool": noun(rng, THINGS, False),
        "idea": noun(rng, IDEAS, False),
        "place2": who.get("far") or slot("place2"),
        **who,
    }
    out["tool.a"] = f"a {slot('objadj')} {out['tool']}" if rng.random() < 0.4 else f"a {out['tool']}"
    out["deed"], out["deed.ed"], out["deed.ing"] = _deed(rng, out, given)
    first, space, rest = out["deed.ed"].partition(" ")
    out["deed.done"] = DONE.get(first, first) + space + rest
    own = [row for row in _own_blocks() if row["needs"] in given]
    row = rng.choice(own if own and rng.random() < 0.75 else _blocks())
    fills = {"b": noun(rng, LIVING, False), "t": noun(rng, THINGS, False)}
    for key, pool in (("block", "names"), ("block.does", "does"), ("block.gone", "gone")):
        # Filled here: a slot's value is not looked through for slots again.
        text = rng.choice(row[pool])
        out[key] = re.sub(r"\[([\w.]+)\]", lambda m: fills.get(m[1]) or out.get(m[1]) or slot(m[1]), text)
    out["block.the"] = re.sub(r"^an? ", "the ", out["block"])
    return out


def beats(rng: random.Random, helped: bool = False) -> list[list[str]]:
    """The pools of a plot, in the order in which they are told; `helped` wants the helper in it."""
    return [_parts()[part] for part, share in ORDER if rng.random() < share or (helped and part == "helper")]
