"""The last sentence of a story, given in the request. Owns: sentences of any words, and the ways to ask for one."""

from __future__ import annotations

import random

from authored_data import load
from grammar import expand, parse, tidy
from skill_chat import person
from topics import LIVING, PLACES, THINGS, noun
from verbs import VERBS, deed

SAYS = ["and {so|then|that is how} the [k] [did] the [o]", "the [o] was {[look] again|never seen again|[look] at last}"]
SAYS += [
    "nobody {ever |}[did] the [o] again",
    "good night, [say] the [k]",
    "the [k] and the [k2] {went home|slept|laughed}",
]
SAYS += ["{now|today} the [o] stands {in|near} the [p]", "[N] {was not afraid any more|went to bed|smiled at the [o]}"]
SAYS += [
    "{never|always} [do] a [k]",
    "and the [k] [act]",
    "that was {the end of|all about} the [o]",
    "it {was|is} only a [o]",
]
SAYS += [
    "{I told you so|thank you|see you tomorrow}, {said the [k]|said [N]}",
    "then it {rained|snowed|was quiet} {in|at} the [p]",
]
SAYS += [
    "who would have thought that of a [k]",
    "and they all [did] the [o]",
    "the [p] was [look], and [N] knew why",
]
ASKS = ["{the|its|the story's} last {sentence|line|words} {is|must be|should be|are to be|reads|has to be}{:|} [q]"]
ASKS += [
    "{end|finish|close|stop} {it |the story |}with {the sentence |the words |the line |}[q]",
    "{let it|it must|it should|make it} end with [q]",
]
ASKS += [
    "make [q] the last {sentence|line}",
    "{at the very end|as the last sentence}{ it says| you write|}: [q]",
    "the end {is|reads|must read} [q]",
]
ASKS += [
    "[q] {is how it ends|is the last sentence|comes last|must stand at the end}",
    "that ends with {the words |}[q]",
    "last sentence: [q]",
]


def last_words(rng: random.Random) -> str:
    """A sentence that a story can end with: of any hero, thing and place."""
    words, verb = load().words, rng.choice(VERBS)
    slots = {"k": noun(rng, LIVING, False), "k2": noun(rng, LIVING, False), "o": noun(rng, THINGS, False)}
    slots |= {"p": noun(rng, PLACES, False), "N": person(rng, False), "did": verb.past, "do": verb.base}
    slots |= {"look": rng.choice(words["objadj"]), "act": deed(rng, False)[1], "say": rng.choice(["said", "whispered"])}
    text = tidy(expand(parse(rng.choice(SAYS)), rng, slots.__getitem__))
    return text[0].upper() + text[1:] + "."


def asked_last(rng: random.Random, sentence: str) -> str:
    """A wish for the sentence as the last one, in quotes."""
    mark, said = rng.choice(['"', '"', "'"]), sentence if rng.random() < 0.6 else sentence[:-1]
    return expand(parse(rng.choice(ASKS)), rng, lambda _: f"{mark}{said}{mark}")
