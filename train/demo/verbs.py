"""Verbs in their forms, and what can be done to what. Owns: a table of verbs, long noun phrases. Knows no task."""

from __future__ import annotations

import random
from dataclasses import dataclass

from authored_data import load
from grammar import tidy
from topics import LIVING, PLACES, THINGS, noun
from vocabulary import invented


@dataclass(frozen=True)
class Verb:
    """One transitive verb: `find`, `finds`, `found`, `finding`."""

    base: str
    third: str
    past: str
    doing: str


def _regular(base: str) -> Verb:
    if base.endswith("y") and base[-2] not in "aeo":
        return Verb(base, base[:-1] + "ies", base[:-1] + "ied", base + "ing")
    stem = base[:-1] if base.endswith("e") else base
    third = base + ("es" if base.endswith(("ch", "sh", "s", "x")) else "s")
    return Verb(base, third, stem + "ed", stem + "ing")


REGULAR = "repair paint clean open borrow save follow help wash plant cook chase visit love miss fear count guard watch"
REGULAR += " need collect admire protect carry invent discover rescue order return study use like enjoy hate polish"
REGULAR += " move pull push lock unlock photograph describe inherit remember decorate bake mend test trade receive"
REGULAR += " touch trust notice imagine believe record name mix pack trace search examine own rent"
IRREGULAR = "find/found lose/lost buy/bought sell/sold steal/stole build/built break/broke hide/hid bring/brought"
IRREGULAR += " catch/caught draw/drew forget/forgot keep/kept meet/met hear/heard see/saw feed/fed choose/chose"
IRREGULAR += " make/made take/took sing_to/sang_to dream_of/dreamed_of wait_for/waited_for look_for/looked_for"
IRREGULAR += " talk_to/talked_to write_to/wrote_to give_away/gave_away pick_up/picked_up throw_away/threw_away"
IRREGULAR += " lend/lent leave/left drive/drove ride/rode hold/held win/won wear/wore teach/taught know/knew"
TWICE = frozenset(("win", "forget"))


def _irregular(pair: str) -> Verb:
    base, past = pair.replace("_", " ").split("/")
    head, _, rest = base.partition(" ")
    first = _regular(head)
    doing = head + head[-1] + "ing" if head in TWICE else first.doing
    tail = " " + rest if rest else ""
    return Verb(base, first.third + tail, past, doing + tail)


VERBS = [_regular(v) for v in REGULAR.split()] + [_irregular(v) for v in IRREGULAR.split()]


def any_verb(rng: random.Random) -> Verb:
    """A verb of the table; one in eight is made up, with regular forms."""
    if rng.random() < 0.12:
        return _regular(invented(rng))
    return rng.choice(VERBS)


def adjective(rng: random.Random) -> str:
    """Any adjective of a thing."""
    return rng.choice(load().words["objadj"])


def thing(rng: random.Random, article: str = "") -> str:
    """A thing with its article, short or long, of known or unknown words."""
    head = noun(rng, THINGS, False)
    pick = rng.random()
    if pick < 0.3:
        head = f"{adjective(rng)} {head}"
    elif pick < 0.37:
        head = f"{adjective(rng)} {adjective(rng)} {head}"
    elif pick < 0.45:
        head = f"{noun(rng, THINGS, False)} {head}"
    elif pick < 0.52:
        head += rng.choice([" of ", " for ", " from ", " with "]) + f"a {noun(rng, THINGS, False)}"
    return tidied(f"{article or rng.choice(['a', 'a', 'a', 'the'])} {head}")


def being(rng: random.Random) -> str:
    """Somebody: a living noun with or without a trait."""
    kind = noun(rng, LIVING, False)
    return f"{rng.choice(load().words['trait'])} {kind}" if rng.random() < 0.3 else kind


def spot(rng: random.Random) -> str:
    """Where something is: a preposition with a place."""
    where = rng.choice(["in", "in", "at", "near", "behind", "under", "inside", "by", "next to", "on top of", "outside"])
    if rng.random() < 0.25:
        return f"{where} {rng.choice(load().words['place'])}"
    return tidied(f"{where} {rng.choice(['a', 'the', 'an old', 'the big'])} {noun(rng, PLACES, False)}")


def tidied(text: str) -> str:
    """Articles before vowels, without a capital in front."""
    done = tidy(text)
    return text[0] + done[1:] if text[0].isalpha() else done
