"""Remarks put together. Owns: who did, has or will do what, where, when, with whom and for how much; questions by rule.

A remark is seen by its speaker ("my aunt"), a question too; an answer tells it back ("your aunt"). Knows no task.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from authored_data import load
from grammar import tidy
from held_out import is_remark
from scenes import BRANDS, SHOPS, clock_of, code, date_of, full_person, money, organisation, some_words, titled, town
from skill_chat import person
from topics import LIVING, THINGS, noun
from verbs import VERBS, thing, tidied
from vocabulary import invented, word

Pair = tuple[str, str, str]
"""A question, its answer, and what an answer in any words must hold."""


def whole(value: str) -> str:
    """A pattern of a value that is no part of a longer word or number, at any place."""
    return rf"(?=[\s\S]*(?<!\w){re.escape(value)}(?!\w))"


TURNED = {"I": "you", "we": "you", "my": "your", "our": "your", "me": "you", "us": "you", "mine": "yours", "am": "are"}
PERSONAL = re.compile(r"(?<![\w'-])(?<!\d )(I|[Ww]e|[Mm]y|[Oo]ur|me|us|mine|am)(?![\w'-])")


def turned(text: str) -> str:
    """What the speaker says of himself, told back to him."""

    def other(match: re.Match[str]) -> str:
        found = match[0]
        made = TURNED[found if found == "I" else found.lower()]
        return made.capitalize() if found[0].isupper() and found != "I" else made

    return PERSONAL.sub(other, text)


def sentence(text: str, end: str = ".") -> str:
    """A text as a sentence."""
    text = tidy(text).rstrip(".")
    return text[0].upper() + text[1:] + end


RELATIONS = (
    "mother father sister brother aunt uncle cousin grandmother grandfather niece nephew daughter son wife husband"
)
RELATIONS += " friend neighbour boss colleague flatmate landlord tenant godfather godmother stepbrother partner fiancée"
RELATIONS += (
    " classmate roommate tutor coach guest twin pen-pal assistant client cleaner babysitter nan grandson teammate"
)
WHICH = ["older", "younger", "best", "new", "old", "favourite", "late", "only", "tall", "second", "funny", "first"]


@dataclass(frozen=True)
class Somebody:
    """The subject of a remark as its speaker says it; `third` asks for the third person."""

    said: str
    third: bool


def somebody(rng: random.Random) -> Somebody:
    """Anybody: the speaker, a relation, somebody with a job, or a name."""
    pick = rng.random()
    if pick < 0.34:
        return Somebody("I", False)
    if pick < 0.42:
        return Somebody("we", False)
    if pick < 0.75:
        kin = rng.choice(RELATIONS.split()) if rng.random() < 0.7 else rng.choice(load().words["job"])
        kin = f"{rng.choice(WHICH)} {kin}" if rng.random() < 0.25 else kin
        return Somebody(f"my {kin}{' ' + person(rng, False) if rng.random() < 0.3 else ''}", True)
    return Somebody(full_person(rng) if rng.random() < 0.7 else f"{person(rng, False)} from {town(rng)}", True)


def be(who: Somebody) -> str:
    """The form of `to be` for a subject."""
    return "is" if who.third else "am" if who.said == "I" else "are"


def do(who: Somebody) -> str:
    """The form of `to do` for a subject."""
    return "does" if who.third else "do"


def third(base: str) -> str:
    """The third person of a verb phrase, by its first word."""
    head, _, rest = base.partition(" ")
    if head in ("have", "be", "go", "do"):
        made = {"have": "has", "be": "is", "go": "goes", "do": "does"}[head]
    elif head.endswith("y") and head[-2] not in "aeou":
        made = head[:-1] + "ies"
    else:
        made = head + ("es" if head.endswith(("ch", "sh", "s", "x")) else "s")
    return f"{made} {rest}".strip()


def owned(rng: random.Random) -> str:
    """Something of somebody: `my old lamp`, `Tom's lamp`, `the lamp of my aunt`, `the lamp`."""
    head = (
        word(rng, "noun", False) if rng.random() < 0.55 else noun(rng, THINGS if rng.random() < 0.8 else LIVING, False)
    )
    if rng.random() < 0.3:
        looks = (
            load().words["objadj"] if rng.random() < 0.5 else ["new", "old", "second", "other", "spare", "first", "big"]
        )
        head = f"{rng.choice(looks)} {head}"
    pick = rng.random()
    if pick < 0.5:
        return f"my {head}"
    if pick < 0.6:
        return f"our {head}"
    if pick < 0.7:
        return f"the {head}"
    if pick < 0.82:
        return f"{person(rng, False)}'s {head}"
    kin = f"my {rng.choice(RELATIONS.split())}"
    return f"{kin}'s {head}" if rng.random() < 0.5 else f"the {head} of {kin}"


def day_of(rng: random.Random, past: bool) -> str:
    """When something is or was, with its preposition."""
    pick = rng.random()
    if pick < 0.3:
        return f"on {rng.choice(load().words['day'])}"
    if pick < 0.55:
        return f"on {date_of(rng)}"
    if pick < 0.7:
        return f"at {clock_of(rng)}"
    if pick < 0.8:
        return f"in {rng.choice(load().words['month'])}"
    return rng.choice(["yesterday", "last week", "this morning"] if past else ["tomorrow", "next week", "tonight"])


def where_of(rng: random.Random) -> str:
    """Where something is or was, with its preposition."""
    pick = rng.random()
    if pick < 0.4:
        return f"in {town(rng)}"
    if pick < 0.7:
        return f"at the {rng.choice(SHOPS) if rng.random() < 0.6 else noun(rng, 'place', False)}"
    return f"{rng.choice(['under', 'behind', 'near', 'beside', 'in front of'])} the {noun(rng, THINGS, False)}"


def with_whom(rng: random.Random) -> str:
    """Somebody who is there, too."""
    return full_person(rng) if rng.random() < 0.6 else f"my {rng.choice(RELATIONS.split())}"


@dataclass
class Remark:
    """What is said, and questions with their answers and what these must hold (at first the bare value)."""

    said: str
    asks: list[Pair] = field(default_factory=list)


FUTURE = ["will", "must", "have to", "want to", "be going to", "plan to", "would like to"]


def _event(rng: random.Random) -> Remark:
    """Somebody did or will do something; every part beside the verb can be asked for."""
    who, verb = somebody(rng), rng.choice(VERBS)
    past = rng.random() < 0.6
    what = thing(rng, rng.choice(["a", "a", "the", "my", "our", "this"]))
    if rng.random() < 0.15:
        what = f"{rng.randint(2, 60)} {word(rng, 'noun', False)}s"
    aux = "did"
    if past:
        done = verb.past
    else:
        lead = rng.choice(FUTURE)
        if lead in ("will", "must"):
            done, aux = f"{lead} {verb.base}", lead
        elif lead == "be going to":
            done, aux = f"{be(who)} going to {verb.base}", be(who)
        else:
            head, _, rest = lead.partition(" ")
            done, aux = f"{third(head) if who.third and head != 'would' else head} {rest} {verb.base}", do(who)
            aux = "would" if head == "would" else aux
    base = verb.base
    if not past and lead not in ("will", "must"):
        base = {"be going to": "going to", "would like to": "like to"}.get(lead, lead) + f" {verb.base}"
    makers: dict[str, Callable[[], str]] = {
        "when": lambda: day_of(rng, past),
        "where": lambda: where_of(rng),
        "whom": lambda: f"{rng.choice(['with', 'for'])} {with_whom(rng)}",
        "price": lambda: f"for {money(rng)} {rng.choice(['euros', 'dollars', 'pounds'])}",
    }
    kinds = rng.sample(list(makers), rng.choice([0, 1, 1, 1, 2, 2, 3]))
    extras = {kind: makers[kind]() for kind in kinds}
    front = extras.get("when") if rng.random() < 0.25 else None
    tail = " ".join(text for text in extras.values() if text != front)
    said = f"{front + ', ' if front else ''}{who.said} {done} {what} {tail}".strip()
    told = turned(f"{who.said} {done} {what}")
    asks: list[Pair] = []

    def put(question: str, answer: str, value: str) -> None:
        asks.append((sentence(question, "?"), sentence(answer), turned(value)))

    some = rng.choice(list(extras.values())) if extras and rng.random() < 0.4 else ""
    put(f"what {aux} {who.said} {base} {some}".strip(), f"{told} {turned(some)}".strip(), what.split(" ", 1)[1])
    if who.third:
        put(f"who {done} {what}", told, who.said.split(" ", 1)[1] if who.said.startswith("my ") else who.said)
    ask = f"{aux} {who.said} {base} {what}"
    for kind, text in extras.items():
        head, _, value = text.partition(" ")
        answer = f"{told} {turned(text)}"
        if kind == "when":
            lead = "at what time" if head == "at" else "in which month" if head == "in" else "on which day"
            put(
                f"{rng.choice(['when', lead if value and head in ('at', 'in', 'on') else 'when'])} {ask}",
                answer,
                value or text,
            )
        elif kind == "where":
            put(f"where {ask}", answer, value.split("the ")[-1])
        elif kind == "whom":
            put(rng.choice([f"who {ask} {head}", f"{head} whom {ask}"]), answer, value)
        else:
            put(rng.choice([f"for how much {ask}", f"for what price {ask}"]), answer, value.split(" ")[0])
    return Remark(sentence(said), asks)


@dataclass(frozen=True)
class Trait:
    """Something that can be told of a thing: its value, how it is said, and how it is asked; `{n}` is the thing."""

    make: Callable[[random.Random], object]
    says: list[str]
    asks: list[str]


def _many(rng: random.Random) -> str:
    return word(rng, "noun", False) + "s"


TRAITS = [
    Trait(
        lambda r: r.randint(2, 999),
        ["{n} is number {v}", "{n} has the number {v}", "the number of {n} is {v}"],
        ["which number is {n}", "what number does {n} have", "what is the number of {n}"],
    ),
    Trait(
        lambda r: r.choice(load().words["colour"]),
        ["{n} is {v}", "the colour of {n} is {v}", "they painted {n} {v}"],
        ["what colour is {n}", "what is the colour of {n}", "how did they paint {n}"],
    ),
    Trait(
        lambda r: person(r, False) if r.random() < 0.5 else invented(r).capitalize(),
        ["{n} is called {v}", "the name of {n} is {v}", "we named {n} {v}"],
        ["what is {n} called", "what is the name of {n}", "how did we name {n}"],
    ),
    Trait(
        lambda r: r.randint(1, 90),
        ["{n} is {v} years old", "{n} turned {v}", "the age of {n} is {v}"],
        ["how old is {n}", "what is the age of {n}", "which age did {n} reach"],
    ),
    Trait(
        money,
        ["{n} costs {v} euros", "the price of {n} is {v} euros", "{n} was {v} euros"],
        ["how much is {n}", "what does {n} cost", "what is the price of {n}"],
    ),
    Trait(
        lambda r: r.randint(2, 90),
        ["{n} weighs {v} kilos", "the weight of {n} is {v} kilos"],
        ["how heavy is {n}", "what does {n} weigh", "what is the weight of {n}"],
    ),
    Trait(
        lambda r: r.randint(2, 300),
        ["{n} is {v} metres long", "the length of {n} is {v} metres"],
        ["how long is {n}", "what is the length of {n}"],
    ),
    Trait(
        lambda r: where_of(r),
        ["{n} is {v}", "{n} stands {v}", "I put {n} {v}", "somebody left {n} {v}"],
        ["where is {n}", "where do I find {n}", "in which place is {n}"],
    ),
    Trait(
        lambda r: day_of(r, False),
        ["{n} is ready {v}", "{n} comes {v}", "I get {n} back {v}"],
        ["when do I get {n}", "when does {n} come", "when is {n} ready"],
    ),
    Trait(
        full_person,
        ["{n} belongs to {v}", "{v} lent me {n}", "{n} is from {v}", "{v} repairs {n}"],
        ["who has to do with {n}", "whose name goes with {n}", "which person did I name for {n}"],
    ),
    Trait(
        lambda r: code(r) if r.random() < 0.6 else invented(r),
        ["the code of {n} is {v}", "the password for {n} is {v}", "{n} opens with {v}"],
        ["what opens {n}", "what do I type for {n}", "how do I get into {n}"],
    ),
    Trait(
        lambda r: r.choice(load().words["material"]),
        ["{n} is made of {v}", "they made {n} from {v}"],
        ["what is {n} made of", "of which material is {n}"],
    ),
    Trait(
        lambda r: r.choice(BRANDS) if r.random() < 0.3 else organisation(r),
        ["{n} is made by {v}", "the maker of {n} is {v}", "I bought {n} from {v}"],
        ["who made {n}", "which company does {n} come from", "what is the maker of {n}"],
    ),
    Trait(titled, ["the title of {n} is {v}", "{n} bears the title {v}"], ["what is the title of {n}"]),
    Trait(
        lambda r: some_words(r, 3),
        ["the topic of {n} is {v}", "{n} is about {v}"],
        ["what is {n} about", "what is the topic of {n}"],
    ),
]


def _property(rng: random.Random) -> Remark:
    """One or two things that are told of something."""
    named = owned(rng)
    traits = rng.sample(TRAITS, rng.choice([1, 1, 2]))
    told, asks = [], []
    for at, trait in enumerate(traits):
        value = tidied(str(trait.make(rng)))
        form = rng.choice(trait.says)
        if at and not form.startswith("{n}"):
            form = next((f for f in trait.says if f.startswith("{n}")), form)
        said = form.replace("{v}", value)
        told.append(said.replace("{n}", named) if not at else said.replace("{n} ", "it ").replace("{n}", "it"))
        answer = turned(said.replace("{n}", named))
        bare = re.sub(r"^(on|at|in|in front of|under|behind|near|beside) (the )?", "", turned(value))
        for ask in trait.asks:
            asks.append((sentence(ask.replace("{n}", named), "?"), sentence(answer), bare))
    return Remark(sentence(rng.choice([" and ", ", ", ", and "]).join(told)), asks)


def _counted(rng: random.Random) -> Remark:
    """How many of something, or any named part with any value: what no list can tell."""
    named = owned(rng)
    if rng.random() < 0.5:
        parts, count = f"{word(rng, 'noun', False)}s", str(rng.randint(2, 99))
        said = rng.choice(
            ["{n} has {v} {p}", "there are {v} {p} in {n}", "I counted {v} {p} in {n}", "{n} holds {v} {p}"]
        )
        asks = ["how many {p} does {n} have", "how many {p} are in {n}", "what number of {p} does {n} have"]
    else:
        parts = word(rng, rng.choice(["noun", "param"]), False)
        count = rng.choice([code, lambda r: str(r.randint(2, 9999)), lambda r: invented(r), town, full_person])(rng)
        said = rng.choice(["the {p} of {n} is {v}", "{n} has the {p} {v}", "for {n} the {p} is {v}"])
        asks = ["what is the {p} of {n}", "which {p} does {n} have", "what did I say the {p} of {n} is"]
    fill = {"{n}": named, "{p}": parts, "{v}": count}

    def made(text: str) -> str:
        return re.sub(r"\{[npv]\}", lambda m: fill[m[0]], text)

    answer = sentence(turned(made(said)))
    return Remark(sentence(made(said)), [(sentence(made(ask), "?"), answer, count) for ask in asks])


LIFE: list[tuple[str, Callable[[random.Random], str], list[str]]] = [
    ("live in {v}", town, ["where {d} {s} live", "in which town {d} {s} live"]),
    (
        "work as a {v}",
        lambda r: r.choice(load().words["job"]),
        ["what {d} {s} do for a living", "what {d} {s} work as"],
    ),
    ("work for {v}", organisation, ["who {d} {s} work for", "for which company {d} {s} work"]),
    ("like {v}", lambda r: r.choice(load().words["food"]), ["what {d} {s} like", "what {d} {s} like to eat"]),
    ("collect {v}", _many, ["what {d} {s} collect"]),
    ("speak {v}", lambda r: r.choice(load().words["lang"]), ["which language {d} {s} speak"]),
    ("play the {v}", lambda r: r.choice(load().words["instrument"]), ["which instrument {d} {s} play"]),
    ("never eat {v}", lambda r: r.choice(load().words["food"]), ["what {d} {s} never eat"]),
    ("get up at {v}", clock_of, ["when {d} {s} get up", "at what time {d} {s} get up"]),
    (
        "have {v} at home",
        lambda r: f"{r.randint(2, 40)} {r.choice(load().words['fruit.pl'])}",
        ["what {d} {s} have at home"],
    ),
    ("come from {v}", town, ["where {d} {s} come from"]),
    ("drink {v} every day", lambda r: r.choice(load().words["drink"]), ["what {d} {s} drink every day"]),
    ("earn {v} euros", lambda r: str(r.randint(20, 9000)), ["how much {d} {s} earn"]),
    ("fear {v}", _many, ["what {d} {s} fear"]),
    (
        "need {v} for the trip",
        lambda r: f"a {r.choice(load().words['objadj'])} {word(r, 'noun', False)}",
        ["what {d} {s} need for the trip"],
    ),
]


def _life(rng: random.Random) -> Remark:
    """What somebody is used to; two persons in one sentence now and then."""
    out, asks = [], []
    base, make, forms = rng.choice(LIFE)
    people = [somebody(rng)] + ([somebody(rng)] if rng.random() < 0.35 else [])
    if len(people) == 2 and (people[0].said == people[1].said or not all(p.third for p in people)):
        people = people[:1]
    for at, who in enumerate(people):
        value = make(rng)
        if at and rng.random() < 0.5:
            base, make, forms = rng.choice(LIFE)
            value = make(rng)
        text = base.replace("{v}", value)
        if base.startswith("never"):
            text = f"never {third(text[6:]) if who.third else text[6:]}"
        elif who.third:
            text = third(text)
        out.append(f"{who.said} {text}")
        for form in forms:
            question = form.replace("{d}", do(who)).replace("{s}", who.said)
            asks.append((sentence(question, "?"), sentence(turned(f"{who.said} {text}")), value.removeprefix("a ")))
    return Remark(sentence(rng.choice([" and ", ", ", " but ", "; "]).join(out)), asks)


def composed_remark(rng: random.Random) -> Remark:
    """Any remark that the evaluation does not keep for itself."""
    while True:
        remark = rng.choices([_event, _property, _counted, _life], [38, 30, 14, 18])[0](rng)
        # A question that holds its own answer asks for nothing.
        asks = [
            (question, answer, whole(value))
            for question, answer, value in remark.asks
            if value.lower() not in turned(question).lower() and not is_remark(question)
        ]
        if asks and not is_remark(remark.said):
            return Remark(remark.said, asks)
