"""Stories with all that was asked for. Owns: requests with a clause as topic, names, a place, words, a number of
sentences and an ending, and stories that hold them. Knows no tokens.

Each thing asked for is told in a sentence near the start, or as the last one, in the words of the request.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from functools import lru_cache

import story_parts
from authored_data import fill, load
from grammar import expand, parse, tidy
from last_words import asked_last, last_words
from render import Case
from skill_chat import held_starts, person
from skill_facts import SLIPS, ask
from stories import cast, enriched, plural, slipped, slots_of
from topics import LIVING, noun, rows_cached, topic
from verbs import any_verb, being, deed, spot, thing, tidied
from vocabulary import crossed, invented


@dataclass
class Clause:
    """What happens in a story, as the request puts it and as the story tells it; \x05 parts subject and rest."""

    now: str
    then: str
    kind: str
    object: str
    must: list[str]
    names: list[str] = field(default_factory=list)

    def rest(self) -> str:
        """What is told behind the subject."""
        return self.then.split("\x05")[1]


def _act(rng: random.Random, what: str, many: bool) -> tuple[str, str]:
    """A verb with its object, now and then."""
    verb = any_verb(rng)
    if rng.random() < 0.15:
        lead, was = rng.choice(["wants want wanted", "tries try tried", "has have had"]).split(" ", 1)
        plain_, was = was.split(" ")
        return f"{plain_ if many else lead} to {verb.base} {what}", f"{was} to {verb.base} {what}"
    return f"{verb.base if many else verb.third} {what}", f"{verb.past} {what}"


def _called(rng: random.Random) -> str:
    """A name, more often than elsewhere one that no list has."""
    pick = rng.random()
    made = person(rng, False) if pick < 0.55 else (invented(rng) if pick < 0.8 else crossed(rng)).capitalize()
    return made if len(made) > 2 else person(rng, False)


def _subject(rng: random.Random, kind: str) -> tuple[str, list[str], bool]:
    """Who does it, the names in it, and whether they are many."""
    first = tidied(f"a {kind}")
    pick = rng.random()
    if pick < 0.68:
        return first, [], False
    a, b = _called(rng), _called(rng)
    if pick < 0.84 or a == b:
        return rng.choice([f"{first} {rng.choice(['called', 'named'])} {a}", f"{a} the {kind}", a]), [a], False
    if pick < 0.9:
        return tidied(f"{first} and a {being(rng)}"), [], True
    two = rng.choice(["two friends", f"two {plural(kind)}", "two children", "brother and sister", "the sisters"])
    forms = [f"{a} and {b}", f"{two}, {a} and {b},", f"{two} named {a} and {b}", f"{two} called {a} and {b}"]
    return rng.choice(forms), [a, b], True


def clause(rng: random.Random, alone: bool = False, held: bool = False) -> Clause:
    """Somebody does something, somewhere or with a second deed; `alone` leaves names and pairs out."""
    kind, what = being(rng, held), thing(rng, held=held)
    first, names, many = (tidied(f"a {kind}"), [], False) if alone else _subject(rng, kind)
    now, then = _act(rng, what, many)
    more = [what.split(" ")[-1]]
    pick = rng.random()
    if rng.random() < 0.3:
        # A deed of another form, alone or with the first one behind it.
        also, did, word_ = deed(rng, many, held)
        if pick < 0.5:
            link = rng.choice(["and", "but", "and then", "and also"])
            now, then = f"{also} {link} {now}", f"{did} {link} {then}"
            more.append(word_)
        else:
            now, then, more = also, did, [word_]
    elif pick < 0.35:
        where = spot(rng, held)
        now, then = f"{now} {where}", f"{then} {where}"
        more.append(where.split(" ")[-1])
    elif pick < 0.55:
        second = thing(rng, held=held)
        link = rng.choice(["and", "but", "and then", "so", "because"])
        pronoun = "" if link.startswith(("and", "but")) else " they" if many else " it"
        also, did = _act(rng, second, many)
        now, then = f"{now} {link}{pronoun} {also}", f"{then} {link}{pronoun} {did}"
        more.append(second.split(" ")[-1])
    elif pick < 0.65:
        other = tidied(f"a {being(rng, held)}")
        link = rng.choice(["for", "with", "of", "from"])
        now, then = f"{now} {link} {other}", f"{then} {link} {other}"
        more.append(other.split(" ")[-1])
    told = [] if names and kind not in first else [kind.split(" ")[-1]]
    return Clause(f"{first} \x05{now}", f"{first} \x05{then}", kind, what, [*more, *names, *told], names)


COUNTS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ENDINGS: list[tuple[list[str], list[str]]] = [
    (
        ["a happy ending", "that ends well", "with a good end", "it ends happily", "everybody is happy at the end"],
        [
            "In the end, everybody was happy.",
            "It all ended well, and they were happy.",
            "And so it had a happy ending.",
        ],
    ),
    (
        ["a sad ending", "that ends badly", "it ends sadly", "a sad end", "let it end in tears"],
        ["In the end, everybody was sad.", "It was a sad ending.", "And so it ended in tears."],
    ),
    (
        ["they become friends at the end", "it ends with a friendship", "let them be friends in the end"],
        ["In the end, they became friends.", "From that day on they were friends."],
    ),
    (
        ["everyone goes home at the end", "at the end they go home", "they all get home again"],
        ["In the end, they all went home.", "Then everyone went home."],
    ),
    (
        ["a surprise at the end", "a surprising ending", "the ending is a surprise"],
        ["And then came a surprise: it had all been a dream.", "What a surprise: nobody had expected that!"],
    ),
    (
        ["they fall asleep at the end", "it ends with sleep", "the hero falls asleep in the end"],
        ["In the end, everybody fell asleep.", "Then they fell asleep."],
    ),
]
LAST = ["In the end, [c].", "At last [c].", "Finally, [c].", "And in the end [c]."]
ASK_LAST = [
    "in the end, [c]",
    "at the end [c]",
    "it ends when [c]",
    "finally [c]",
    "the ending: [c]",
    "it ends with how [c]",
]

QUOTES = [
    "and it never rained again",
    "that was the last [w]",
    "nobody saw the [w] again",
    "I told you so, said the [w]",
]
QUOTES += ["good night, little [w]", "the [w] was [w] at last", "and so ended the day of the [w]", "never trust a [w]"]
ASK_QUOTE = ["it ends with '[q]'", 'end it with "[q]"', "the last sentence is '[q]'", 'the last words are "[q]"']
ASK_QUOTE += ["close with the words '[q]'", 'finish with "[q]"', "that ends with '[q]'"]
HELD_HEADS = ["Our teacher asks for [a] [s].", "Surprise me by [a] [s]."]

DO = ["Write", "Tell", "Tell me", "Write me", "Make up", "Give me", "I want", "I need", "I'd like", "Can you write"]
DO += ["Could you tell me", "Please write", "Please tell me", "Compose", "Invent", "Think up", "Let me read", "We need"]
DO += ["Would you write", "My kids want", "Create", "", "", "Can you make up", "Do", "Now write", "Tell us"]
LOOKS = [
    "",
    "",
    "",
    "short",
    "little",
    "very short",
    "bedtime",
    "nice",
    "funny",
    "tiny",
    "small",
    "children's",
    "brief",
]
SORTS = ["story", "story", "story", "story", "tale", "fairy tale", "fable"]
WHERE = ["where [c]", "in which [c]", "about how [c]", "where [c]", "in which [c]", ": [c]", "when [c]", "about [w]"]
WHERE += [
    ". In it, [c]",
    "about the time [c]",
    "that tells how [c]",
    "about [w]",
    "- [c]",
    "about what happens when [c]",
]
WHERE += [". What happens: [c]", "of [w]", "with [w]", "on [w]", "about [w]", ". It is about [w]", ". Plot: [c]"]


def _named(rng: random.Random, name: str, kind: str) -> str:
    forms = ["the hero is called [n]", "the [k] is named [n]", "the [k]'s name is [n]", "call the [k] [n]"]
    forms += ["name the [k] [n]", "the main character is [n]", "[n] is the name of the [k]", "the [k] is [n]"]
    forms += [
        "hero: [n]",
        "name of the hero: [n]",
        "the hero is [n]",
        "its name is [n]",
        "there is somebody called [n]",
    ]
    forms += ["its hero is [n]", "use the name [n]", "with [n] as the hero", "the [k] should be called [n]"]
    return rng.choice(forms).replace("[n]", name).replace("[k]", kind)


def _placed(rng: random.Random, where: str) -> str:
    forms = ["it takes place [w]", "it happens [w]", "it is set [w]", "set [w]", "let it play [w]", "the place is [w]"]
    forms += ["place: [w]", "where: [w]", "the scene is [w]", "make it happen [w]", "somewhere [w]"]
    forms += ["all of it happens [w]", "it should be set [w]", "it plays [w]", "setting: [w]", "[w]"]
    return rng.choice(forms).replace("[w]", where)


def _counted(rng: random.Random, count: int) -> str:
    number = COUNTS[count - 1] if rng.random() < 0.6 else str(count)
    noun_ = "sentence" if count == 1 else "sentences"
    forms = ["in [n] [s]", "in exactly [n] [s]", "[n] [s] only", "use [n] [s]", "[n] [s] long", "just [n] [s]"]
    forms += ["it should have [n] [s]", "no more than [n] [s]", "of [n] [s]", "with [n] [s]", "length: [n] [s]"]
    forms += ["make it [n] [s]", "[n] [s]", "it must be [n] [s] long", "tell it in [n] [s]"]
    return rng.choice(forms).replace("[n]", number).replace("[s]", noun_)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _worded(rng: random.Random, words: list[str]) -> str:
    forms = ["use the words [w]", "it should have [w] in it", "with the words [w]", "[w] must be in it", "put in [w]"]
    forms += [
        "don't forget [w]",
        "[w] too",
        "also [w]",
        "there must be [w]",
        "I want [w] in it",
        "with [w]",
        "using [w]",
    ]
    forms += ["mention [w]", "include [w]", "it must mention [w]", "it should contain [w]", "bring in [w]"]
    text = rng.choice(forms)
    if "words" in text and rng.random() < 0.4:
        words = [f'"{w}"' for w in words]
    return text.replace("[w]", _listed(words)).replace("words", "word" if len(words) == 1 else "words")


JOINTS = [". ", ". ", ", ", "; ", " and "]


def _request(rng: random.Random, head: str, extras: list[str]) -> str:
    """The order with all that is asked for, in any order and with any joints."""
    rng.shuffle(extras)
    text = head
    if extras and rng.random() < 0.12:
        text = f"{extras[0][0].upper()}{extras[0][1:]}. {head}"
        extras = extras[1:]
    for extra in extras:
        joint = rng.choice(JOINTS)
        if extra.startswith(("in ", "of ", "with ", "set ", "at ", "near ")) and rng.random() < 0.5:
            joint = " "
        text += joint + (extra[0].upper() + extra[1:] if joint == ". " else extra)
    return text + rng.choice([".", ".", "", ", please.", "!"])


def _head(rng: random.Random, c: Clause | None, about: str, count: int, held: bool) -> tuple[str, bool]:
    """The order with its topic; whether it tells the number of sentences."""
    do, look = rng.choice(DO), rng.choice(LOOKS)
    tells = count > 0 and rng.random() < 0.2
    if tells:
        look = (COUNTS[count - 1] if rng.random() < 0.5 else str(count)) + "-sentence"
    article = "a"
    core = tidied(f"{article} {look} {rng.choice(SORTS)}".replace("  ", " "))
    said = rng.choice(WHERE if c else [w for w in WHERE if "[w]" in w])
    if c:
        first, deed = c.now.split(" \x05")
        bare = (c.names and first == c.names[0]) or first.startswith("the ") or " the " in first
        relative = ", who " if bare and len(c.names) < 2 else " who " if rng.random() < 0.8 or c.names else " that "
        whole = f"{first}{relative}{deed}"
        said = said.replace("[c]", c.now.replace("\x05", "")).replace("[w]", whole)
    said = said.replace("[w]", about)
    text = f"{do} {core}{'' if said[0] in '.:' else ' '}{said}".strip()
    if held:
        said = said if said[0] not in ".:-" else f"about {whole if c else about}"
        text = rng.choice(HELD_HEADS).replace("[a]", core).replace("[s]", said).rstrip(".")
    text = text[0].upper() + text[1:]
    return (text, tells) if held or not text.startswith(held_starts()) else _head(rng, c, about, count, held)


START = ["One [weather.adj] day, [s] [r].", "One [weather.adj] morning [s] [r].", "Once upon a time, [s] [r]."]
START += [
    "Long ago, [s] [r].",
    "It was [month] when [s] [r].",
    "This is how [s] [r].",
    "It began when [s] [r].",
    "[S] [r].",
]
NAMED = ["There was once [a] called [n], who [r].", "[n] was [a] who [r].", "One day, [a] named [n] [r]."]
NAMED += ["Once upon a time, [a] called [n] [r].", "[n], [a], [r].", "This is the story of [n], [a] who [r]."]
SETTING = [
    "It all happened [w].",
    "This was [w].",
    "All this took place [w].",
    "[H] was [w] that day.",
    "They were [w].",
]
WITH = ["There was also [w].", "Not far away there was [w].", "[H] thought of [w].", "Nobody had seen [w] before."]
MADE = 0.75
"""Share of the training stories whose middle is a plot that is put together."""
PAUSE = re.compile(r"[.!?][\"”]? |\n")


def _middle(rng: random.Random, who: dict[str, str], count: int, held: bool) -> list[str]:
    """So many sentences of one plot in their order, with fillers between when there are too few."""
    data = load()
    slot = slots_of(rng, who)
    if not held and rng.random() < MADE:
        # The plot is about the thing that was asked for, not one that goes with any request.
        slot = slots_of(rng, who | story_parts.dressed(rng, who, slot, frozenset(("thing", "kind"))))
        plot = story_parts.beats(rng)
    else:
        plot = rng.choice(data.plots)["beats"][1:]
    picked = sorted(rng.sample(range(len(plot)), min(count, len(plot))))
    lines: list[str] = []
    used: set[str] = set()

    def one(pool: list[str]) -> str:
        for _ in range(8):
            template = rng.choice(pool)
            text = tidy(expand(parse(enriched(template)), rng, slot))
            if template not in used and not PAUSE.search(text) and text.count('"') % 2 == 0:
                used.add(template)
                return text
        return ""

    for index in picked:
        lines.append(one(plot[index]))
    lines = [line for line in lines if line]
    while len(lines) < count:
        filler = one(data.pools[rng.choice(["note", "mid"])])
        if filler:
            lines.insert(rng.randint(0, len(lines)), filler)
    return lines


def _opening(rng: random.Random, c: Clause | None, about: str, name: str, kind: str) -> str:
    if not c:
        leads = ["This is a story about [t].", "Once there was [t].", "Listen to the story of [t]."]
        still = about.startswith(("a ", "an ", "the ", "one ")) and not re.search(" (who|that) ", about)
        lead = rng.choice(leads) if still else leads[0]
        if name and rng.random() < 0.5:
            return lead.replace("[t]", about)[:-1] + f" and {name}."
        return lead.replace("[t]", about)
    first = c.then.split(" \x05")[0]
    values = {"s": first, "S": first[0].upper() + first[1:], "a": first, "n": name, "r": c.rest()}
    return tidy(fill(rng.choice(NAMED if name else START), rng, values))


@lru_cache(maxsize=1)
def _again() -> list[str]:
    """Sentences that come back to a thing and need nobody but the hero."""
    row = next(row for row in rows_cached() if row["role"] == "again")
    return [text for text in row["train"] if "[F]" not in text and "[He]" not in text]


def _ended(rng: random.Random, c: Clause | None, name: str, kind: str, held: bool) -> tuple[str, str, str]:
    """How a story is to end, if that is asked for: the wish, the last sentence, and what must stand in it."""
    if not held and rng.random() < 0.14:
        quote = last_words(rng)
        return asked_last(rng, quote), quote, quote[:-1]
    if rng.random() < 0.08:
        quote = re.sub(r"\[w\]", lambda _: noun(rng, LIVING, held), rng.choice(QUOTES))
        quote = quote[0].upper() + quote[1:] + "."
        return rng.choice(ASK_QUOTE).replace("[q]", quote if rng.random() < 0.6 else quote[:-1]), quote, quote[:-1]
    if rng.random() >= 0.34:
        return "", "", ""
    ends = clause(rng, alone=True, held=held) if c and rng.random() < 0.5 else None
    if not ends:
        asks, tells = rng.choice(ENDINGS)
        return rng.choice(asks), rng.choice(tells), ""
    hero = c.names[0] if c and len(c.names) == 1 else name if name and rng.random() < 0.6 else f"the {kind}"
    subject = hero if c and len(c.names) < 2 and rng.random() < 0.7 else ends.then.split(" \x05")[0]
    now = ends.now.split("\x05")[1]
    wish = rng.choice(ASK_LAST).replace("[c]", f"{subject} {now}")
    return wish, rng.choice(LAST).replace("[c]", f"{subject} {ends.rest()}"), ends.must[0]


def asked_story(rng: random.Random, held: bool = False) -> Case:
    """A story on a clause, or on nouns, with up to four things more that were asked for."""
    c = clause(rng, held=held) if rng.random() < 0.75 else None
    about = topic(rng, held) if not c else None
    while about and ". " in about.phrase:
        # A topic of two sentences would be two of those that are counted.
        about = topic(rng, held)
    phrase = about.phrase if about else ""
    given = bool(c.names if c else about and "N" in about.cast)
    name = _called(rng) if rng.random() < 0.45 and not given else ""
    kind = c.kind if c else (about.cast.get("kind", "") if about else "") or noun(rng, LIVING, held)
    count = rng.randint(1 if c else 2, 8) if rng.random() < 0.4 else 0
    extras: list[str] = []
    lines: list[str] = [_opening(rng, c, phrase, name, kind)]
    must: list[str] = list(c.must if c else about.must if about else ())
    who = cast(rng, kind, called=name)
    if c:
        who |= dict(zip(("N", "F"), c.names, strict=False))
        who["Fc"] = who["F"]
        bare = c.object.split(" ", 1)[1]
        # Without a name the hero is told by kind: no name comes from nowhere.
        who |= {} if name or c.names else {"N": f"the {kind}"}
        who |= {"thing": bare, "obj": bare, "obj.a": c.object, "obj.the": f"the {bare}"}
    elif about:
        who |= about.cast
    if name:
        must.append(name)
        shown = kind if c or (about and "kind" in about.cast) else "hero"
        extras.append(_named(rng, name, shown.split(" ")[-1]))
        if not c and name not in lines[0]:
            lines.append(f"The {shown} was called {name}.")
    room = count - len(lines) if count else 9
    if rng.random() < 0.33 and room > 1:
        where = spot(rng, held) if rng.random() < 0.7 else f"in {rng.choice(load().countries)['capital'].split(',')[0]}"
        extras.append(_placed(rng, where))
        must.append(where.split(" ", 1)[1])
        told = tidy(rng.choice(SETTING).replace("[w]", where).replace("[H]", who["N"]))
        lines.insert(rng.randint(0 if told.startswith("It all") else 1, len(lines)), told)
        room -= 1
    apart: list[str] = []
    if rng.random() < 0.24 and room > 1:
        words = [thing(rng, rng.choice(["a", "the"]), held) for _ in range(rng.choice([1, 1, 2, 3]))]
        bare = rng.random() < 0.5
        extras.append(_worded(rng, [w.split(" ", 1)[1] for w in words] if bare else words))
        must += [w.split(" ", 1)[1] for w in words]
        alone = not count and rng.random() < 0.5
        told_words = [[w] for w in words] if alone else [words]
        forms = rng.sample(WITH, len(told_words))
        pairs = zip(forms, told_words, strict=True)
        said = [tidy(form.replace("[w]", _listed(w)).replace("[H]", who["N"])) for form, w in pairs]
        lines.append(said[0])
        apart = list(dict.fromkeys(said[1:]))
        room -= 1
    asks, last, said_last = _ended(rng, c, name, kind, held) if room > 0 else ("", "", "")
    if last:
        extras.append(asks)
        must += [said_last] if said_last else []
        room -= 1
    head, told_count = _head(rng, c, phrase, count, held)
    if count and not told_count:
        extras.append(_counted(rng, count))
    user = _request(rng, head, extras)
    middle = max(0, room) if count else rng.randint(4, 8)
    lines += _middle(rng, who, middle, held)
    for line in apart:
        lines.insert(rng.randint(1, len(lines)), line)
    if c and not count and len(lines) > 3 and c.object.split(" ")[-1] in c.must and rng.random() < 0.4:
        # Farther on, the story comes back to what was asked for.
        values = {"w": c.object.split(" ", 1)[1], "H": who["N"]}
        lines.insert(rng.randint(3, len(lines)), tidy(fill(rng.choice(_again()), rng, values)))
    text = " ".join([*lines, last] if last else lines)
    if not held and not count and rng.random() < SLIPS:
        text = slipped(rng, text)
    user = user.lower() if rng.random() < 0.07 else user
    check = "".join(rf"(?=[\s\S]*{re.escape(w)})" for w in must)
    return ask(user, text, "story_asked", check, check="story", tag=str(count))
