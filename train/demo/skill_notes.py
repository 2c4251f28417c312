"""Remarks and notes. Owns: what people say of their day or ask to be kept, and questions for it in other words.

A remark is answered as one (nothing in it is a request), and later a part of it is asked for. Knows no tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import lru_cache

from authored_data import load, rows
from held_out import matcher
from phrasing import occasion
from remark_parts import Pair, composed_remark, whole
from render import Case
from scenes import KINDS, Value, code, date_of, email, full_person, phone, some_words, town
from skill_everyday import everyday
from skill_memory import INTRO
from skill_steps import follow_up
from vocabulary import invented, word

SHOPS = [
    "bakery",
    "school",
    "shop",
    "bank",
    "hotel",
    "garage",
    "theatre",
    "farm",
    "library",
    "museum",
    "factory",
    "cafe",
    "clinic",
    "studio",
    "market",
]
SUBJECTS = [
    "history",
    "music",
    "biology",
    "law",
    "art",
    "maths",
    "physics",
    "geography",
    "medicine",
    "chemistry",
    "design",
    "philosophy",
]
SMALL: dict[str, Callable[[random.Random], Value]] = {
    "n": lambda r: r.randint(2, 9),
    "m": lambda r: r.randint(2, 9),
    "m2": lambda r: r.randint(10, 40),
    "num2": lambda r: r.randint(2, 99),
    "num3": lambda r: r.randint(2, 99),
    "age": lambda r: r.randint(4, 90),
    "p1": lambda r: r.choice(
        ["shoes", "gloves", "socks", "glasses", "trousers", "boots", word(r, "noun", False) + "s"]
    ),
    "shop": lambda r: r.choice(SHOPS),
    "subject": lambda r: r.choice(SUBJECTS),
    "instrument": lambda r: r.choice(load().words["instrument"]),
    "word2": lambda r: invented(r).capitalize(),
    "animal": lambda r: r.choice(load().words["animal"]),
    "thing": lambda r: word(r, "noun", False),
}
SLOT = re.compile(r"\[(\w+)\]")
PLAIN = ["Okay, I will remember that.", "Noted.", "Got it.", "I see. Thank you for telling me.", "Good to know."]
PLAIN += ["All right, I will keep that in mind.", "Thanks for telling me.", "Okay."]


@lru_cache(maxsize=2)
def remarks(held: bool) -> list[dict]:
    """The remarks of training or of the evaluation."""
    return [row for row in rows("remarks.jsonl") if row.get("held", False) == held]


MADE = 0.7
"""Share of the training remarks that are put together."""


def _remark(rng: random.Random, held: bool) -> tuple[str, list[Pair], str]:
    """A remark, questions with their answers, and what it is about."""
    if not held and rng.random() < MADE:
        made = composed_remark(rng)
        return made.said, made.asks, made.said
    row = rng.choice(remarks(held))
    values: dict[str, str] = {}

    def slot(match: re.Match[str]) -> str:
        name = match[1]
        while name not in values:
            made = str((SMALL.get(name) or KINDS[name if name in KINDS else name.rstrip("2")])(rng))
            if made not in values.values():
                values[name] = made
        return values[name]

    def filled(text: str) -> str:
        made = SLOT.sub(slot, text)
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", made)

    def needed(question: str, answer: str, *must: str) -> str:
        """What the answer tells beyond the question: its values, or what the row names."""
        if must:
            return SLOT.sub(lambda m: re.escape(values[m[1]]), must[0])
        new = [name for name in SLOT.findall(answer) if name not in SLOT.findall(question)]
        return "".join(whole(values[name]) for name in new) or re.escape(filled(answer).rstrip("."))

    said = filled(rng.choice(row["says"]))
    # What the sentence does not tell cannot be asked for.
    asks = [ask for ask in row["asks"] if set(SLOT.findall(ask[0] + ask[1])) <= values.keys()]
    return said, [(filled(ask[0]), filled(ask[1]), needed(*ask)) for ask in asks], row["says"][0]


THINGS: dict[str, Callable[[random.Random], str]] = {
    "number": lambda r: str(r.randint(10, r.choice([99, 9999, 999999]))),
    "code": lambda r: code(r) if r.random() < 0.6 else f"{word(r, 'any', False)}-{r.randint(1, 99)}",
    "word": lambda r: invented(r) if r.random() < 0.5 else word(r, "any", False),
    "name": full_person,
    "date": date_of,
    "password": lambda r: "-".join(word(r, "any", False) for _ in range(2)) + f"-{r.randint(1, 99)}",
    "address": email,
    "phone number": phone,
    "city": town,
    "sentence": lambda r: some_words(r, 5),
    "colour": lambda r: r.choice(load().words["colour"]),
    "PIN": lambda r: str(r.randint(1000, 9999)),
}
KEEP = [
    "Keep this {k}: {v}.",
    "Please remember the {k} {v}.",
    "Remember the {k} {v}.",
    "The {k} is {v}, keep it in mind.",
]
KEEP += [
    "Here is a {k}: {v}.",
    "Do not forget the {k}: {v}",
    "Note the {k} {v}.",
    "Save this {k} for me: {v}.",
    "{k}: {v}",
]
KEEP += [
    "I give you a {k}: {v}",
    "Memorise {v}. It is a {k}.",
    "My {k} for today: {v}.",
    "Can you keep the {k} {v} for me?",
]
KEEP += [
    "Our secret {k} is {v}.",
    "This {k} is important: {v}.",
    "Store the {k} {v}.",
    "Write down the {k} {v}.",
    "Please keep {v} as the {k}.",
]
KEEP_HELD = ["Hold on to this {k} for a while: {v}.", "You ought to know our {k}, it is {v}."]
KEEP_HELD += ["We agreed on the {k} {v}."]
WANT = [
    "Which {k} did I give you?",
    "What was the {k}?",
    "What is the {k}?",
    "Repeat the {k}.",
    "Tell me the {k} again.",
    "The {k}?",
]
WANT += [
    "I told you a {k}. What was it?",
    "What {k} did I tell you?",
    "Do you still know the {k}?",
    "Say the {k}.",
    "I forgot the {k}, what was it?",
]
WANT += [
    "Give me back the {k}.",
    "What {k} should you keep?",
    "What did I ask you to remember?",
    "Remind me of the {k}.",
    "Now the {k} please.",
]
is_kept_keeping = matcher(text.replace("{k}", "[k]").replace("{v}", "[v]") for text in KEEP_HELD)
WANT_HELD = ["Let me have that {k} back, please.", "Which {k} was that again?", "I need our {k} now."]


HOLD = [
    "keep",
    "remember",
    "note",
    "store",
    "save",
    "memorise",
    "hold",
    "write down",
    "bear in mind",
    "do not lose",
    "file",
]
HOLD += ["do not forget", "put down", "keep in mind", "learn", "record", "mind", "take down", "hang on to", "jot down"]
WHOSE = ["my", "the", "this", "our", "a", "the new", "my new", "one", "his", "her", "their", "the old", "the other"]
FRONT = [
    "",
    "",
    "",
    "Please ",
    "Now ",
    "Can you ",
    "Could you ",
    "I want you to ",
    "You should ",
    "Just ",
    "Hey, ",
    "For later: ",
]
BACK = ["Which {k} did {a}", "What {k} did {a}", "Tell me {w} {k} {a}", "What was {w} {k} {a}", "I forgot {w} {k} {a}"]
BACK += ["Say {w} {k} {a}", "Repeat {w} {k} {a}", "Do you know {w} {k} {a}", "{w} {k} {a}", "Give me {w} {k} {a}"]
BACK += [
    "I need {w} {k} {a}",
    "Remind me of {w} {k} {a}",
    "Show me {w} {k} {a}",
    "How does {w} {k} {a} read",
    "And {w} {k} {a}",
]
TOLD = [
    "I told you",
    "I gave you",
    "you should keep",
    "from before",
    "of a moment ago",
    "we had",
    "I mentioned",
    "you noted",
    "",
]
ASKED = [
    "I tell you",
    "I give you",
    "you keep",
    "I mention",
    "we have",
    "I want you to keep",
    "you write down",
    "I say",
]


def _keeping(rng: random.Random, named: str, value: str) -> str:
    """An order to keep something, put together; the value stands at the end or in the middle."""
    whose, hold = rng.choice(WHOSE), rng.choice(HOLD)
    pick = rng.random()
    if pick < 0.35:
        joint = rng.choice([": ", " ", ", it is ", " which is ", " = ", " - ", ", ", ": it is "])
        text = f"{rng.choice(FRONT)}{hold} {whose} {named}{joint}{value}"
    elif pick < 0.6:
        tail = rng.choice([f", {hold} it", f". {hold.capitalize()} it, please", "", f" and you {hold} it", ". Got it?"])
        text = f"{whose} {named} {rng.choice(['is', 'was', 'will be', 'reads', 'says'])} {value}{tail}"
    elif pick < 0.8:
        text = f"{rng.choice(FRONT)}{hold} {value} as {whose} {named}"
    else:
        text = (
            f"{rng.choice(['Here comes', 'Here is', 'Next is', 'This is', 'I have', 'Take'])} {whose} {named}: {value}"
        )
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text[0].upper() + text[1:]) + rng.choice([".", "", ".", "!"])


def _wanting(rng: random.Random, named: str) -> str:
    """A question for it, put together."""
    text = rng.choice(BACK)
    told = rng.choice(ASKED if " did " in text else TOLD)
    text = (
        text.replace("{a}", told).replace("{w}", rng.choice(["the", "my", "that", "this", "our"])).replace("{k}", named)
    )
    text = f"{rng.choice(['', '', '', 'Now ', 'So ', 'Well, ', 'Okay, ', 'Please: '])}{text}".strip()
    return text[0].upper() + text[1:] + rng.choice(["?", "?", ".", "", "!"])


OPENED = [
    "Okay",
    "All right",
    "Noted",
    "Got it",
    "I see",
    "Good",
    "Fine",
    "Sure",
    "Thanks",
    "Understood",
    "Yes",
    "Done",
]
CLOSED = [
    "I will remember that",
    "I will keep that in mind",
    "that is good to know",
    "I have noted it",
    "I will not forget it",
]
CLOSED += ["thank you for telling me", "I will keep it", "ask me when you need it", "I know it now", "it is noted", ""]


def heard(rng: random.Random) -> str:
    """What is said to a remark."""
    lead, rest = rng.choice(OPENED), rng.choice(CLOSED)
    if not rest:
        return f"{lead}."
    joint = rng.choice([", ", ". ", ": ", ", "])
    return f"{lead}{joint}{rest if joint != '. ' else rest[0].upper() + rest[1:]}."


is_kept_wanting = matcher(text.replace("{k}", "[k]") for text in WANT_HELD)


def _kept(rng: random.Random, held: bool) -> tuple[str, list[Pair], str]:
    """Something to be kept, with the ways to ask for it."""
    kind = rng.choice(list(THINGS))
    named = kind
    if rng.random() < 0.3:
        named = f"{rng.choice(['new', 'first', 'secret', 'door', 'lucky', 'last', word(rng, 'noun', False)])} {kind}"
    text = rng.choice(KEEP_HELD if held else KEEP).replace("{k}", named)
    value = THINGS[kind](rng)
    if not held and rng.random() < MADE:
        value = THINGS[kind](rng)
        if rng.random() < 0.3:
            named = f"{word(rng, 'noun', False)} {rng.choice(['number', 'code', 'name', 'word', 'key', 'id', 'date'])}"
            value = invented(rng) if named.endswith(("name", "word")) else code(rng)
        said = _keeping(rng, named, value)
        wants = [w for w in (_wanting(rng, named) for _ in range(3)) if not is_kept_wanting(w)]
        if wants and not is_kept_keeping(said):
            return said, [(q, f"The {named} is {value}.", whole(value)) for q in wants], named
    text = text[0].upper() + text[1:] if rng.random() < 0.85 else text
    asks = [(q.replace("{k}", named), f"The {named} is {value}.", whole(value)) for q in (WANT_HELD if held else WANT)]
    return text.replace("{v}", value), asks, named


def _other_turns(rng: random.Random, held: bool) -> list[dict]:
    """A turn or two on something else; sums go on from their own results."""
    out: list[dict] = []
    for _ in range(rng.choice([0, 1, 1, 2])):
        out += [
            dict(m)
            for m in (
                everyday(rng).messages[-2:]
                if rng.random() < 0.8
                else (follow_up(rng, made=0.0) if held else follow_up(rng)).messages
            )
        ]
    return out


def _told(rng: random.Random, held: bool) -> list[tuple[str, list[Pair]]]:
    """One to three things told, of which no two are alike."""
    out, seen, kept = [], set(), 0
    for _ in range(rng.choice([1, 1, 2, 3])):
        make = _kept if rng.random() < 0.35 else _remark
        said, pairs, about = make(rng, held)
        told = {question for _, others in out for question, _, _ in others}
        if told & {question for question, _, _ in pairs}:
            continue  # One question with two answers.
        if about not in seen and pairs and not any(said.split()[-1] in other for other, _ in out):
            seen.add(about)
            out.append((said, pairs))
            kept += make is _kept
    # Of two things to keep, `What did I ask you to remember?` would mean either.
    return out[:1] if kept > 1 and not held else out


def _asked(rng: random.Random, pairs: list[Pair], alone: bool) -> Pair:
    """A question for what was told; one that names nothing needs that nothing else was told."""
    for _ in range(8):
        pair = rng.choice(pairs)
        if alone or "ask you to remember" not in pair[0]:
            return pair
    return pairs[0]


def notes(rng: random.Random, held: bool = False) -> Case:
    """Remarks and things to keep, over turns or in one breath, and questions for them."""
    told = _told(rng, held)
    while not told:
        told = _told(rng, held)
    messages: list[dict] = []
    once = rng.random() < 0.2
    for said, pairs in [] if once else told:
        text = said if held or rng.random() < 0.7 else rng.choice(INTRO) + said
        reply = rng.choice(PLAIN) if held or rng.random() < 0.3 else heard(rng)
        if rng.random() < 0.25 and pairs[0][1].startswith(("You", "The ")):
            reply = rng.choice(["Noted. ", "Okay. ", "I see. ", "Got it. ", ""]) + _asked(rng, pairs, True)[1]
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        messages += _other_turns(rng, held)
    asked = rng.sample(told, min(len(told), rng.choice([1, 1, 2])))
    must = ""
    for at, (_, pairs) in enumerate(asked):
        question, answer, must = _asked(rng, pairs, len(told) == 1)
        if once and at == 0:
            parts = [s if s[-1] in ".!?" else s + "." for s, _ in told]
            if rng.random() < 0.2 and not held:
                parts.insert(0, occasion(rng))
            question = " ".join(parts) + rng.choice([" ", "\n", " Now: ", " So: "]) + question
        elif not held and rng.random() < 0.2:
            lead = rng.choice(["And ", "So, ", "Now, ", "Tell me, ", "Quick question: ", "By the way, "])
            question = lead + (question if question.startswith("I ") else question[0].lower() + question[1:])
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Case(suite="memory_note", messages=messages, must=must)
