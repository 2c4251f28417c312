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


def thing(rng: random.Random, article: str = "", held: bool = False) -> str:
    """A thing with its article, short or long, of known or unknown words."""
    head = noun(rng, THINGS, held)
    pick = rng.random()
    if pick < 0.3:
        head = f"{adjective(rng)} {head}"
    elif pick < 0.37:
        head = f"{adjective(rng)} {adjective(rng)} {head}"
    elif pick < 0.45:
        head = f"{noun(rng, THINGS, held)} {head}"
    elif pick < 0.52:
        head += rng.choice([" of ", " for ", " from ", " with "]) + f"a {noun(rng, THINGS, held)}"
    return tidied(f"{article or rng.choice(['a', 'a', 'a', 'the'])} {head}")


def being(rng: random.Random, held: bool = False) -> str:
    """Somebody: a living noun with or without a trait."""
    kind = noun(rng, LIVING, held)
    return f"{rng.choice(load().words['trait'])} {kind}" if rng.random() < 0.3 else kind


def spot(rng: random.Random, held: bool = False) -> str:
    """Where something is: a preposition with a place."""
    where = rng.choice(["in", "in", "at", "near", "behind", "under", "inside", "by", "next to", "on top of", "outside"])
    if rng.random() < 0.25 and not held:
        return f"{where} {rng.choice(load().words['place'])}"
    return tidied(f"{where} {rng.choice(['a', 'the', 'an old', 'the big'])} {noun(rng, PLACES, held)}")


def tidied(text: str) -> str:
    """Articles before vowels, without a capital in front."""
    done = tidy(text)
    return text[0] + done[1:] if text[0].isalpha() else done


DEEDS = "sleeps all day/slept all day/sleep all day|is afraid of [t]/was afraid of [t]/are afraid of [t]"
DEEDS += "|learns to swim/learned to swim/learn to swim"
DEEDS += "|wins a race against [b]/won a race against [b]/win a race against [b]"
DEEDS += "|gets lost in [p]/got lost in [p]/get lost in [p]|snores too loudly/snored too loudly/snore too loudly"
DEEDS += "|falls asleep on [t]/fell asleep on [t]/fall asleep on [t]"
DEEDS += "|turns into [b]/turned into [b]/turn into [b]"
DEEDS += "|shares [t] with [b]/shared [t] with [b]/share [t] with [b]"
DEEDS += "|lives alone in [p]/lived alone in [p]/live alone in [p]"
DEEDS += "|bakes bread for [b]/baked bread for [b]/bake bread for [b]|cannot sleep/could not sleep/cannot sleep"
DEEDS += "|teaches [b] to dance/taught [b] to dance/teach [b] to dance"
DEEDS += "|dreams of flying/dreamed of flying/dream of flying|works as a cook/worked as a cook/work as a cook"
DEEDS += "|wants to become [b]/wanted to become [b]/want to become [b]|never speaks/never spoke/never speak"
DEEDS += "|does not like rain/did not like rain/do not like rain"
DEEDS += "|meets [b] at night/met [b] at night/meet [b] at night|jumps over [t]/jumped over [t]/jump over [t]"
DEEDS += "|stops being afraid/stopped being afraid/stop being afraid|sings for [b]/sang for [b]/sing for [b]"
DEEDS += "|runs away from [p]/ran away from [p]/run away from [p]|falls into [p]/fell into [p]/fall into [p]"
DEEDS += "|is too small for [t]/was too small for [t]/are too small for [t]"
DEEDS += "|loses a tooth/lost a tooth/lose a tooth|travels to the moon/travelled to the moon/travel to the moon"
DEEDS += "|hides in [p]/hid in [p]/hide in [p]|forgets its own name/forgot its own name/forget their own names"
DEEDS += "|grows very tall/grew very tall/grow very tall"
DEEDS += "|cannot find the way home/could not find the way home/cannot find the way home"
DEEDS += "|swims to [p]/swam to [p]/swim to [p]|has no friends/had no friends/have no friends"
DEEDS += "|saves [b] from [b]/saved [b] from [b]/save [b] from [b]"
DEEDS += "|tells lies to [b]/told lies to [b]/tell lies to [b]"
DEEDS += "|is the last of its kind/was the last of its kind/are the last of their kind"
DEEDS += "|sells [t] to [b]/sold [t] to [b]/sell [t] to [b]"
DEEDS += "|climbs the highest hill/climbed the highest hill/climb the highest hill"
"""What somebody does: now, in the past, and now of many; [t] is a thing, [b] somebody, [p] a place."""


def deed(rng: random.Random, many: bool, held: bool = False) -> tuple[str, str, str]:
    """What somebody does without a plain object: now, in the past, and the last word that a reader would look for."""
    now, past, plural = rng.choice(DEEDS.split("|")).split("/")
    while "[" in now:
        mark = now[now.index("[") : now.index("[") + 3]
        made = thing(rng, held=held) if mark == "[t]" else tidied(f"a {being(rng, held)}")
        made = tidied(f"{rng.choice(['a', 'the'])} {noun(rng, PLACES, held)}") if mark == "[p]" else made
        now, past, plural = (text.replace(mark, made, 1) for text in (now, past, plural))
    shown = plural if many else now
    return shown, past, next(w for w in reversed(past.split(" ")) if w in shown)
