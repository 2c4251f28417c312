"""The story grammar. Owns: stories told from plots and pools, and their topics. Knows no chat."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import story_parts
from authored_data import load, synonyms
from grammar import expand, parse, tidy
from topics import Said, Topic
from vocabulary import invented

PLURAL = {
    "sheep": "sheep",
    "mouse": "mice",
    "goose": "geese",
    "wolf": "wolves",
    "deer": "deer",
    "fox": "foxes",
    "calf": "calves",
    "ostrich": "ostriches",
    "finch": "finches",
    **{a: a for a in ("bison", "moose", "elk", "herring", "salmon", "trout", "squid", "quail", "reindeer")},
}


PLACES = 8
"""Beats of the longest plot."""
LONGEST = 1150
"""Letters of a story in training, about 320 tokens; the evaluation lets a story have 400."""


@dataclass(frozen=True)
class Story:
    """One story with the topics it answers to and the words a reader would look for."""

    text: str
    topic: str
    must: tuple[str, ...]


def plural(noun: str) -> str:
    """The plural of an animal or thing."""
    if noun.endswith("y") and noun[-2] not in "aeo":
        return noun[:-1] + "ies"
    return PLURAL.get(noun, noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s"))


# After these words a verb is part of a phrase, and an adjective stands alone or is a noun.
PHRASE = (
    r"(?! (?:up|out|off|on|down|away|back|over|in|by|like|for|of|how|asleep|ill|[{]|and|or|but|as|to|at|that|when|than"
    r"|if|with|from|now|in|enough|hold|place|part|after|about|hands|leave)\b| ?[{|}\[])"
)


# A sentence that begins with the hero can follow a phrase of time or place.
LEADING = re.compile(r"\[(?:H|He|F)\] ")


@cache
def _synonyms() -> tuple[re.Pattern[str], dict[str, str]]:
    """One expression for every word with synonyms, and the choice that replaces it."""
    choice, parts = {}, []
    for row in sorted(synonyms(), key=lambda r: -len(r["word"])):
        word, same = row["word"], row["same"]
        guard = {
            "plain": r"\b",
            "verb": r"\b" + PHRASE,
            "speech": r"(?= \[[HF])",
            "adjective": PHRASE + r"(?= [a-z\[])",
        }[row["kind"]]
        for form in {word, word[0].upper() + word[1:]}:
            if form != word and row["kind"] in ("adjective", "speech"):
                continue
            choice[form] = "{" + "|".join(s if form == word else s[0].upper() + s[1:] for s in same) + "}"
            parts.append(r"\b" + re.escape(form) + guard)
    return re.compile(r"\[[^\]]*\]|" + "|".join(parts)), choice


@cache
def enriched(template: str) -> str:
    """A template whose words are choices between synonyms; slots stay."""
    expression, choice = _synonyms()
    return expression.sub(lambda m: choice.get(m.group(0), m.group(0)), template)


def somewhere(rng: random.Random) -> str:
    """A place: one of the list, or an adjective with a noun."""
    w = load().words
    return (
        rng.choice(w["place"])
        if rng.random() < 0.45
        else f"the {rng.choice(w['place.adj'])} {rng.choice(w['place.noun'])}"
    )


def dish(rng: random.Random) -> str:
    """A food: one of the list, or an ingredient with a kind of dish."""
    w = load().words
    return rng.choice(w["food"]) if rng.random() < 0.6 else f"{rng.choice(w['ingredient'])} {rng.choice(w['dish'])}"


def cast(rng: random.Random, kind: str = "", called: str = "") -> dict[str, str]:
    """The people and things of one story: slot name to text. The hero may be of a kind, and may have a name."""
    w = load().words
    kind, friend_kind = kind or rng.choice(w["kind"]), rng.choice(w["kind"])
    male = w["name.m"]
    name, friend = rng.sample(w["name"], 2)
    while kind in ("girl", "boy") and (kind == "boy") != (name in male):
        name = rng.choice(w["name"])
    thing, adjective = rng.choice(w["thing"]), rng.choice(w["objadj"])
    if rng.random() < 0.12:
        name = invented(rng).capitalize()
    name = called or name
    she, fshe = name not in male, friend not in male
    if rng.random() < 0.12:
        friend = f"{rng.choice(['old', 'little', 'tall', 'good'])} {friend}"
    obj = f"{adjective} {thing}"
    return {
        "N": name,
        "kind": kind,
        "trait": rng.choice(w["trait"]),
        "F": friend,
        "Fc": friend[0].upper() + friend[1:],
        "fk": friend_kind,
        "ft": rng.choice(w["trait"]),
        "thing": thing,
        "obj": obj,
        "obj.a": f"a {obj}",
        "obj.the": f"the {thing}" if rng.random() < 0.6 else f"the {obj}",
        "obj.cap": obj.title(),
        "he": "she" if she else "he",
        "his": "her" if she else "his",
        "him": "her" if she else "him",
        "himself": "herself" if she else "himself",
        "fhe": "she" if fshe else "he",
        "fhis": "her" if fshe else "his",
        "fhim": "her" if fshe else "him",
        "fhimself": "herself" if fshe else "himself",
        "fHe": "She" if fshe else "He",
        "place": somewhere(rng),
        "food": dish(rng),
        "instrument": rng.choice(w["instrument"]),
    }


def _slots(rng: random.Random, who: dict[str, str], first_person: bool) -> Callable[[str], str]:
    w = load().words

    def slot(key: str) -> str:
        if key == "H":
            if first_person:
                return "I"
            pick = rng.random()
            return (
                who["N"]
                if pick < 0.62
                else f"the {who['kind']}"
                if pick < 0.88
                else f"the {who['trait']} {who['kind']}"
            )
        if key == "O":
            return "me" if first_person else who["N"] if rng.random() < 0.6 else who["him"]
        if key == "P":
            return "my" if first_person else who["N"] + "'s" if rng.random() < 0.6 else who["his"]
        if first_person and key in ("he", "his", "him", "himself", "He", "His"):
            return {"he": "I", "his": "my", "him": "me", "himself": "myself", "He": "I", "His": "My"}[key]
        if key in ("He", "His"):
            return who[key.lower()].capitalize()
        if key == "food" and rng.random() < 0.6:
            return dish(rng)
        if key in who:
            return who[key]
        if key == "place2":
            return somewhere(rng)
        if key == "place.cap":
            return who["place"][0].upper() + who["place"][1:]
        if key.startswith("animal.pl"):
            text = plural(rng.choice(w["animal"]))
            return text.capitalize() if key.endswith("cap") else text
        if key == "obj.a2":
            return f"a {rng.choice(w['objadj'])} {rng.choice(w['thing'])}"
        if key == "instrument.bare":
            return who["instrument"]
        return rng.choice(w[key])

    return slot


def slots_of(rng: random.Random, who: dict[str, str]) -> Callable[[str], str]:
    """What fills the slots of a template for a cast, told of a third person."""
    return _slots(rng, who, False)


def topic_of(rng: random.Random, plot: dict, who: dict[str, str], own: float = 0.45) -> tuple[str, tuple[str, ...]]:
    """A topic phrase for a story of this cast and plot (the plot's own in a share `own`), and the words it needs."""
    kind, obj = who["kind"], who["obj"]
    pick = rng.random()
    if pick < own:
        template = rng.choice(plot["topics"])
        must = tuple(
            w
            for s, w in (("[kind]", kind), ("[obj.a]", obj), ("[thing]", who["thing"]), ("[F", who["F"]))
            if s in template
        )
        must += ("dream",) if "dream" in template else ()
        return tidy(expand(parse(template), rng, _slots(rng, who, False)))[:1].lower() + tidy(
            expand(parse(template), rng, lambda k: who.get(k) or _slots(rng, who, False)(k))
        )[1:], must
    options = [
        (f"a {who['trait']} {kind}", (kind,)),
        (f"a {kind}", (kind,)),
        (f"a {obj}", (obj,)),
        (f"a {kind} and a {obj}", (kind, obj)),
        (f"a {kind} named {who['N']}", (kind, who["N"])),
        (f"{who['N']} the {kind}", (kind, who["N"])),
        (f"a {who['trait']} {kind} and a {who['thing']}", (kind, who["thing"])),
        (f"a {obj} near {who['place']}", (obj,)),
        (f"a {kind} who finds a {obj}", (kind, obj)),
    ]
    topic, must = rng.choice(options)
    return topic, must


MISSING = [
    "{There|Nearby} {was|lay} a [w] {too|as well}, {and|but} {nobody|no one} knew {why|whose it was}.",
    "{It all began|This story began} with a [w], {on a [weather.adj] day|one [month] {morning|evening}}.",
    "{The best thing|What [he] liked most} {at|in} [place] was a [w].",
]


def _composed(
    rng: random.Random, who: dict[str, str], slot: Callable[[str], str], about: Topic | None
) -> list[list[str]]:
    """The beats of a plot that is put together; the cast gets its wish and what stands in the way."""
    cast_of_topic = about.cast if about else {}
    if about and "fk" not in cast_of_topic and rng.random() < 0.5:
        # A helper of the hero's own kind: the topic tells it, not the likeliest of all helpers.
        who["fk"] = who["kind"]
    who |= story_parts.dressed(rng, who, slot, frozenset(cast_of_topic))
    return story_parts.beats(rng, helped="fk" in cast_of_topic)


def tell(
    rng: random.Random,
    plot: dict | None = None,
    who: dict[str, str] | None = None,
    own: float = 0.45,
    start: str = "",
    about: Topic | None = None,
    made: float = 0.0,
) -> Story:
    """One story, opened with `start` where an opening allows it; the words of its topic are in its text.

    `made` is the share of the plots that are put together, where none is given.
    """
    data = load()
    composed = not plot and made > 0 and rng.random() < made
    plot = plot or rng.choice(data.plots)
    who = who or cast(rng, called=about.cast.get("N", "") if about else "")
    who |= about.cast if about else {}
    topic, must = (about.phrase, about.must) if about else topic_of(rng, plot, who, own)
    first = not start and rng.random() < 0.12 and who["N"] not in must and not composed
    slot = _slots(rng, who, first)
    beats = plot["beats"]
    if composed:
        beats = _composed(rng, who, slot, about)
    told: set[str] = set()

    def one(templates: list[str], lead: float = 0.0) -> str:
        # No sentence is told twice: a model that saw repeats would repeat itself without end.
        template = rng.choice([t for t in templates if t not in told] or templates)
        told.add(template)
        if rng.random() < lead and LEADING.match(template):
            template = rng.choice(data.pools["lead"]) + template.replace("[He]", "[he]", 1)
        return expand(parse(enriched(template)), rng, slot)

    openings = [o for o in data.pools["opening1" if first else "opening"] if o.startswith(start)]

    def said(line: Said) -> str:
        template, values = line
        return expand(parse(enriched(template)), rng, lambda key: values.get(key) or slot(key))

    lines = [*map(said, about.setting), one(openings)] if about else [one(openings)]
    if about and rng.random() < 0.15:
        lines = [lines[-1], *lines[:-1]]
    again = {rng.randrange(1, len(beats)): e for e in about.echoes} if about else {}
    fillers, extra = (0.5 if composed else 1.0), list[str]()
    for index, beat in enumerate(beats):
        if rng.random() < 0.04 and 0 < index < len(beats) - 1 and not composed:
            continue
        lines.append(one(beat, 0.28))
        if index in again:
            lines.append(said(again[index]))
        # Each place in a story has fillers of its own: they tell a model how far it is, so that it goes on.
        place = index if len(beats) <= PLACES else index * PLACES // len(beats)
        if rng.random() < 0.28 * fillers:
            lines.append(one(data.pools["note"][place::PLACES]))
            extra.append(lines[-1])
        if rng.random() < 0.5 * fillers:
            mids = [m for m in data.pools["mid"][place::PLACES] if not (first and "[N]" in m)]
            lines.append(one(mids))
            extra.append(lines[-1])
    if rng.random() < (0.35 if composed else 0.75):
        lines.append(one(data.pools["end1" if first else "end"]))
    while made and extra and sum(map(len, lines)) > LONGEST:
        # What is learned ends in time: a story loses sentences between its beats rather than its end.
        lines.remove(extra.pop(rng.randrange(len(extra))))
    text = " ".join(lines)
    for word in must:
        if word not in text:
            # A slot of its own: templates are kept once parsed, so no word may be a part of one.
            line = expand(parse(rng.choice(MISSING)), rng, lambda key, word=word: word if key == "w" else slot(key))
            lines.insert(1, line)
            text = " ".join(lines)
    joiner = "\n\n" if rng.random() < 0.12 else " "
    if joiner != " " and len(lines) > 5:
        cut = len(lines) // 2
        text = " ".join(lines[:cut]) + "\n\n" + " ".join(lines[cut:])
    if about:
        return Story(tidy(text), topic, must)
    topic = tidy(topic)
    return Story(tidy(text), topic[0].lower() + topic[1:] if not topic.startswith(who["N"]) else topic, must)


SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])|(?<=[.!?]\") (?=[A-Z\"])")
SLIP, SLIP_END = "\x03", "\x04"
"""Around text that is read but not learned."""


def slipped(rng: random.Random, text: str) -> str:
    """The story with a sentence told twice, the second time unlearned: what is learned is to go on with a new one."""
    parts = SENTENCE.split(text)
    if len(parts) < 6:
        return text
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(2, len(parts) - 1)
        first = at - min(at, rng.choice([1, 1, 2, 3, 4]))
        again = parts[first : first + rng.choice([1, 1, 2])]
        if not any(SLIP in part for part in again):
            parts[at - 1] += SLIP + "".join(" " + part for part in again[: at - first]) + SLIP_END
    return " ".join(parts)
