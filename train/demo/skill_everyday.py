"""Small everyday questions. Owns: calendar, letters, numbers, kinds of things, greetings. Knows no tokens.

Every answer is computed or stands in a table here; questions are put together from parts.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache

from authored_data import fill, load, rows
from render import Case
from skill_chat import held_starts
from skill_facts import ask

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October"]
MONTHS += ["November", "December"]
ORDER = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh"]
ORDER += ["twelfth"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SEASON = ["winter", "winter", "spring", "spring", "spring", "summer", "summer", "summer", "autumn", "autumn", "autumn"]
SEASON += ["winter"]
LENGTH = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
SMALL = "zero one two three four five six seven eight nine ten eleven twelve"
TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
TIES = "twenty thirty forty fifty sixty seventy eighty ninety"
DIGITS, TENS = f"{SMALL} {TEENS}".split(), TIES.split()


def in_words(n: int) -> str:
    """A number up to 100 in words."""
    if n < 20:
        return DIGITS[n]
    if n == 100:
        return "one hundred"
    return TENS[n // 10 - 2] + ("-" + DIGITS[n % 10] if n % 10 else "")


def calendar(rng: random.Random) -> Case:
    """The day or month before, after, or so many places on."""
    days = rng.random() < 0.55
    row, kind = (DAYS, "day") if days else (MONTHS, "month")
    at = rng.randrange(len(row))
    here, after, before = row[at], row[(at + 1) % len(row)], row[at - 1]
    pick = rng.random()
    if pick < 0.34:
        q = "{{What|Which} {k}{w} {comes|is|follows}{ right| directly|} after {x}|After {x} comes which {k}|What comes {after|next after} {x}|{k} after {x}|{Name|Tell me|Say} the {k} {after|that follows} {x}|Which {k} follows {x}}"  # noqa: E501
        return ask(_q(rng, q, kind, here), f"{after} comes after {here}.", "everyday", f"^{after}")
    if pick < 0.62:
        q = "{{What|Which} {k}{w} {comes|is|was}{ right| directly|} before {x}|Before {x} comes which {k}|What comes before {x}|{k} before {x}|{Name|Tell me|Say} the {k} before {x}|Which {k} precedes {x}}"  # noqa: E501
        return ask(_q(rng, q, kind, here), f"{before} comes before {here}.", "everyday", f"^{before}")
    if days:
        if pick < 0.82:
            shift, word = rng.choice([(1, "tomorrow"), (-1, "yesterday"), (2, "the day after tomorrow")])
            q = "{If today is {x}, {what|which} day {t} w|Today is {x}. {What|Which} day {t} w|It is {x} today. {What|Which} day {t} w}"  # noqa: E501
            be = "was" if shift < 0 else rng.choice(["is", "will be"])
            text = re.sub(r" w$", "", _fill(rng, q, x=here, t=f"{be} {word}"))
            there = row[(at + shift) % 7]
            return ask(text + "?", f"{word.capitalize()} {'was' if shift < 0 else 'is'} {there}.", "everyday", there)
        if pick < 0.92:
            end = here in ("Saturday", "Sunday")
            q = _fill(
                rng,
                "{Is {x} {a weekend day|part of the weekend|on the weekend}|Does {x} belong to the weekend}?",
                x=here,
            )
            answer = f"Yes, {here} is part of the weekend." if end else f"No, {here} is a weekday."
            return ask(q, answer, "everyday", f"^{answer[:2]}")
        q = "{{Name|List|Tell me|Say|Give me} {the|all} {seven |}days of the week{.|, please.|}|What are the days of the week?}"  # noqa: E501
        return ask(_fill(rng, q), ", ".join(DAYS) + ".", "everyday", ", ".join(DAYS))
    if pick < 0.72:
        q = "{{What|Which} is the {o} month{ of the year|}|{What|Which} month {is number {n}|comes {o}}|{Name|Tell me|Say} the {o} month of the year}"  # noqa: E501
        text = _fill(rng, q, o=ORDER[at], n=str(at + 1)) + "?"
        return ask(text, f"The {ORDER[at]} month is {here}.", "everyday", here)
    if pick < 0.8:
        q = "{How many days {does {x} have|are there in {x}|has {x}}|{x} has how many days|What number of days does {x} have}?"  # noqa: E501
        return ask(_fill(rng, q, x=here), f"{here} has {LENGTH[at]} days.", "everyday", f" {LENGTH[at]} ")
    if pick < 0.9:
        q = "{In which season is {x}|{What|Which} season is {x} in|Is {x} in {summer|winter} or which season}?"
        return ask(_fill(rng, q, x=here), f"{here} is in {SEASON[at]}.", "everyday", SEASON[at])
    q = "{{Name|List|Tell me|Say|Give me} {the|all} {twelve |}months{ of the year|}{.|, please.|}|What are the months of the year?}"  # noqa: E501
    return ask(_fill(rng, q), ", ".join(MONTHS) + ".", "everyday", ", ".join(MONTHS))


def _fill(rng: random.Random, template: str, **values: str) -> str:
    """A template in which `{x}` of a given name is its value, and other braces are choices.

    The values fill slots: a template that is parsed is kept, so it may hold no value.
    """
    text = template
    for name in values:
        text = text.replace("{" + name + "}", f"[{name}]")
    return fill(text, rng, values)


def _q(rng: random.Random, template: str, kind: str, here: str) -> str:
    text = _fill(rng, template, k=kind, x=here, w=rng.choice(["", " of the week" if kind == "day" else " of the year"]))
    return (text[0].upper() + text[1:] if rng.random() < 0.8 else text) + rng.choice(["?", "?", "?", ""])


def _word(rng: random.Random) -> str:
    w = load().words
    pool = w[rng.choice(["animal", "fruit", "thing", "colour", "noun", "job", "tree", "instrument"])]
    while True:
        word = rng.choice(pool)
        if word.isalpha() and word.islower() and len(word) < 10:
            return word


def quoted(rng: random.Random, word: str) -> str:
    """A word as people name it."""
    return rng.choice([word, word, f"'{word}'", f'"{word}"', f"the word {word}", f'the word "{word}"'])


def spelling(rng: random.Random) -> Case:
    """Letters of a word, or of the alphabet."""
    word = _word(rng) if rng.random() < 0.8 else rng.choice(load().words["name"])
    x, low = quoted(rng, word), word.lower()
    pick = rng.random()
    if pick < 0.28:
        first = rng.random() < 0.55
        o = "first" if first else "last"
        start = rng.choice(["start", "begin"]) if first else "end"
        q = "{What is the {o} letter {of|in} {x}|What's the {o} letter of {x}|Which letter {does {x} {s} with|is {o} in {x}|comes {o} in {x}}|{Tell me|Give me|Name} the {o} letter of {x}|{o} letter of {x}|{x} {s}s with which letter|What letter does {x} {s} with}"  # noqa: E501
        letter = low[0 if first else -1]
        text = _fill(rng, q, o=o, s=start, x=x)
        answer = f"The {o} letter of {word} is {letter}."
        return ask(_cap(rng, text) + rng.choice(["?", "?", ""]), answer, "everyday", f"is {letter}")
    if pick < 0.45:
        q = "{How do {you|I|we} spell {x}|{Can|Could} you spell {x}|Spell {x}|Please spell {x}|Spell {x} for me|What is the spelling of {x}|Spell out {x}|How is {x} spelled|Write {x} letter by letter}"  # noqa: E501
        return ask(_cap(rng, _fill(rng, q, x=x)) + "?.!"[rng.randrange(3)], "-".join(low), "everyday", "-".join(low))
    if pick < 0.62:
        q = "{How many letters {are in|are there in|does} {x}|Count the letters {in|of} {x}|What is the number of letters in {x}|How long is {x} in letters}"  # noqa: E501
        text = _fill(rng, q, x=x)
        text = re.sub(r"^(How many letters) does (.*)$", r"\1 does \2 have", text)
        answer = f"{'-'.join(low)}: {word} has {len(word)} letters."
        return ask(_cap(rng, text) + "?", answer, "everyday", f" {len(word)} letters")
    at = rng.randrange(26)
    if pick < 0.85:
        after = rng.random() < 0.6
        there = LETTERS[(at + (1 if after else -1)) % 26]
        if (at, after) in ((25, True), (0, False)):
            at, there = 11, "m" if after else "k"
        here, side = LETTERS[at].upper(), "after" if after else "before"
        q = "{{What|Which} letter {comes|is}{ right|} {s} {x}{ in the alphabet|}|In the alphabet, what comes {s} {x}|{Name|Tell me} the letter {s} {x}|letter {s} {x}}"  # noqa: E501
        return ask(
            _fill(rng, q, s=side, x=here) + "?",
            f"{there.upper()} comes {side} {here}.",
            "everyday",
            f"^{there.upper()}",
        )
    n = rng.randint(1, 5)
    letter = (low + low)[:n][-1] if n <= len(low) else low[0]
    n = min(n, len(low)) if n <= len(low) else 1
    q = "{What is|Tell me|Give me} the {o} letter of {x}"
    answer = f"The {ORDER[n - 1]} letter of {word} is {letter}."
    return ask(_fill(rng, q, o=ORDER[n - 1], x=x) + "?", answer, "everyday", f"is {letter}")


def _cap(rng: random.Random, text: str) -> str:
    return text[0].upper() + text[1:] if rng.random() < 0.8 else text


def sorting(rng: random.Random) -> Case:
    """Three or four words or numbers in order, or the one at an end."""
    count = rng.choice([3, 3, 3, 4, 2, 5])
    mark = rng.choice([", ", ", ", " and ", " "])
    if rng.random() < 0.5:
        words = list(dict.fromkeys(_word(rng) for _ in range(count)))
        shown = mark.join(words) if mark != " and " else ", ".join(words[:-1]) + " and " + words[-1]
        if len(words) < 2:
            shown = words[0]
        if rng.random() < 0.7:
            q = "{Sort|Order|Put|Arrange|Alphabetize} {these words |these |the words |}{into|in} alphabetical order: {x}|{Put|Sort|Order} {x} {alphabetically|in alphabetical order|by the alphabet|from a to z}.|Sort {by letter|a to z}: {x}|{Can|Could} you {sort|order} {x} alphabetically?"  # noqa: E501
            q = "{" + q + "}"
            text = re.sub(
                r"Alphabetize (these words |these |the words |)(into|in) alphabetical order",
                "Alphabetize",
                _fill(rng, q, x=shown),
            )
            return ask(text, ", ".join(sorted(words)), "sort_words", re.escape(", ".join(sorted(words))))
        q = "{Which {word |}comes first {in the alphabet|alphabetically}|What comes first in alphabetical order}: {x}?"
        best = min(words)
        return ask(_fill(rng, q, x=shown.replace(" and ", " or ")), f"{best} comes first.", "everyday", f"^{best}")
    numbers = rng.sample(range(rng.choice([10, 100, 1000])), count)
    shown = (
        ", ".join(map(str, numbers))
        if rng.random() < 0.6
        else ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    )
    up = rng.random() < 0.65
    if rng.random() < 0.5:
        way = "{from {small|low|smallest|least} to {large|high|largest|big}|in {ascending|rising} order|in increasing order}"  # noqa: E501
        if not up:
            way = "{from {large|high|largest|big} to {small|low|smallest}|in {descending|falling} order}"
        elif rng.random() < 0.3:
            way = "{in order|by size|by value}"
        q = (
            "{{Sort|Order|Put|Arrange} {x} "
            + way
            + ".|{Sort|Order|Put|Arrange} {these numbers |these |}"
            + way
            + ": {x}}"
        )
        answer = ", ".join(map(str, sorted(numbers, reverse=not up)))
        return ask(_fill(rng, q, x=shown), answer, "sort_numbers", f"^{answer}")
    best = max(numbers) if up else min(numbers)
    word = rng.choice(["largest", "biggest", "highest", "greatest"] if up else ["smallest", "lowest", "least"])
    q = "{{What|Which} is the {w}{ number|}{ of|}: {x}|{What|Which} number is the {w}: {x}|Find the {w}{ number|} {of|in} {x}|{w} of {x}|Which of {x} is the {w}}"  # noqa: E501
    return ask(_cap(rng, _fill(rng, q, w=word, x=shown)) + "?", f"{best} is the {word}.", "everyday", f"^{best}")


def numbers(rng: random.Random) -> Case:
    """Comparing, even and odd, next and before, double and half, digits and words."""
    limit = rng.choice([10, 20, 100, 100, 1000])
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    b = b + 1 if a == b else b
    pick = rng.random()
    if pick < 0.2:
        more = rng.random() < 0.65
        word = rng.choice(["bigger", "larger", "greater", "higher", "more"] if more else ["smaller", "less", "lower"])
        q = "{{Which|What} {number |}is {w}{, |: |; }{a} or {b}|{a} or {b}{, which is {w}|: what is {w}|, which one is {w}}|Is {a} or {b} {w}|Which of the {numbers|two} {a} and {b} is {w}}"  # noqa: E501
        best, rest = (max(a, b), min(a, b)) if more else (min(a, b), max(a, b))
        than = {"more": "more than", "less": "less than"}.get(word, f"{word} than")
        return ask(
            _fill(rng, q, w=word, a=str(a), b=str(b)) + "?", f"{best} is {than} {rest}.", "everyday", f"^{best} "
        )
    if pick < 0.42:
        more = rng.random() < 0.5
        word = rng.choice(
            ["bigger than", "larger than", "greater than", "more than"] if more else ["smaller than", "less than"]
        )
        yes = (a > b) == more
        other = word if yes else ("less than" if more else "more than")
        text = _fill(
            rng,
            "{Is {a} {w} {b}|Would you say {a} is {w} {b}|{a} is {w} {b}, right|{a} is {w} {b}, true or false}",
            w=word,
            a=str(a),
            b=str(b),
        )
        answer = f"{'Yes' if yes else 'No'}, {a} is {other} {b}."
        if "true or false" in text:
            answer = f"{'True' if yes else 'False'}, {a} is {other} {b}."
        return ask(text + "?", answer, "everyday", f"^{answer.split(',')[0]}")
    if pick < 0.56:
        even = a % 2 == 0
        kind = "even" if even else "odd"
        q = rng.choice(
            ["Is {a} even or odd", "Is {a} odd or even", "Is {a} an even number", "Is {a} an odd number", "Is {a} even"]
        )
        answer = f"{a} is {kind}."
        if " or " not in q:
            answer = f"{'Yes' if kind in q else 'No'}, {answer}"
        return ask(q.replace("{a}", str(a)) + "?", answer, "everyday", re.escape(answer))
    if pick < 0.72:
        after = rng.random() < 0.65
        a = max(a, 1)
        there, side = (a + 1, "after") if after else (a - 1, "before")
        q = "{{What|Which} number {comes|is} {s} {a}|What comes {s} {a}|{Name|Tell me} the number {s} {a}|The number {s} {a} is}"  # noqa: E501
        return ask(_fill(rng, q, s=side, a=str(a)) + "?", f"{there} comes {side} {a}.", "everyday", f"^{there} ")
    if pick < 0.86:
        n = rng.randint(1, 60)
        twice = rng.random() < 0.5
        if twice:
            q = rng.choice(
                [
                    "What is double {a}",
                    "What is twice {a}",
                    "Double {a}",
                    "What is the double of {a}",
                    "What is two times {a}",
                ]
            )
            return ask(q.replace("{a}", str(n)) + "?", f"{n} * 2 = {2 * n}.", "everyday", f"= {2 * n}\\b")
        q = rng.choice(
            [
                "What is half of {a}",
                "Half of {a}",
                "What is the half of {a}",
                "How much is half of {a}",
                "What's half of {a}",
            ]
        )
        return ask(q.replace("{a}", str(2 * n)) + "?", f"{2 * n} / 2 = {n}.", "everyday", f"= {n}\\b")
    n = rng.randint(0, 100)
    if rng.random() < 0.5:
        q = "{{Write|Say|Spell|Give me} {n} {in words|as a word|in letters}|How do you {write|say} {n} in words|What is {n} in words}"  # noqa: E501
        return ask(_fill(rng, q, n=str(n)) + rng.choice([".", "?"]), in_words(n), "everyday", f"^{in_words(n)}")
    q = "{{Write|Give me} {n} {in digits|as a number|with digits}|How do you write {n} in digits|What is {n} as a number}"  # noqa: E501
    return ask(_fill(rng, q, n=in_words(n)) + rng.choice([".", "?"]), str(n), "everyday", f"^{n}$")


_KINDS = {
    "a fruit": "apple banana pear plum cherry peach lemon grape orange mango strawberry fig melon apricot",
    "a vegetable": "carrot potato onion cabbage cauliflower cucumber leek turnip bean pea",
    "an animal": "dog cat horse cow sheep goat fox wolf bear lion tiger rabbit mouse elephant monkey pig",
    "a bird": "owl crow swan duck eagle parrot robin sparrow penguin goose",
    "a fish": "shark salmon trout tuna cod herring carp pike",
    "an insect": "bee ant fly wasp beetle butterfly mosquito moth",
    "a tree": "oak pine willow birch maple elm fir",
    "a flower": "rose tulip daisy lily poppy violet sunflower",
    "a colour": "red blue green yellow purple pink black white brown grey",
    "a musical instrument": "piano violin drum flute guitar trumpet harp cello",
    "a piece of clothing": "shirt coat hat scarf dress jacket sock glove sweater",
    "a piece of furniture": "chair table bed sofa desk wardrobe stool bench",
    "a vehicle": "car bus train bicycle boat truck plane tram ship",
    "a drink": "water milk tea coffee juice lemonade cocoa",
    "a planet": "Mercury Venus Mars Jupiter Saturn Uranus Neptune",
    "a tool": "hammer saw drill screwdriver shovel rake",
    "a job": "baker teacher doctor farmer nurse pilot painter",
    "a season": "spring summer autumn winter",
}
KINDS = {kind: things.split() for kind, things in _KINDS.items()}
NEAR = {("a bird", "an animal"), ("a fish", "an animal"), ("an insect", "an animal")}
NEAR |= {("an animal", k) for k in ("a bird", "a fish", "an insect")} | {
    ("a fruit", "a colour"),
    ("a flower", "a colour"),
}
NEAR |= {("a colour", "a fruit"), ("a colour", "a flower")}
PLAIN = frozenset(("a colour", "a drink", "a planet", "a season"))


def kinds(rng: random.Random) -> Case:
    """What kind of thing something is: named, as yes or no, as a choice, or three examples of it."""
    kind = rng.choice(list(KINDS))
    thing = rng.choice(KINDS[kind])
    named = thing if kind in PLAIN else ("an " if thing[0] in "aeiou" else "a ") + thing
    other = rng.choice([k for k in KINDS if k != kind and (kind, k) not in NEAR])
    head = named[0].upper() + named[1:]
    pick = rng.random()
    if pick < 0.4:
        asked = kind if rng.random() < 0.5 else other
        q = _fill(
            rng,
            "{Is {x} {k}|Would you call {x} {k}|{h} is {k}, right|Is {x} really {k}|Can you say that {x} is {k}}",
            x=named,
            k=asked,
            h=head,
        )
        answer = f"{'Yes' if asked == kind else 'No'}, {named} is {kind}."
        return ask(_cap(rng, q) + rng.choice(["?", "?", ""]), answer, "everyday", f"^{answer[:2]}")
    if pick < 0.6:
        two = [kind, other]
        rng.shuffle(two)
        q = rng.choice(["Is {x} {a} or {b}?", "{h}: {a} or {b}?", "What is {x}, {a} or {b}?", "is {x} {a} or {b}"])
        q = q.replace("{x}", named).replace("{h}", head).replace("{a}", two[0]).replace("{b}", two[1])
        return ask(q, f"{head} is {kind}.", "everyday", f"is {re.escape(kind)}")
    if pick < 0.75:
        q = _fill(rng, "{What {kind|sort} of thing is {x}|What is {x}|Which kind of thing is {x}}?", x=named)
        return ask(q, f"{head} is {kind}.", "everyday", f"is {re.escape(kind)}")
    bare = kind.split(" ", 1)[1]
    if pick < 0.88:
        odd = rng.choice(KINDS[other])
        same = rng.sample(KINDS[kind], 3)
        row = [*same, odd]
        rng.shuffle(row)
        q = _fill(
            rng,
            "{Which {one |word |}does not {belong|fit}{ here|}|Find the odd one out|Which is the odd one out|What does not fit}: {x}?",  # noqa: E501
            x=", ".join(row),
        )
        return ask(q, f"{odd[0].upper() + odd[1:]} does not fit.", "everyday", f"(?i)^{odd}")
    some = ", ".join(KINDS[kind][:3])
    plural = {
        "a fish": "fish",
        "a piece of clothing": "pieces of clothing",
        "a piece of furniture": "pieces of furniture",
    }
    many = plural.get(kind, bare + "s")
    q = _fill(
        rng,
        "{{Name|Give me|Tell me|List|Say} three {m}|Can you name three {m}|Three {m}, please|I need three {m}}",
        m=many,
    )
    return ask(q + rng.choice([".", "?", ""]), some[0].upper() + some[1:] + ".", "everyday", some[1:])


def said(table: str, lang: str) -> list[tuple[str, str]]:
    """What users say with its answer, as templates: small facts or everyday remarks."""
    found = [r for r in rows("everyday.jsonl") if r["table"] == table and r["lang"] == lang]
    return [(r["user"], r["answer"]) for r in found]


FACTS = said("fact", "en")
SIZES = ["ant", "mouse", "cat", "dog", "sheep", "horse", "elephant", "whale"]
PAIRS = {"bigger": SIZES, "faster": ["snail", "turtle", "dog", "horse", "car", "plane"]}
PAIRS |= {
    "heavier": ["feather", "apple", "chair", "car", "ship"],
    "hotter": ["ice", "warm tea", "boiling water", "the sun"],
}
PLURALS = {"child": "children", "mouse": "mice", "foot": "feet", "tooth": "teeth", "goose": "geese", "man": "men"}
PLURALS |= {"woman": "women", "sheep": "sheep", "fish": "fish", "leaf": "leaves", "knife": "knives", "wolf": "wolves"}
REGULAR = "cat dog car book tree apple house chair bird king star river cloud"
PLURALS |= {w: w + "s" for w in REGULAR.split()}
PLURALS |= {"box": "boxes", "bus": "buses", "fox": "foxes", "city": "cities", "baby": "babies", "berry": "berries"}


def known(rng: random.Random) -> Case:
    """A small fact of the table, a comparison of two things, a plural or an opposite."""
    pick = rng.random()
    if pick < 0.5:
        question, answer = rng.choice(FACTS)
        text = _cap(rng, fill(question, rng, {})) + rng.choice(["?", "?", "?", ""])
        return ask(text, answer, "everyday", re.escape(answer))
    if pick < 0.66:
        word = rng.choice(list(PAIRS))
        row = PAIRS[word]
        low, high = sorted(rng.sample(range(len(row)), 2))
        best, rest = (_the(row[high]), _the(row[low]))
        two = [best, rest]
        rng.shuffle(two)
        q = "{{What|Which} is {w}{, |: |; }{a} or {b}|Is {a} {w} than {b}|{a} or {b}, which is {w}|Which one is {w}, {a} or {b}}"  # noqa: E501
        text = _fill(rng, q, w=word, a=two[0], b=two[1])
        answer = f"{best[0].upper() + best[1:]} is {word} than {rest}."
        if text.startswith("Is "):
            answer = f"{'Yes' if two[0] == best else 'No'}, {best} is {word} than {rest}."
        return ask(text[0].upper() + text[1:] + "?", answer, "everyday", re.escape(answer))
    if pick < 0.78:
        one = rng.choice(list(PLURALS))
        q = "{What is the plural of {x}|What's the plural of {x}|Plural of {x}|{Give|Tell} me the plural of {x}|One {x}, two what|What do you call more than one {x}}"  # noqa: E501
        return ask(
            _fill(rng, q, x=one) + rng.choice(["?", "?", ""]),
            f"The plural of {one} is {PLURALS[one]}.",
            "everyday",
            f"is {PLURALS[one]}",
        )
    a, b = rng.choice(load().pairs["opposite"])
    if b != "weightless" and rng.random() < 0.4:
        a, b = b, a
    x = quoted(rng, a)
    q = "{What is {the opposite of|opposite to} {x}|What's the opposite of {x}|opposite of {x}|{Give|Tell} me the opposite of {x}|What is the contrary of {x}|{x} is the opposite of what|The opposite of {x} is what|Name the opposite of {x}|What word is the opposite of {x}|What would be the opposite of {x}|Opposite: {x}}"  # noqa: E501
    return ask(
        _cap(rng, _fill(rng, q, x=x)) + rng.choice(["?", "?", ""]), f"The opposite of {a} is {b}.", "facts", rf"is {b}"
    )


def _the(thing: str) -> str:
    if thing in ("ice", "warm tea", "boiling water", "the sun"):
        return thing
    return ("an " if thing[0] in "aeiou" else "a ") + thing


TALK = said("talk", "en")


def talk(rng: random.Random) -> Case:
    """A greeting, thanks, a feeling or another everyday remark."""
    user, answer = rng.choice(TALK)
    text = fill("{" + user + "}", rng, {}).strip()
    text = _cap(rng, text)
    asks = re.match(r"(?i)(what|how|are|can|do|did|is|where|which|everything)\b", text)
    mark = rng.choice(["?", "?", ""] if asks else ["", ".", "!", "."])
    return ask(text + mark, fill(answer, rng, {}).strip(), "small_talk", "")


def _bare(text: str) -> str:
    return re.sub(r"[^a-z ]", "", text.lower()).strip()


@lru_cache(maxsize=1)
def held_talk() -> frozenset[str]:
    """The remarks that are kept for the evaluation."""
    return frozenset(_bare(h) for row in load().chat for h in row["held"])


def everyday(rng: random.Random) -> Case:
    """Any task of this module, never in a held-out wording."""
    make = rng.choice([calendar, spelling, sorting, numbers, kinds, known, known, talk, talk])
    while True:
        case = make(rng)
        user = case.messages[0]["content"]
        if user.startswith(held_starts()) or _bare(user) in held_talk():
            continue
        if rng.random() < 0.12 and make in (calendar, numbers, kinds, known, talk):
            case.messages[0] = {"role": "user", "content": user.lower().rstrip("?!.")}
        return case
