"""What a story can be asked for. Owns: topics made of nouns, and the sentences that bring them into a story.

A topic's words come from wide lists and from nowhere at all, so that they are copied from the request and not
remembered. Some nouns are held out: no training topic holds them.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from functools import lru_cache

from authored_data import load, rows
from grammar import tidy
from vocabulary import invented, is_held, word

LIVING, THINGS, PLACES, IDEAS = "living", "thing", "place", "idea"


Said = tuple[str, dict[str, str]]  # a template, and the values of its own slots


@dataclass(frozen=True)
class Topic:
    """A topic phrase, the words a story on it must hold, its cast, and its sentences."""

    phrase: str
    must: tuple[str, ...]
    cast: dict[str, str] = field(default_factory=dict)
    setting: tuple[Said, ...] = ()
    echoes: tuple[Said, ...] = ()


@lru_cache(maxsize=1)
def nouns() -> dict[tuple[str, bool], list[str]]:
    """Nouns by role, for training and held out."""
    w = load().words
    table = {row["role"]: row for row in rows("topics.jsonl")}
    pools = {
        LIVING: [*w["kind"], *w["animal"], *w["job"], *table[LIVING]["train"]],
        THINGS: [*w["thing"], *w["noun"], *w["instrument"], *table[THINGS]["train"]],
        PLACES: [*w["place.noun"], *table[PLACES]["train"]],
        IDEAS: table[IDEAS]["train"],
    }
    held = {role: table[role]["held"] for role in pools}
    every = frozenset(n for names in held.values() for n in names)
    out = {}
    for role, pool in pools.items():
        kept = [n for n in dict.fromkeys(pool) if n not in every and not is_held(n)]
        out[role, False] = kept
        # Held out: those written for that, and a twelfth of the rest.
        out[role, True] = [*held[role], *(n for n in dict.fromkeys(pool) if is_held(n))]
    return out


@lru_cache(maxsize=1)
def held_nouns() -> frozenset[str]:
    """Every noun that no training topic may hold."""
    return frozenset(n for (_, held), names in nouns().items() if held for n in names)


def noun(rng: random.Random, role: str, held: bool) -> str:
    """A noun of a role; in training some are any word, or invented."""
    if not held and role != IDEAS:
        pick = rng.random()
        if pick < 0.18:
            return invented(rng)
        if pick < 0.36:
            text = word(rng, rng.choice(["noun", "any"]), False)
            if text not in held_nouns():
                return text
    return rng.choice(nouns()[role, held])


def plural(text: str) -> str:
    """The plural of a noun, by the usual rules."""
    from stories import plural as of_animal

    return of_animal(text)


# Marks: K, L living; O, U things; P, Q places; X idea; A adjective; B second adjective; N name; V what someone does.
TRAIN = [
    "a P by a Q",
    "a P near a Q",
    "a P on a Q",
    "a P beside the Q",
    "an old P by a Q",
    "a P at the end of a Q",
    "a P in a Q",
    "a P above a Q",
    "a small P next to a big Q",
    "the P by the Q",
    "a A P",
    "the A P",
    "a P with a O",
    "a O in a P",
    "a O from a P",
    "the O in the P",
    "a O under a P",
    "a O on a P",
    "an O and a P",
    "the P and the O",
    "a K in a P",
    "a K who lives in a P",
    "a K and a P",
    "a K at a P",
    "a K who comes to a P",
    "a K living by a P",
    "a K and a O",
    "a K with a O",
    "a K who finds a O",
    "a K who loses a O",
    "a K who builds a O",
    "the K and the O",
    "a K who wants a O",
    "a K and its O",
    "a K who cannot find the O",
    "a K who is afraid of a O",
    "a A K with a O",
    "a K and a L",
    "a K who meets a L",
    "a K, a L and a O",
    "the K, the L and the P",
    "a friendship of a K and a L",
    "a A K and a B L",
    "two friends, a K and a L",
    "a K who wants to be a L",
    "how a K met a L",
    "a K who finds a O in a P",
    "a K with a O at a P",
    "a K, a O and a P",
    "a K who takes a O to a P",
    "a O, a U and a K",
    "a O",
    "a A O",
    "the A O",
    "a A O and a B U",
    "a O and a U",
    "O+",
    "K+",
    "A O+",
    "K+ and L+",
    "K+ in a P",
    "N and a O",
    "N, a K from a P",
    "N and the A O",
    "a K called N",
    "a K named N and a O",
    "N the K",
    "N at the P",
    "a K who V",
    "a A K who V",
    "a K who V in a P",
    "N, who V",
    "a O that V",
    "why a K V",
    "a K that V with a O",
    "X",
    "X",
    "X and a K",
    "a K and X",
    "X in a P",
    "X and X+",
    "how a K learned about X",
    "a K who knows X",
    "a day at the P",
    "a night in a P",
    "a trip to a P",
    "a journey from a P to a Q",
    "life in a P",
    "a visit to the Q",
    "K P O",
    "a K. It should also have a O",
    "a K - and a P",
    "a lost O",
    "my O",
    "our P",
    "her K",
    "a talking O",
]
HELD = [
    "a P close to a Q",
    "the old P behind a Q",
    "a K who owns a O",
    "a K hiding in a P",
    "one K and one L",
    "a O inside a P",
    "the P where a K lives",
    "a K looking for a O",
    "a brave K near a P",
    "a K with a P and a O",
    "some K+ and a O",
]
BESIDE = ["by", "near", "on", "beside", "above", "next to", "under", "across from", "opposite", "below", "outside"]
BESIDE += ["beyond", "far from", "on top of", "at the foot of", "in front of", "facing", "at the edge of", "along"]
DOING = ["sleeping in", "waiting at", "lost in", "walking to", "singing at", "working in", "running from", "stuck in"]
DOING += ["sitting by", "born in", "standing on", "living near", "sent to", "dancing in", "coming home to", "locked in"]
HAVING = ["sells", "buys", "steals", "carries", "breaks", "repairs", "paints", "dreams of", "fears", "hates", "keeps"]
HAVING += ["forgets", "draws", "borrows", "returns", "guards", "misses", "washes", "gives away", "talks to", "invents"]


def _row(rng: random.Random) -> str:
    """Two to four nouns in a row or behind `with`, each with its article, some with an adjective."""
    marks = rng.sample(["K", "O", "P", "L", "U", "Q"], rng.choice([2, 3, 3, 3, 4]))
    looks = rng.sample(["A ", "B ", "", "", "", ""], len(marks))
    articles = ["a", "a", "a", "the", "one", "some", "my"]
    first = rng.choice(articles)
    parts = [
        f"{first if rng.random() < 0.7 else rng.choice(articles)} {x}{m}" for x, m in zip(looks, marks, strict=True)
    ]
    last = rng.choice([" and ", " and ", ", and ", " and also "])
    if rng.random() < 0.35:
        rest = parts[1:]
        tail = rest[0] if len(rest) == 1 else ", ".join(rest[:-1]) + last + rest[-1]
        return f"{parts[0]}{rng.choice([' with ', ' with ', ' that has ', ' who sees ', ', ', ' between '])}{tail}"
    return ", ".join(parts[:-1]) + last + parts[-1]


def composed(rng: random.Random) -> str:
    """A form put together from an article, nouns and what is between them, so that no link is learned by heart."""
    a, b = rng.choice(["a", "a", "the", "one"]), rng.choice(["a", "a", "the"])
    if rng.random() < 0.3:
        return _row(rng)
    pick = rng.random()
    if pick < 0.3:
        return f"{a} {rng.choice(['P', 'P', 'A P', 'old P'])} {rng.choice(BESIDE)} {b} Q"
    if pick < 0.45:
        return f"{a} {rng.choice('KO')} {rng.choice(BESIDE)} {b} P"
    if pick < 0.65:
        return f"{a} {rng.choice(['K', 'B K'])} {rng.choice(DOING)} {b} P"
    if pick < 0.85:
        return f"{a} K who {rng.choice(HAVING)} {b} O"
    return f"{a} K{rng.choice([' and ', ', ', ' with ', ' but no ', ' without '])}{b} O {rng.choice(BESIDE)} a P"


ROLES = {"K": LIVING, "L": LIVING, "O": THINGS, "U": THINGS, "P": PLACES, "Q": PLACES, "X": IDEAS}
MARK = re.compile(r"\b([KLOUPQXABNV])(\+?)(?!\w)")


def topic(rng: random.Random, held: bool) -> Topic:
    """A topic with its words, cast and sentences."""
    data = {row["role"]: row for row in rows_cached()}
    form = rng.choice(HELD) if held else composed(rng) if rng.random() < 0.4 else rng.choice(TRAIN)
    found: dict[str, str] = {}
    must: list[str] = []

    def put(match: re.Match[str]) -> str:
        mark, many = match.groups()
        if mark in "AB":
            found[mark] = rng.choice(load().words["objadj" if mark == "A" else "trait"])
            return found[mark]
        if mark == "N":
            found["N"] = rng.choice(load().words["name"])
            must.append(found["N"])
            return found["N"]
        if mark == "V":
            found["V"] = rng.choice(data["act"]["train"])
            must.append(found["V"].split(" ")[-1])
            return rng.choice(["wants to [v]", "learns to [v]", "loves to [v]", "cannot [v]"]).replace(
                "[v]", found["V"]
            )
        text = noun(rng, ROLES[mark], held)
        while text in found.values():
            text = noun(rng, ROLES[mark], held)
        shown = plural(text) if many and mark != "X" else text
        found[mark if mark not in found else mark + "2"] = text
        must.append(shown)
        return shown

    phrase = tidy(MARK.sub(put, form))
    if "N" not in found or not phrase.startswith(found["N"]):
        phrase = phrase[0].lower() + phrase[1:]
    return Topic(phrase, tuple(must), *_woven(rng, form, phrase, found, tuple(must)))


@lru_cache(maxsize=1)
def rows_cached() -> list[dict]:
    """The rows of the authored topics."""
    return rows("topics.jsonl")


def _cast(found: dict[str, str]) -> dict[str, str]:
    out = {}
    if "K" in found:
        out |= {"kind": found["K"]}
    if "L" in found:
        out |= {"fk": found["L"]}
    if "O" in found:
        obj = f"{found['A']} {found['O']}" if "A" in found and "K" not in found else found["O"]
        out |= {"thing": found["O"], "obj": obj, "obj.a": f"a {obj}", "obj.the": f"the {found['O']}"}
        out |= {"obj.cap": obj.title()}
    if "P" in found:
        out |= {"place": f"the {found['P']}"}
    if "Q" in found:
        out |= {"far": f"the {found['Q']}"}
    if "U" in found:
        out |= {"tool": found["U"]}
    if "X" in found:
        out |= {"idea": found["X"]}
    if "V" in found:
        out |= {"act": found["V"]}
    if "N" in found:
        out |= {"N": found["N"]}
    return out


BETWEEN = re.compile(r"\bP ([a-z ]+?) (?:an?|the) (?:\w+ )?Q")
WHOLE = 0.8
"""Share of the stories that begin with the topic as it was put: plain copying brings in every word."""


def _woven(
    rng: random.Random, form: str, phrase: str, found: dict[str, str], must: tuple[str, ...]
) -> tuple[dict[str, str], tuple[Said, ...], tuple[Said, ...]]:
    """Cast, the sentences at the start that name every word of the topic, and some that come back to them."""
    table = {row["role"]: row for row in rows_cached()}
    setting: list[Said] = []
    left = list(must)

    def say(pool: str, **values: str) -> None:
        for value in values.values():
            if value in left:
                left.remove(value)
        setting.append((rng.choice(table[pool]["train"]), values))

    whole = phrase if not phrase.startswith(("why ", "how ", "life ", "two ")) and ". " not in phrase else ""
    if whole and rng.random() < WHOLE:
        say("whole", t=whole)
        left = [w for w in left if w not in whole] if rng.random() < 0.6 else left
    if "V" in found and "K" in found:
        say("wish", v=found["V"])
        left = [w for w in left if w != found["V"].split(" ")[-1]]
    # The opening names the hero's kind, so only the rest is told here.
    left = [w for w in left if w not in (found.get("K"), found.get("N"))] if rng.random() < 0.7 else left
    if {"P", "Q"} <= set(found) and found["P"] in left and found["Q"] in left:
        between = BETWEEN.search(form)
        link = between[1] if between and between[1] not in ("to", "and") else "by"
        say("two_places", p=found["P"], q=found["Q"], r=link)
    for text in list(left):
        role = next((m[0] for m, v in found.items() if v == text), "")
        if role == "N":
            continue  # the hero's name is told by every opening
        pool = {"P": "one_place", "Q": "one_place", "X": "an_idea", "K": "one_living", "L": "one_living"}.get(
            role, "one_thing"
        )
        if text not in found.values():
            pool = "many"
        adjective = found.get("A") if role == "O" and "A" in found and f"{found['A']} {text}" in phrase else None
        setting.append((rng.choice(table[pool]["train"]), {"w": f"{adjective} {text}" if adjective else text}))
    echoes: list[Said] = []
    for text in must:
        if text in found.values() and text != found.get("N") and rng.random() < 0.6:
            pool = "idea_again" if text in (found.get("X"), found.get("X2")) else "again"
            echoes.append((rng.choice(table[pool]["train"]), {"w": text}))
    return _cast(found), tuple(setting), tuple(echoes)
