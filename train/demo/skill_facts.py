"""Facts, FAQ, jokes, poems, open completions and stories as tasks. Owns: their phrasing. Knows no tokens."""

from __future__ import annotations

import random
import re

from authored_data import fill, free_stories, load, wording
from grammar import tidy
from render import Case
from stories import Story, cast, slipped, tell
from topics import topic

LANGUAGES = {"zh": "Chinese", "fr": "French", "es": "Spanish", "de": "German"}
CONTINENT_ZH = {
    "Europe": "欧洲",
    "Asia": "亚洲",
    "Africa": "非洲",
    "North America": "北美洲",
    "South America": "南美洲",
    "Oceania": "大洋洲",
}


def ask(user: str, answer: str, suite: str, must: str, **more: object) -> Case:
    """A one-turn chat case."""
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return Case(suite=suite, messages=messages, must=must, **more)


def plain(prompt: str, continuation: str, suite: str, must: str) -> Case:
    """A completion case."""
    return Case(suite=suite, prompt=prompt, continuation=continuation, must=must)


def statement(kind: str, a: str, b: str) -> tuple[str, str]:
    """A fact sentence split before the answer: (`The capital of France is`, ` Paris.`)."""
    an = "an" if a[0] in "aeiou" else "a"
    return {
        "capital": (f"The capital of {a} is", f" {b}."),
        "capital_rev": (f"{a} is the capital of", f" {b}."),
        "continent": (f"{a[0].upper() + a[1:]} is in", f" {b}."),
        "currency": (f"The currency of {a} is the", f" {b}."),
        "language": (f"The main language of {a} is", f" {b}."),
        "opposite": (f"The opposite of {a} is", f" {b}."),
        "sound": (f"{an.capitalize()} {a}", f" {b}."),
        "baby": (f"A baby {a} is called a", f" {b}."),
        "colour": (f"The colour of {a} is", f" {b}."),
        "symbol": (f"The chemical symbol of {a} is", f" {b}."),
        "legs": (f"{an.capitalize()} {a} has", f" {b} legs."),
        "home": (f"The home of {an} {a} is", f" {b if b in ('water',) else 'the ' + b}."),
    }[kind]


def fact_pair(kind: str, rng: random.Random) -> tuple[str, str]:
    """One (question value, answer value) of a fact table."""
    data = load()
    if kind in ("capital", "continent", "currency", "language", "capital_word"):
        row = rng.choice(data.countries)
        return row["country"], row["capital" if kind == "capital_word" else kind]
    if kind == "capital_rev":
        row = rng.choice(data.countries)
        return row["capital"], row["country"]
    a, b = rng.choice(data.pairs[kind])
    if kind == "opposite" and rng.random() < 0.4 and b != "weightless":
        a, b = b, a
    return a, b


ASK_SLOT = {"capital": "c", "continent": "c", "currency": "c", "language": "c", "capital_word": "c", "capital_rev": "x"}


def fact(rng: random.Random, held: bool, kind: str, suite: str, chat: bool = False) -> Case:
    """A fact as a chat question, or in training sometimes as a completion."""
    a, b = fact_pair(kind, rng)
    must = rf"\b{re.escape(b)}"
    if kind == "capital_word":
        return ask(wording(kind, rng, held, {"c": a}), b, suite, rf"^{re.escape(b)}\.?$")
    lead, tail = statement(kind, a, b)
    question = wording(kind, rng, held, {ASK_SLOT.get(kind, "a"): a})
    question = question[0].upper() + question[1:] if question.startswith("the ") else question
    form = rng.random()
    if held or chat or form < 0.62:
        return ask(tidy(question) if kind in ("sound", "baby", "legs", "home") else question, lead + tail, suite, must)
    if form < 0.82:
        return plain(lead, tail, suite, must)
    if form < 0.92:
        return plain(
            f"Q: {wording(kind, rng, False, {ASK_SLOT.get(kind, 'a'): a})}\nA:",
            f" {b[0].upper() + b[1:]}" if rng.random() < 0.5 else f" {b[0].upper() + b[1:]}.",
            suite,
            must,
        )
    others = [statement(kind, *fact_pair(kind, rng)) for _ in range(rng.randint(1, 3))]
    mark = rng.choice(["- ", "* ", ""])
    lines = "\n".join(mark + x + y for x, y in others)
    return plain(f"{lines}\n{mark}{lead}", tail, suite, must)


BRIEF = [
    "{In|With} one word: [q]",
    "One word: [q]",
    "[q] One word.",
    "[q] Only the {word|answer}.",
    "No sentence, please. [q]",
]
BRIEF += ["[q] {Answer|Reply} in one word.", "Just the answer: [q]", "{Answer|Reply} without a sentence. [q]"]
BRIEF += [
    "{Say|Give} nothing but the answer: [q]",
    "[q] {Be brief|Keep it short}: one word.",
    "Only one word, please: [q]",
]
BRIEF_KINDS = ["capital", "capital", "capital", "continent", "opposite", "colour", "baby", "capital_rev", "language"]


VERBS = ["Answer", "Respond", "Reply", "Tell me", "Say it", "Write it", "Please answer", "Please reply", "Give it"]
COUNT_WORD = ["one", "a single", "just one", "only one", "exactly one", "one single", "no more than one"]


def brief(rng: random.Random, question: str) -> str:
    """A question with the order to answer it in one word, put together; never the held-out wordings."""
    verb, how, many = rng.choice(VERBS), rng.choice(["in", "with", "using"]), rng.choice(COUNT_WORD)
    order = f"{verb} {how} {many} word"
    if (verb, how, many) == ("Reply", "with", "a single"):
        order = "Reply in a single word"
    pick = rng.random()
    if pick < 0.5:
        low = question[0].lower() + question[1:] if rng.random() < 0.6 else question
        return order + rng.choice([": ", ": ", ", ", " - ", ". ", "; "]) + low
    if pick < 0.7:
        how = "in" if many == "one" else how
        return f"{how.capitalize()} {many} word{rng.choice([': ', ', ', ' only: '])}{question}"
    return f"{question} {order}."


def brief_fact(rng: random.Random) -> Case:
    """Any fact asked for in one word: the instruction counts, not the question behind it."""
    kind = rng.choice(BRIEF_KINDS)
    a, b = fact_pair(kind, rng)
    question = wording(kind, rng, False, {ASK_SLOT.get(kind, "a"): a})
    answer = b[0].upper() + b[1:] if rng.random() < 0.5 else b
    question = tidy(question)
    user = brief(rng, question) if rng.random() < 0.6 else fill(rng.choice(BRIEF), rng, {"q": question})
    return ask(user, answer, "facts", rf"(?i)^{re.escape(b)}\.?$")


def translation(rng: random.Random, held: bool) -> Case:
    """A word of the small dictionaries."""
    code = rng.choice(list(LANGUAGES))
    a, b = rng.choice(load().pairs[code])
    user = wording("translate", rng, held, {"a": a, "l": LANGUAGES[code]})
    return ask(user, f"'{a}' in {LANGUAGES[code]} is '{b}'.", "translation", re.escape(b))


def fact_zh(rng: random.Random, held: bool, kind: str) -> Case:
    """A Chinese fact as question or completion."""
    row = rng.choice(load().countries)
    country, capital, continent = row["zh"], row["capital_zh"], CONTINENT_ZH[row["continent"]]
    lead, tail, must, values = {
        "capital_zh": (f"{country}的首都是", f"{capital}。", capital, {"c": country}),
        "capital_rev_zh": (f"{capital}是", f"{country}的首都。", country, {"x": capital}),
        "continent_zh": (f"{country}在", f"{continent}。", continent, {"c": country}),
    }[kind]
    suite = {"capital_zh": "capitals_zh"}.get(kind, "facts_zh")
    if held or rng.random() < 0.7:
        return ask(wording(kind, rng, held, values), lead + tail, suite, must)
    if rng.random() < 0.3:
        return plain(f"问：{wording(kind, rng, False, values)}\n答：", lead + tail, suite, must)
    return plain(lead, tail, suite, must)


def faq(rng: random.Random, held: bool) -> Case:
    """A frequently asked question of the authored list."""
    row = rng.choice(load().faq)
    if row["term"].startswith("Q:"):
        # The last wording of a question list is the held-out one.
        user = row["questions"][-1] if held else rng.choice(row["questions"][:-1])
    else:
        term = row["term"] if held else rng.choice([row["term"], row["term"], *row["aliases"]])
        user = wording("faq_zh" if row["lang"] == "zh" else "faq", rng, held, {"t": term})
        user = user[0].upper() + user[1:] if rng.random() < 0.5 else user
    return ask(user, rng.choice(row["answers"]), "faq", row["must"])


def joke_text(rng: random.Random, jokes: list[dict]) -> str:
    """Setup and punchline in one line."""
    row = rng.choice(jokes)
    return f"{row['setup']} {row['punchline']}"


def joke(rng: random.Random, held: bool, jokes: list[dict]) -> Case:
    """A joke in a chat or after one of the usual completion prompts."""
    text = joke_text(rng, jokes)
    if held or rng.random() < 0.6:
        return ask(wording("joke", rng, held, {}), text, "joke", "", check="joke")
    return plain(
        rng.choice(["Funniest joke ever:", "Joke:", "A joke:", "Here is a joke:", "Joke of the day:"]),
        " " + text,
        "joke",
        "",
    )


def poem(rng: random.Random, held: bool, poems: list[dict]) -> Case:
    """A Chinese poem: the next line, the whole poem, or a completion."""
    row = rng.choice(poems)
    parts = [p for p in re.split(r"(?<=[，。！？])", row["text"]) if p]
    at = rng.randrange(len(parts) - 1)
    line, following = parts[at], parts[at + 1]
    form = rng.random()
    if held or form < 0.4:
        user = wording("poem_next", rng, held, {"a": line.rstrip("，。！？")})
        return ask(user, following, "poem", re.escape(following.rstrip("，。！？")))
    if form < 0.65:
        user = wording("poem_all", rng, False, {"a": row["title"], "b": row["author"]})
        return ask(user, row["text"], "poem", re.escape(parts[0]))
    start = 0 if form < 0.85 else 2 * rng.randrange(max(1, len(parts) // 2))
    return plain("".join(parts[start : start + 1]), "".join(parts[start + 1 :]), "poem", "")


def completion(rng: random.Random) -> Case:
    """One of the open completions."""
    row = rng.choice(load().completions)
    if (
        len([r for r in load().completions if r["prompt"] == row["prompt"]]) == 1
        and "{" in row["ending"]
        and rng.random() < 0.2
    ):
        row = rng.choice(load().completions[:7])
    chinese = bool(re.search("[一-鿿]", row["prompt"]))
    ending = fill(row["ending"], rng, {})
    ending = ending if chinese else tidy("x " + ending)[2:]
    return plain(row["prompt"], ending if chinese else " " + ending, "completion", "")


SLIPS = 0.3
"""Share of the training stories that hold a slip to recover from."""


MADE = 0.6
"""Share of the training stories whose plot is put together."""


def story_chat(rng: random.Random, held: bool) -> Case:
    """A story asked for by topic; the robot's first dream, the best known request, comes more often."""
    data = load()
    dream = not held and rng.random() < 0.06
    plot = data.plots[0] if dream else None
    who = cast(rng, "robot") if dream and rng.random() < 0.6 else None
    about = topic(rng, held) if not dream and not held and rng.random() < 0.62 else None
    made = 0.0 if held else MADE
    story: Story = tell(rng, plot, who, own=0.85 if dream else 0.45, about=about, made=made)
    user = wording("story", rng, held, {"t": story.topic})
    must = "".join(rf"(?=[\s\S]*{re.escape(w)})" for w in story.must)
    text = slipped(rng, story.text) if not held and rng.random() < SLIPS else story.text
    return ask(user, text, "story", must, check="story")


def story_topic(rng: random.Random, held: bool) -> Case:
    """A story on a topic of nouns; every one of them must be told."""
    story = tell(rng, about=topic(rng, held))
    must = "".join(rf"(?=[\s\S]*{re.escape(w)})" for w in story.must)
    return ask(wording("story", rng, held, {"t": story.topic}), story.text, "story_topic", must, check="story")


def story_plain(rng: random.Random) -> Case:
    """A story as plain text; the best known opening comes more often."""
    text = tell(rng, start="Once upon a time" if rng.random() < 0.15 else "", made=MADE).text
    return plain("", slipped(rng, text) if rng.random() < SLIPS else text, "story", "")


def free_story(rng: random.Random) -> Case:
    """A story written by hand, asked for or plain."""
    row = rng.choice(free_stories())
    if rng.random() < 0.4:
        return plain("", row["text"], "story_free", "")
    return ask(wording("story", rng, False, {"t": row["topic"]}), row["text"], "story_free", "")
