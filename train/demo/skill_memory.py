"""Everyday memory. Owns: what people tell of themselves and theirs, and the many ways to ask for it. Knows no tokens.

A thing told has statements, direct questions, clauses ("how old my sister is") and names ("my sister's age");
the wrappers around clauses and names are put together, so that few questions come twice.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from authored_data import fill, load
from render import Case
from skill_chat import held_starts, person, value_of

KIN = ["sister", "brother", "mother", "father", "wife", "husband", "son", "daughter", "cousin", "uncle", "aunt"]
KIN += ["mum", "dad", "mom", "grandmother", "grandfather", "niece", "nephew", "girlfriend", "boyfriend", "grandma"]
OTHERS = ["boss", "teacher", "neighbour", "friend", "best friend", "roommate", "coach", "doctor", "baby", "partner"]
OTHERS += ["colleague", "neighbor", "dentist", "flatmate", "landlord", "piano teacher", "pen friend", "classmate"]
PETS = ["dog", "cat", "hamster", "rabbit", "parrot", "horse", "goldfish", "turtle", "pony", "puppy", "kitten"]
PETS += ["canary", "guinea pig", "goat", "snake", "lizard", "donkey", "mouse", "pet", "hen", "duck", "budgie"]
NAMED = ["boat", "car", "doll", "band", "school", "street", "company", "team", "village", "shop", "robot", "bike"]
NAMED += ["teddy bear", "farm", "hotel", "cafe", "project", "club", "ship", "home town", "app", "tractor", "choir"]
OWNED = ["car", "bike", "house", "coat", "bag", "umbrella", "door", "sofa", "hat", "scarf", "kite", "phone", "bed"]
OWNED += ["boat", "tent", "cup", "dress", "shirt", "jacket", "backpack", "front door", "suitcase", "kitchen", "piano"]
LOST = ["keys", "glasses", "phone", "wallet", "book", "umbrella", "passport", "ticket", "ring", "hat", "gloves"]
LOST += ["watch", "bag", "letter", "camera", "map", "bike", "notebook", "medicine", "charger", "purse", "shoes"]
PLURAL = frozenset(("keys", "glasses", "gloves", "shoes"))
SPOTS = ["in the drawer", "on the table", "under the bed", "in the kitchen", "on the shelf", "behind the door"]
SPOTS += ["in the car", "in my bag", "next to the lamp", "in the blue box", "under the sofa", "on the piano"]
SPOTS += ["in the garage", "by the window", "on top of the fridge", "in the attic", "at work", "in the red cupboard"]
FAVOURITES = {
    "season": ["spring", "summer", "autumn", "winter"],
    "fruit": "fruit",
    "colour": "colour",
    "color": "colour",
    "food": "food",
    "drink": "drink",
    "animal": "animal",
    "sport": ["tennis", "football", "rugby", "hockey", "golf", "skiing", "swimming", "judo", "rowing", "chess"],
    "subject": ["history", "maths", "art", "music", "biology", "geography", "physics", "English", "chemistry"],
    "instrument": "instrument",
    "month": "month",
    "day": "day",
    "city": "city",
    "tree": "tree",
    "number": "num2",
    "ice cream": ["vanilla", "chocolate", "lemon", "strawberry", "mint", "mango", "pistachio", "hazelnut"],
    "hobby": "hobby",
    "dish": "food",
    "flower": ["roses", "tulips", "daisies", "lilies", "poppies", "violets", "sunflowers", "irises"],
}
PLANS = ["visit [n]", "buy a [thing]", "fly to [city]", "clean the kitchen", "paint the door", "bake [food]"]
PLANS += ["meet [n]", "see the dentist", "start a new job", "go swimming", "drive to [city]", "repair my bike"]
COUNTED = ["cats", "dogs", "sisters", "brothers", "children", "books", "plants", "cousins", "bikes", "hens", "cars"]
COUNTED += ["sons", "daughters", "fish", "horses", "guitars", "coats", "friends in [city]", "apple trees", "uncles"]
NUMBERED = ["room", "bus", "seat", "locker", "flat", "train", "gate", "table", "house", "shirt", "ticket", "platform"]


@dataclass(frozen=True)
class Told:
    """One thing that the user tells, with its ways to be asked for and the answer."""

    says: list[str]
    asks: list[str]
    clauses: list[str]
    names: list[str]
    answer: str
    value: str
    subject: str
    """Two things on the same subject do not come into one conversation."""


def _pick(rng: random.Random, listing: str | list[str]) -> str:
    if isinstance(listing, list):
        return rng.choice(listing)
    return str(rng.randint(2, 99)) if listing == "num2" else value_of(rng, listing, False)


def _a(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def called(rng: random.Random) -> Told:
    """A pet, a person or a thing with its name."""
    pick = rng.random()
    r = rng.choice(PETS if pick < 0.4 else KIN + OTHERS if pick < 0.8 else NAMED)
    n = person(rng, False)
    says = [f"My {r} is called {n}.", f"My {r}'s name is {n}.", f"The name of my {r} is {n}.", f"my {r} is named {n}"]
    if r in PETS:
        says += [f"I have {_a(r)} called {n}.", f"I have {_a(r)} named {n}.", f"We got {_a(r)}, {n}."]
        says += [
            f"We named our {r} {n}.",
            f"I own {_a(r)}, and its name is {n}.",
            f"We have {_a(r)}. It is called {n}.",
        ]
        says += [f"{n} is my {r}.", f"I just got a new {r}. I named it {n}.", f"This is my {r} {n}.", f"My {r} is {n}."]
    elif r in NAMED:
        says += [f"We named our {r} {n}.", f"The {r} I have is called {n}.", f"I call my {r} {n}."]
    else:
        says += [f"{n} is my {r}.", f"My {r} is {n}.", f"I have {_a(r)} named {n}.", f"This is {n}, my {r}."]
        says += [f"I have {_a(r)} called {n}.", f"My {r} goes by {n}."]
    asks = [f"What is my {r}'s name?", f"What's my {r}'s name?", f"What is my {r} called?", f"What's my {r} called?"]
    asks += [f"What is the name of my {r}?", f"what is my {r} called again", f"How is my {r} called?"]
    asks += [f"my {r}'s name?", f"Which name does my {r} have?", f"What did I call my {r}?"][: 4 if r in PETS else 2]
    asks += [] if r in PETS or r in NAMED else [f"Who is my {r}?", f"who's my {r}?"]
    clauses = [f"what my {r} is called", f"what my {r}'s name is", f"how my {r} is called"]
    names = [f"my {r}'s name", f"the name of my {r}"]
    if rng.random() < 0.2:
        asks = [f"What is {n}?"] if r in NAMED else [f"Who is {n}?", f"who's {n}?", f"Do you know who {n} is?"]
        return Told(says, asks, [], [], f"{n} is your {r}.", r, r)
    return Told(says, asks, clauses, names, f"Your {r} is called {n}.", n, r)


def aged(rng: random.Random) -> Told:
    """How old somebody is."""
    r, v = rng.choice([*KIN, *PETS[:10], *OTHERS[:6]]), str(rng.randint(2, 79))
    says = [
        f"My {r} is {v} years old.",
        f"My {r} is {v}.",
        f"my {r} turned {v} last week",
        f"I have {_a(r)} who is {v}.",
    ]
    says += [f"My {r} is {v} now.", f"My {v}-year-old {r} is here.", f"The age of my {r} is {v}."]
    asks = [f"How old is my {r}?", f"how old's my {r}?", f"What age is my {r}?", f"What is my {r}'s age?"]
    asks += [f"my {r} is how old?"]
    return Told(
        says,
        asks,
        [f"how old my {r} is", f"what age my {r} is"],
        [f"my {r}'s age", f"the age of my {r}"],
        f"Your {r} is {v} years old.",
        v,
        r + " age",
    )


def lives(rng: random.Random) -> Told:
    """Where somebody lives, or where the user comes from or has moved to."""
    c = value_of(rng, "city", False) if rng.random() < 0.6 else rng.choice(load().countries)["country"]
    pick = rng.random()
    if pick < 0.4:
        r = rng.choice(KIN + OTHERS)
        says = [f"My {r} lives in {c}.", f"My {r} is from {c}.", f"I have {_a(r)} in {c}.", f"My {r} moved to {c}."]
        asks = [f"Where does my {r} live?", f"In which city or country does my {r} live?", f"Where is my {r}'s home?"]
        asks += [f"where's my {r} living?", f"Which place does my {r} live in?"]
        return Told(
            [says[0], rng.choice(says)],
            asks,
            [f"where my {r} lives"],
            [f"my {r}'s home", f"the home of my {r}"],
            f"Your {r} lives in {c}.",
            c,
            r + " home",
        )
    if pick < 0.7:
        says = [f"We moved to {c}.", f"I just moved to {c}.", f"Last year we moved to {c}.", f"I have moved to {c}."]
        says += [f"My family moved to {c} in {rng.choice(load().words['month'])}."]
        asks = ["Where did I move?", "Where did we move to?", "which place did I move to?"]
        asks += ["Where do I live now?", "What city or country did I move to?"]
        return Told(says, asks, ["where I moved to", "where we moved"], [], f"You moved to {c}.", c, "home")
    says = [f"I'm from {c}.", f"I am from {c}.", f"I come from {c}.", f"I'm originally from {c}."]
    asks = ["Where am I from?", "Where do I come from?", "where'm I from", "Which place am I from?"]
    return Told(says, asks, ["where I am from", "where I come from"], [], f"You are from {c}.", c, "home")


def works(rng: random.Random) -> Told:
    """What somebody does for work or likes."""
    r = rng.choice([*KIN, *OTHERS])
    if rng.random() < 0.5:
        j = value_of(rng, "job", False)
        says = [f"My {r} is {_a(j)}.", f"My {r} works as {_a(j)}.", f"My {r} has a job as {_a(j)}."]
        asks = [f"What does my {r} do?", f"What is my {r}'s job?", f"What does my {r} do for work?"]
        asks += [f"What does my {r} work as?", f"what's my {r}'s job", f"Which job does my {r} have?"]
        clauses = [f"what my {r} does", f"what my {r}'s job is", f"what my {r} works as"]
        return Told(says, asks, clauses, [f"my {r}'s job"], f"Your {r} is {_a(j)}.", j, r + " job")
    h = value_of(rng, "hobby" if rng.random() < 0.6 else "food", False)
    says = [f"My {r} likes {h}.", f"My {r} loves {h}.", f"My {r} is fond of {h}."]
    asks = [f"What does my {r} like?", f"What does my {r} love?", f"What is my {r} fond of?", f"what does my {r} like?"]
    return Told(says, asks, [f"what my {r} likes"], [], f"Your {r} likes {h}.", h, r + " like")


def favourite(rng: random.Random) -> Told:
    """A favourite of any kind."""
    k = rng.choice(list(FAVOURITES))
    v = _pick(rng, FAVOURITES[k])
    f = rng.choice(["favourite", "favorite"])
    says = [f"My {f} {k} is {v}.", f"{v[0].upper() + v[1:]} is my {f} {k}.", f"my {f} {k} is {v}"]
    says += [f"The {k} I like best is {v}.", f"My best loved {k} is {v}.", f"For me the best {k} is {v}."]
    says += [f"I like {v} best of all. It is my {f} {k}."]
    asks = [f"What is my {f} {k}?", f"What's my {f} {k}?", f"Which {k} do I like best?", f"which {k} is my {f}?"]
    asks += [f"What {k} do I like most?", f"my {f} {k}?", f"Which {k} do I like the most?", f"What {k} do I prefer?"]
    clauses = [f"what my {f} {k} is", f"which {k} I like best", f"what {k} I like"]
    return Told(says, asks, clauses, [f"my {f} {k}"], f"Your favourite {k} is {v}.", v, "favourite " + k)


def coloured(rng: random.Random) -> Told:
    """The colour of something owned."""
    t, v = rng.choice(OWNED), rng.choice(load().words["colour"])
    says = [f"My {t} is {v}.", f"I have {_a(v)} {t}.", f"I bought {_a(v)} {t}.", f"The colour of my {t} is {v}."]
    says += [f"I own {_a(v)} {t}.", f"We painted our {t} {v}."][: 1 if t not in ("door", "house", "front door") else 2]
    c = rng.choice(["colour", "color"])
    asks = [f"What {c} is my {t}?", f"Which {c} is my {t}?", f"What is the {c} of my {t}?", f"my {t} is what {c}?"]
    asks += [f"What {c} does my {t} have?"]
    return Told(
        says,
        asks,
        [f"what {c} my {t} is", f"which {c} my {t} has"],
        [f"the {c} of my {t}"],
        f"Your {t} is {v}.",
        v,
        t + " colour",
    )


def placed(rng: random.Random) -> Told:
    """Where something was put."""
    t, v = rng.choice(LOST), rng.choice(SPOTS)
    be = "are" if t in PLURAL else "is"
    says = [f"My {t} {be} {v}.", f"I put my {t} {v}.", f"I left my {t} {v}.", f"I keep my {t} {v}.", f"my {t}: {v}"]
    asks = [f"Where {be} my {t}?", f"where did I put my {t}?", f"Where did I leave my {t}?", f"Where do I find my {t}?"]
    asks += [f"I cannot find my {t}. Where {be} {'they' if be == 'are' else 'it'}?", f"Where can my {t} be?"]
    said = v.replace("my ", "your ")
    clauses = [f"where my {t} {be}", f"where I put my {t}"]
    return Told(says, asks, clauses, [], f"Your {t} {be} {said}.", said, t)


def dated(rng: random.Random) -> Told:
    """A birthday, a meeting or a plan with its day."""
    w = load().words
    pick = rng.random()
    if pick < 0.4:
        r = rng.choice(["", "", *KIN])
        mine, yours = ("My birthday", "Your birthday") if not r else (f"My {r}'s birthday", f"Your {r}'s birthday")
        v = (
            f"in {rng.choice(w['month'])}"
            if rng.random() < 0.5
            else f"on {rng.randint(1, 28)} {rng.choice(w['month'])}"
        )
        low = mine[0].lower() + mine[1:]
        asks = [f"When is {low}?", f"when's {low}?", f"What day or month is {low}?", f"{low}, when is it?"]
        if not r:
            asks += ["When do I have my birthday?"]
        return Told([f"{mine} is {v}."], asks, [f"when {low} is"], [], f"{yours} is {v}.", v, low)
    if pick < 0.7:
        e = rng.choice(
            ["meeting", "exam", "party", "flight", "piano lesson", "holiday", "appointment", "match", "trip"]
        )
        v = f"on {rng.choice(w['day'])}" + rng.choice(["", "", f" at {rng.randint(7, 11)}"])
        asks = [f"When is my {e}?", f"When's my {e}?", f"On which day is my {e}?", f"What day is my {e}?"]
        says = [f"My {e} is {v}.", f"I have my {e} {v}.", f"The {e} is {v}."][: 2 if rng.random() < 0.9 else 3]
        return Told(says, asks, [f"when my {e} is"], [f"the day of my {e}"], f"Your {e} is {v}.", v, e)
    values = {"n": person(rng, False)}
    v = fill(rng.choice(PLANS), rng, values)
    t = rng.choice(["Tomorrow", "Today", "Tonight", "Next week", "On [day]", "This weekend", "In [month]"])
    t = fill(t, rng, {})
    low = t[0].lower() + t[1:]
    says = [f"{t} I will {v}.", f"I will {v} {low}.", f"{t} I am going to {v}.", f"I want to {v} {low}."]
    asks = [
        f"What will I do {low}?",
        f"What am I going to do {low}?",
        f"What is my plan {low}?",
        f"what do I do {low}?",
    ]
    yours = re.sub(r"\bmy\b", "your", v)
    return Told(says, asks, [f"what I will do {low}"], [], f"You will {yours} {low}.", yours, "plan")


def counted(rng: random.Random) -> Told:
    """How many of something the user has, or the number of something."""
    if rng.random() < 0.55:
        t = fill(rng.choice(COUNTED), rng, {})
        n = rng.randint(2, 12)
        v = rng.choice([str(n), ["two", "three", "four", "five", "six"][min(n, 6) - 2]])
        says = [f"I have {v} {t}.", f"I've got {v} {t}.", f"We have {v} {t}.", f"There are {v} {t} in my life."]
        asks = [f"How many {t} do I have?", f"how many {t} have I got?", f"What number of {t} do I have?"]
        return Told(says, asks, [f"how many {t} I have"], [f"the number of my {t}"], f"You have {v} {t}.", v, t)
    t, v = rng.choice(NUMBERED), str(rng.randint(1, 999))
    says = [
        f"My {t} number is {v}.",
        f"The number of my {t} is {v}.",
        f"My {t} has the number {v}.",
        f"My {t} is number {v}.",
    ]
    asks = [f"What is my {t} number?", f"What's my {t} number?", f"Which number does my {t} have?", f"my {t} number?"]
    names = [f"my {t} number", f"the number of my {t}"]
    return Told(says, asks, [f"what my {t} number is"], names, f"Your {t} number is {v}.", v, t + " number")


MAKERS = [called, called, called, aged, lives, lives, works, favourite, favourite, coloured, placed, dated, counted]

CLAUSE = ["Do you {know|remember|recall|still know|still remember} [c]?", "{Can|Could|Would} you {tell me|say} [c]?"]
CLAUSE += ["{Please |}{tell|remind} me [c].", "I {forgot|forget|do not remember|can't recall} [c].", "Any idea [c]?"]
CLAUSE += ["{So|And|Now}, [c]?", "Did I {tell|mention to} you [c]?", "Do you have in mind [c]?", "Quick: [c]?"]
NAME = ["What is [n]?", "What's [n]{ again|}?", "{Tell me|Say|Give me|Repeat} [n].", "What was [n]?", "And [n]?"]
NAME += ["Do you {know|remember} [n]?", "{Remind me of|I forgot} [n].", "{So what|What} is [n]{, please|}?", "[n]?"]
INTRO = ["", "", "", "", "Hi! ", "Hello. ", "By the way, ", "You know, ", "Just so you know: ", "Remember this: "]
INTRO += ["Listen. ", "Let me tell you something. ", "FYI, ", "Please remember: ", "A fact about me: ", "Guess what? "]
REPLY = ["Good to know. [y]", "I will remember that: [z]", "Got it. [y]", "Okay. [y]", "Thank you for telling me. [y]"]
REPLY += ["Nice! [y]", "All right. [y]", "I see. [y]", "Noted. [y]", "[y] I will remember that."]
PLAIN = ["Good to know.", "Okay, I will remember that.", "Got it.", "I see. Thank you for telling me.", "Noted."]
UNTOLD = "You have not told me that yet."


def question_of(rng: random.Random, told: Told) -> str:
    """One way to ask for it."""
    pick = rng.random()
    if told.clauses and pick < 0.3:
        text = fill(rng.choice(CLAUSE), rng, {"c": rng.choice(told.clauses)})
    elif told.names and pick < 0.5:
        text = fill(rng.choice(NAME), rng, {"n": rng.choice(told.names)})
    else:
        text = rng.choice(told.asks)
    text = text[0].upper() + text[1:] if rng.random() < 0.7 else text
    return rng.choice(told.asks) if text.startswith(held_starts()) else text


def said_of(rng: random.Random, told: Told) -> str:
    """One way to tell it, with or without an opening."""
    text, intro = rng.choice(told.says), rng.choice(INTRO)
    return intro + text if intro else text[0].upper() + text[1:] if rng.random() < 0.85 else text


def _reply(rng: random.Random, told: Told) -> str:
    low = told.answer[0].lower() + told.answer[1:] if told.answer.startswith("You") else told.answer
    form = rng.choice(PLAIN if rng.random() < 0.25 else REPLY)
    return form.replace("[y]", told.answer).replace("[z]", low)


def _and(rng: random.Random, text: str) -> str:
    return "And " + text[0].lower() + text[1:] if rng.random() < 0.6 and text[:2] != "I " else text


def everyday_memory(rng: random.Random) -> Case:
    """Things told in one breath or over several turns, then asked for; sometimes one that was not told."""
    if rng.random() < 0.02:
        return Case(
            suite="memory_everyday",
            messages=[
                {"role": "user", "content": rng.choice(rng.choice([called, aged, favourite])(rng).asks[:2])},
                {"role": "assistant", "content": UNTOLD},
            ],
            must=UNTOLD,
        )
    told: list[Told] = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4])):
        new = rng.choice(MAKERS)(rng)
        if not any(new.subject.split()[0] in t.subject or t.subject.split()[0] in new.subject for t in told):
            told.append(new)
    name = person(rng, False) if rng.random() < 0.3 else ""
    pick = rng.random()
    if pick < 0.45:
        # In one breath: all that is told, then the question.
        parts = [rng.choice(t.says) for t in told]
        parts = [p[0].upper() + p[1:] + ("" if p.endswith(".") else ".") for p in parts]
        if name:
            parts.insert(0, rng.choice([f"I'm {name}.", f"My name is {name}.", f"I am {name}.", f"Hi, I'm {name}!"]))
        target = rng.choice(told)
        asked, answer, value = question_of(rng, target), target.answer, target.value
        if name and rng.random() < 0.25:
            asked = rng.choice(["What is my name?", "What's my name?", "who am I?", "So what am I called?"])
            answer, value = f"Your name is {name}.", name
        text = rng.choice(["", "", "", "Hi! ", "Hello. "]) + " ".join(parts)
        text += rng.choice([" ", " ", "\n", " So: "]) + asked
        if rng.random() < 0.08 and answer.startswith("You"):
            # Typed without capitals: the value is copied as it was typed.
            text, answer, value = text.lower(), answer.replace(value, value.lower()), value.lower()
            told = [target]
        messages = [{"role": "user", "content": text}]
    else:
        messages = []
        if name:
            hello = rng.choice([f"I'm {name}.", f"Hi, my name is {name}.", f"I am {name}!", f"Hello, {name} here."])
            both = rng.random() < 0.4
            user = f"{hello} {said_of(rng, told[0])}" if both else hello
            reply = f"Nice to meet you, {name}!" + (f" {told[0].answer}" if both and rng.random() < 0.7 else "")
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
        for t in told[1 if name and both else 0 :]:
            messages.append({"role": "user", "content": said_of(rng, t)})
            messages.append({"role": "assistant", "content": _reply(rng, t)})
        if rng.random() < 0.25:
            from skill_everyday import everyday

            messages += [dict(m) for m in everyday(rng).messages[-2:]]
        target = rng.choice(told)
        asked, answer, value = question_of(rng, target), target.answer, target.value
        if name and rng.random() < 0.2:
            asked, answer, value = "What is my name?", f"Your name is {name}.", name
        if rng.random() < 0.06:
            other = rng.choice(MAKERS)(rng)
            words = set(re.findall(r"\w+", " ".join(m["content"] for m in messages).lower()))
            if not words & set(re.findall(r"\w+", other.subject)) and other.subject not in ("home", "plan"):
                asked, answer, value = rng.choice(other.asks[:3]), UNTOLD, UNTOLD
                if other.answer.startswith(other.value):
                    asked = "What is my aunt's name?"
        messages.append({"role": "user", "content": asked})
    messages.append({"role": "assistant", "content": answer})
    if rng.random() < 0.3 and len(told) > 1 and answer != UNTOLD:
        second = rng.choice([t for t in told if t is not target])
        messages += [
            {"role": "user", "content": _and(rng, question_of(rng, second))},
            {"role": "assistant", "content": second.answer},
        ]
        value = second.value
    return Case(suite="memory_everyday", messages=messages, must=re.escape(value))


def _articles(texts: list[str]) -> list[str]:
    return [re.sub(r"\ba (?=[aeiou])", "an ", t) for t in texts]


def third_persons(rng: random.Random) -> Case:
    """Facts on two or three persons, and one of them asked for: who, where, what, how old, older."""
    names: list[str] = []
    while len(names) < rng.choice([2, 2, 3]):
        new = person(rng, False)
        if not any(new in n or n in new for n in names):
            names.append(new)
    kind = rng.choice(["age", "city", "job", "hobby", "owns"])
    values: list[str] = []
    while len(values) < len(names):
        v = value_of(rng, {"owns": "animal"}.get(kind, kind), False)
        if not any(v in o or o in v for o in values):
            values.append(v)
    form = {
        "age": ["[n] is [v].", "[n] is [v] years old."],
        "city": ["[n] lives in [v]."],
        "job": ["[n] works as a [v]."],
        "hobby": ["[n] likes [v].", "[n] loves [v]."],
        "owns": ["[n] has a [v]."],
    }[kind]
    says = [rng.choice(form).replace("[n]", n).replace("[v]", v) for n, v in zip(names, values, strict=True)]
    at = rng.randrange(len(names))
    n, v = names[at], values[at]
    full = {
        "age": f"{n} is {v} years old.",
        "city": f"{n} lives in {v}.",
        "job": f"{n} works as a {v}.",
        "hobby": f"{n} likes {v}.",
        "owns": f"{n} has a {v}.",
    }[kind]
    asks = {
        "age": [f"How old is {n}?", f"What is {n}'s age?", f"Who is {v}?", f"Who is {v} years old?"],
        "city": [f"Where does {n} live?", f"Where is {n}'s home?", f"Who lives in {v}?", f"Who is in {v}?"],
        "job": [f"What does {n} do?", f"What is {n}'s job?", f"Who works as a {v}?", f"Who is the {v}?"],
        "hobby": [f"What does {n} like?", f"What does {n} love?", f"Who likes {v}?", f"Who loves {v}?"],
        "owns": [f"What does {n} have?", f"Which animal does {n} have?", f"Who has the {v}?", f"Who has a {v}?"],
    }[kind]
    question = rng.choice(asks)
    value = n if question.startswith("Who") else v
    if kind == "age" and rng.random() < 0.3:
        old = rng.random() < 0.6
        best = (max if old else min)(range(len(names)), key=lambda i: int(values[i]))
        word = ("older" if old else "younger") if len(names) == 2 else ("oldest" if old else "youngest")
        question = rng.choice([f"Who is {word}?", f"who is the {word}?", f"Which one is {word}?"])
        full = f"{names[best]} is {word}." if len(names) == 2 else f"{names[best]} is the {word}."
        value = names[best]
    says, full, question = (_articles(says), *_articles([full, question]))
    text = " ".join(says) if rng.random() < 0.75 else ", ".join(s[:-1] for s in says[:-1]) + " and " + says[-1]
    messages = [{"role": "user", "content": f"{text} {question}"}, {"role": "assistant", "content": full}]
    return Case(suite="memory_persons", messages=messages, must=re.escape(value))
