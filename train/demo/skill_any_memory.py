"""Memory of any fact. Owns: statements of any subject, verb and object, turns between, and the questions for them.

The answer turns the statement round: its words are copied, only who speaks changes. Knows no tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from authored_data import load
from phrasing import occasion
from render import Case
from skill_chat import person, value_of
from skill_everyday import everyday
from skill_memory import INTRO, KIN, OTHERS, PETS, PLAIN, REPLY, Told, question_of, said_of
from verbs import VERBS, any_verb, spot, thing, tidied
from vocabulary import invented, word

WHEN = ["yesterday", "last week", "last year", "on [day]", "in [month]", "this morning", "today", "last summer"]
KINDS = {
    # a kind of thing: how it is said, past or present, and what the words of the question are
    "instrument": [("play the", "play", "instrument"), ("practise the", "practise", "hobby")],
    "lang": [
        ("speak", "speak", "language"),
        ("am learning", "am learning", "language"),
        ("study", "study", "language"),
    ],
    "animal": [("have a", "have", "animal"), ("keep a", "keep", "pet"), ("want a", "want", "animal")],
    "food": [("ate", "ate", "dish"), ("cooked", "cooked", "food"), ("ordered", "ordered", "food")],
    "job": [("work as a", "work as", "job"), ("was once a", "was once", "job")],
    "hobby": [
        ("do", "do", "hobby"),
        ("am good at", "am good at", "hobby"),
        ("take lessons in", "take lessons in", "hobby"),
    ],
    "fruit": [("picked a", "picked", "fruit"), ("am allergic to", "am allergic to", "fruit")],
    "city": [("live in", "live in", "city"), ("visited", "visited", "city"), ("grew up in", "grew up in", "town")],
    "drink": [("drink", "drink", "drink"), ("never drink", "never drink", "drink")],
    "colour": [("painted my room", "painted my room", "colour"), ("hate", "hate", "colour")],
}


def _yours(text: str) -> str:
    swap = {"my": "your", "me": "you", "our": "your", "am": "are", "was": "were", "I": "you", "myself": "yourself"}
    return re.sub(r"\b(my|me|our|am|was|I|myself)\b", lambda m: swap[m[1]], text)


def _ask(verb: str, what: str) -> list[str]:
    """Questions for what somebody does: of a present verb, a past one, or one with `am`."""
    head, _, rest = verb.partition(" ")
    tail = f" {rest}" if rest else ""
    if head in ("am", "was"):
        return [f"{what} {head} I{tail}?"]
    base = PRESENT.get(head)
    if base:
        return [f"{what} did I {base}{tail}?"]
    if head == "never":
        return [f"{what} do I never{tail}?"]
    return [f"{what} do I {head}{tail}?"]


PRESENT = {"ate": "eat", "cooked": "cook", "ordered": "order", "picked": "pick", "visited": "visit", "grew": "grow"}
PRESENT |= {"painted": "paint"}


def _typical(rng: random.Random) -> Told:
    """A thing of a kind, asked for by its kind: `I play the cello`, `which instrument do I play?`"""
    kind = rng.choice(list(KINDS))
    said, verb, called = rng.choice(KINDS[kind])
    value = value_of(rng, kind, False)
    if rng.random() < 0.15 and kind not in ("lang", "colour"):
        value = invented(rng)
    full = tidied(f"{said} {value}")
    asks = _ask(verb, f"Which {called}") + _ask(verb, f"What {called}")
    asks = [a.replace(f"Which {called} did I paint", "Which colour did I paint") for a in asks]
    if kind not in ("city", "colour", "job"):
        asks += _ask(verb, "What")
    if kind == "city":
        asks += [a.replace(" in?", "?") for a in _ask(verb, "Where") if " in?" in a or "visit" not in a]
    if kind == "job":
        asks = [f"What {'was' if 'was' in verb else 'is'} my job?", "What do I do for work?"][
            : 1 if "was" in verb else 2
        ]
    does = _ask(verb, "x")[0]
    clause = f"{'which ' + called if kind != 'job' else 'what job'} I {verb}" if not does.startswith("x am") else ""
    clauses = [clause] if clause and kind != "job" else []
    return Told([f"I {full}."], asks, clauses, [], f"You {_yours(full)}.", value, f"{kind} {verb}")


def _done(rng: random.Random) -> Told:
    """Any deed with any object, by the user or another: `I repaired a lamp yesterday`, `what did I repair?`"""
    verb, what = any_verb(rng), thing(rng)
    tail = rng.choice([spot(rng), "", "", "", "when"])
    if tail == "when":
        tail = re.sub(r"\[(\w+)\]", lambda m: rng.choice(load().words[m[1]]), rng.choice(WHEN))
    behind = f" {tail}" if tail else ""
    shown = rng.choice(["", behind])
    yours = _yours(what)
    if rng.random() < 0.55:
        says = [f"I {verb.past} {what}{behind}."]
        front = tail[:1].upper() + tail[1:]
        says += [f"{front} I {verb.past} {what}."] if tail else []
        asks = [
            f"What did I {verb.base}{shown}?",
            f"what did I {verb.base}{shown}",
            f"Which thing did I {verb.base}{shown}?",
        ]
        return Told(
            says, asks, [f"what I {verb.past}{shown}"], [], f"You {verb.past} {yours}{behind}.", yours, verb.base
        )
    who, whose = _somebody(rng)
    says = [f"{who[0].upper()}{who[1:]} {verb.past} {what}{behind}."]
    answer = f"{whose[0].upper()}{whose[1:]} {verb.past} {yours}{behind}."
    if rng.random() < 0.3:
        asks = [f"Who {verb.past} {what}?", f"Who was it that {verb.past} {what}?"]
        return Told(says, asks, [f"who {verb.past} {what}"], [], answer, whose, verb.base)
    asks = [f"What did {who} {verb.base}{shown}?", f"what did {who} {verb.base}{shown}", f"{who} {verb.past} what?"]
    asks[2] = asks[2][0].upper() + asks[2][1:]
    return Told(says, asks, [f"what {who} {verb.past}{shown}"], [], answer, yours, verb.base)


def _somebody(rng: random.Random) -> tuple[str, str]:
    """Somebody as the user and as the answer calls them."""
    if rng.random() < 0.4:
        name = person(rng, False)
        return name, name
    kin = rng.choice([*KIN, *OTHERS])
    return f"my {kin}", f"your {kin}"


def _habit(rng: random.Random) -> Told:
    """What somebody does again and again: `my boss collects stamps`."""
    verb, what = rng.choice(VERBS), thing(rng)
    yours = _yours(what)
    if rng.random() < 0.4:
        says = [f"I {verb.base} {what} every {rng.choice(load().words['day'])}.", f"I always {verb.base} {what}."]
        text = rng.choice(says)
        tail = text[len(f"I {verb.base} {what}") : -1] if not text.startswith("I always") else ""
        lead = "always " if text.startswith("I always") else ""
        return Told(
            [text],
            [f"What do I {lead}{verb.base}{tail}?", f"What do I {lead}{verb.base}?"],
            [f"what I {lead}{verb.base}{tail}"],
            [],
            f"You {lead}{verb.base} {yours}{tail}.",
            yours,
            verb.base,
        )
    who, whose = _somebody(rng)
    first = f"{who[0].upper()}{who[1:]}"
    answer = f"{whose[0].upper()}{whose[1:]} {verb.third} {yours}."
    if rng.random() < 0.35:
        return Told([f"{first} {verb.third} {what}."], [f"Who {verb.third} {what}?"], [], [], answer, whose, verb.base)
    asks = [f"What does {who} {verb.base}?", f"what does {who} {verb.base}"]
    return Told([f"{first} {verb.third} {what}."], asks, [f"what {who} {verb.third}"], [], answer, yours, verb.base)


def _label(rng: random.Random) -> str:
    """What something of one's own is called: one to three words."""
    head = rng.choice([word(rng, "noun", False), word(rng, "param", False), word(rng, "any", False)])
    head = head if len(head) > 3 else invented(rng)
    pick = rng.random()
    if pick < 0.35:
        second = [
            "code",
            "name",
            "number",
            "password",
            "address",
            "date",
            "size",
            "model",
            "title",
            "owner",
            "shop",
            "place",
        ]
        return f"{head} {rng.choice(second)}"
    if pick < 0.5:
        return f"{rng.choice(['new', 'old', 'first', 'second', 'next', 'last', 'favourite', 'lucky', 'secret'])} {head}"
    if pick < 0.62:
        return f"{rng.choice([*KIN, *OTHERS])}'s {head}"
    return rng.choice(PETS) if pick < 0.68 else head


def _anything(rng: random.Random) -> str:
    """A value of any kind and length."""
    pick = rng.random()
    if pick < 0.2:
        return str(rng.randint(1, 99999))
    if pick < 0.35:
        return person(rng, False)
    if pick < 0.5:
        return invented(rng)
    if pick < 0.6:
        return "".join(rng.choice("ABCDEFGHKLMNPRSTVWX") for _ in range(2)) + str(rng.randint(1, 999))
    if pick < 0.75:
        return thing(rng)
    if pick < 0.85:
        return rng.choice(load().words["colour"])
    return " ".join(word(rng, "any", False) for _ in range(rng.randint(1, 4)))


def _mine(rng: random.Random) -> Told:
    """Anything of one's own that is something: `my locker code is 4417`."""
    label, value = _label(rng), _anything(rng)
    owner, your = ("my", "your") if rng.random() < 0.75 else ("our", "your") if rng.random() < 0.4 else ("the", "the")
    says = [f"{owner.capitalize()} {label} is {value}."]
    if owner != "the" and "'s" not in label:
        says += [f"The {label} I have is {value}."]
        says += [] if value[0].islower() else [f"{value} is {owner} {label}."]
    says += [f"{owner} {label}: {value}", f"{owner.capitalize()} {label} will be {value}."][:1]
    asks = [f"What is {owner} {label}?", f"What's {owner} {label}?", f"{owner} {label}?", f"What was {owner} {label}?"]
    asks += [f"Which is {owner} {label}?", f"{owner} {label} is what?"]
    yours = _yours(value)
    return Told(
        says,
        asks,
        [f"what {owner} {label} is"],
        [f"{owner} {label}"],
        f"{your.capitalize()} {label} is {yours}.",
        yours,
        label,
    )


def _lying(rng: random.Random) -> Told:
    """Where anything is."""
    what, where = thing(rng, rng.choice(["my", "the"])), spot(rng)
    yours = _yours(what)
    says = [f"{what[0].upper()}{what[1:]} is {where}.", f"I put {what} {where}.", f"You find {what} {where}."]
    asks = [f"Where is {what}?", f"where's {what}?", f"Where did I put {what}?", f"In which place is {what}?"]
    return Told(says, asks, [f"where {what} is"], [], f"{yours[0].upper()}{yours[1:]} is {where}.", where, what)


def _time(rng: random.Random) -> Told:
    """When anything happens."""
    what = _label(rng)
    when = rng.choice(["on [day]", "in [month]", "at [n]", "on [day] at [n]", "tomorrow", "next week", "on the [n]th"])
    when = when.replace("[day]", rng.choice(load().words["day"])).replace("[month]", rng.choice(load().words["month"]))
    when = when.replace("[n]", str(rng.randint(4, 12)))
    says = [f"The {what} is {when}.", f"The {what} starts {when}.", f"We have the {what} {when}."]
    asks = [f"When is the {what}?", f"when's the {what}?", f"What day or time is the {what}?"]
    return Told(says, asks, [f"when the {what} is"], [f"the time of the {what}"], f"The {what} is {when}.", when, what)


MAKERS: list[Callable[[random.Random], Told]] = [_typical, _typical, _done, _done, _habit, _mine, _mine, _lying, _time]


def _between(rng: random.Random) -> list[dict]:
    """A turn or two on something else."""
    out: list[dict] = []
    for _ in range(rng.choice([1, 1, 2])):
        out += [dict(m) for m in everyday(rng).messages[-2:]]
    return out


def _several(rng: random.Random) -> list[Told]:
    """One to five facts, no two of which could answer one question."""
    told: list[Told] = []
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4, 5])):
        new = rng.choice(MAKERS)(rng)
        words = set(new.subject.split())
        if not any(words & set(t.subject.split()) or new.value == t.value for t in told):
            told.append(new)
    return told


def _joined(rng: random.Random, told: list[Told]) -> str:
    """Several facts in one breath, with or without a sentence that does not matter."""
    parts = [rng.choice(t.says) for t in told]
    parts = [p[0].upper() + p[1:] + ("" if p.endswith(".") else ".") for p in parts]
    if rng.random() < 0.2:
        parts.insert(rng.randint(0, len(parts)), occasion(rng))
    if rng.random() < 0.15:
        parts.insert(0, rng.choice(["I'm [n].", "My name is [n].", "[n] here."]).replace("[n]", person(rng, False)))
    if len(parts) == 2 and rng.random() < 0.35:
        second = parts[1]
        if second.split(" ")[0] in ("My", "The", "Our", "You", "We"):
            second = second[0].lower() + second[1:]
        second = second[2:] if parts[0].startswith("I ") and second.startswith("I ") and rng.random() < 0.6 else second
        return f"{parts[0][:-1]} and {second}"
    return " ".join(parts)


def any_memory(rng: random.Random) -> Case:
    """Facts of any kind told in one breath or over turns, other turns between, and questions for them."""
    told = _several(rng)
    messages: list[dict] = []
    rest = list(told)
    once = rng.random() < 0.35
    while rest and not once:
        some = [rest.pop(0) for _ in range(min(len(rest), rng.choice([1, 1, 2, 3])))]
        text = rng.choice(INTRO) + _joined(rng, some) if len(some) > 1 else said_of(rng, some[0])
        reply = rng.choice(REPLY).replace("[y]", some[0].answer).replace("[z]", some[0].answer)
        if len(some) > 1 or rng.random() < 0.4:
            reply = rng.choice(PLAIN)
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        if rng.random() < 0.3:
            messages += _between(rng)
    asked = rng.sample(told, min(len(told), rng.choice([1, 1, 2, 3])))
    for at, target in enumerate(asked):
        question = question_of(rng, target)
        if once and at == 0:
            question = _joined(rng, told) + rng.choice([" ", " ", "\n", " So: ", " Now: "]) + question
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": target.answer}]
    return Case(suite="memory_any", messages=messages, must=re.escape(asked[-1].value))
