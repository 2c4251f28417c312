"""The training mixture. Owns: shares of the skills, surface noise, system prompts, long-context sampling."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from authored_data import fill, load
from corpus import Corpus
from decoy_parts import decoy_json, decoy_note
from phrasing import framed, noise
from render import DEFAULT_SYSTEM, Case
from skill_any_memory import any_memory
from skill_asked import asked_story
from skill_asked_zh import asked_story_zh
from skill_chat import TALK_MADE, correction, memory, memory_zh, out_of_scope, own_fact, small_talk
from skill_decline import decline
from skill_everyday import everyday
from skill_everyday_zh import everyday_zh
from skill_extract import extraction, transform
from skill_facts import (
    ask,
    brief_fact,
    completion,
    fact,
    fact_zh,
    faq,
    free_story,
    joke,
    plain,
    poem,
    story_chat,
    story_plain,
    translation,
)
from skill_free_json import free_json
from skill_free_tools import free_tool, free_tool_zh
from skill_keys import json_keys
from skill_long import long_chat, needle
from skill_math import mathematics
from skill_memory import everyday_memory, third_persons
from skill_memory_zh import everyday_memory_zh
from skill_notes import notes
from skill_notes_zh import notes_zh
from skill_refusals import no_call, unoffered
from skill_scene_json import scene_json
from skill_scene_tools import scene_tool
from skill_spelling import spelling
from skill_steps import follow_up, rests, two_steps
from skill_time import time_sum
from skill_tools import problem_case, result_case, tool_case
from skill_zh import small_zh, story_zh

SYSTEMS = [
    "You are tokenmill's demo model.",
    "You are a friendly assistant.",
    "You are a polite and brief assistant.",
    "Answer in short sentences.",
    "You are a small and honest assistant.",
    "Be helpful.",
    "You help people with simple questions.",
    "You are a storyteller and helper.",
    "You are an assistant. Be concise.",
    "You are a helpful and harmless assistant.",
    "You are a chatbot.",
    "You are a demo.",
    "Answer the user's question.",
    "Please answer politely.",
    "You speak English and Chinese.",
    "Answer in the language of the question.",
    "你是一个友好的助手。",
    "你是一个有用的助手。",
]
NOISY = {
    "decline",
    "division",
    "facts_zh",
    "capitals_zh",
    "operation",
    "own_facts",
    "precedence",
    "product",
    "story_topic",
    "story_zh",
    "tool_unoffered",
    "time_sum",
    "translation",
    "two_steps",
    "word_problem",
    "capitals",
    "facts",
    "reversed",
    "faq",
    "joke",
    "small_talk",
    "fallback",
    "story",
    "sum_1_2",
    "sum_3",
    "times_table",
}
FRAMED = {
    "everyday",
    "everyday_zh",
    "sort_numbers",
    "sort_words",
    "json",
    "json_free",
    "json_keys",
    "json_list",
    "json_own",
    "memory_name",
    "story_asked",
    "story_asked_zh",
    "tool_any",
    "transform",
}
"""What copies signs from the request: nothing is changed or put behind it."""
OTHER_FACTS = ["continent", "currency", "language", "opposite", "sound", "baby", "colour", "symbol", "legs", "home"]


def dress(rng: random.Random, case: Case) -> Case:
    """System prompt and noise as users bring them."""
    if not case.messages:
        return case
    first = next(i for i, m in enumerate(case.messages) if m["role"] == "user")
    if case.suite in NOISY and rng.random() < 0.3:
        case.messages[first] = {"role": "user", "content": noise(rng, case.messages[first]["content"])}
    elif case.suite in FRAMED and rng.random() < 0.15:
        case.messages[first] = {"role": "user", "content": framed(rng, case.messages[first]["content"], False)}
    if first:
        return case
    pick = rng.random()
    if pick >= 0.5:
        system = DEFAULT_SYSTEM if pick < 0.8 else rng.choice(SYSTEMS)
        case.messages = [{"role": "system", "content": system}, *case.messages]
    return case


def facts_en(rng: random.Random) -> Case:
    """Any English fact."""
    pick = rng.random()
    if pick < 0.25:
        return fact(rng, False, "capital", "capitals")
    if pick < 0.33:
        return fact(rng, False, "capital_word", "capitals")
    if pick < 0.42:
        return brief_fact(rng)
    if pick < 0.55:
        return fact(rng, False, "capital_rev", "reversed")
    if pick < 0.85:
        return fact(rng, False, rng.choice(OTHER_FACTS), "facts")
    if pick < 0.93:
        return translation(rng, False)
    first = fact(rng, False, "capital", "facts", chat=True)
    second = fact(rng, False, rng.choice(["capital", "continent", "currency"]), "facts", chat=True)
    first.messages += second.messages
    return first


def facts_zh(rng: random.Random) -> Case:
    """Any Chinese fact, or another short Chinese task."""
    if rng.random() < 0.4:
        return small_zh(rng, False)
    pick = rng.random()
    if pick < 0.62:
        return fact_zh(rng, False, "capital_zh")
    return fact_zh(rng, False, "capital_rev_zh" if pick < 0.8 else "continent_zh")


def chat(rng: random.Random, corpus: Corpus) -> Case:
    """Small talk, memory, fallback."""
    pick = rng.random()
    if pick < 0.2:
        return small_talk(rng, False, TALK_MADE)
    if pick < 0.23 and corpus.intents:
        text, intent = rng.choice(corpus.intents)
        row = next(r for r in load().chat if r["intent"] == intent)
        return ask(text, fill(rng.choice(row["answers"]), rng, {}), "small_talk", "")
    if pick < 0.41:
        return own_fact(rng, False)
    if pick < 0.44:
        return out_of_scope(rng, False, corpus.queries)
    if pick < 0.56:
        return decline(rng, False)
    if pick < 0.59:
        return memory_zh(rng, False)
    if pick < 0.65:
        return correction(rng)
    return memory(rng, False)


def daily(rng: random.Random) -> Case:
    """Small questions and memory of every day, in both languages."""
    pick = rng.random()
    if pick < 0.5:
        return everyday(rng)
    if pick < 0.72:
        return everyday_memory(rng)
    if pick < 0.8:
        return third_persons(rng)
    return everyday_zh(rng) if pick < 0.91 else everyday_memory_zh(rng)


def steps(rng: random.Random) -> Case:
    """Sums of more steps: told, asked on from a result, or of time."""
    pick = rng.random()
    if pick < 0.11:
        return rests(rng)
    return two_steps(rng) if pick < 0.55 else follow_up(rng) if pick < 0.81 else time_sum(rng)


def remarked(rng: random.Random) -> Case:
    """Remarks with questions; roles are told apart in Chinese as often as in English."""
    pick = rng.random()
    if pick < 0.4:
        return decoy_note(rng, pick < 0.2)
    return notes_zh(rng) if pick < 0.52 else notes(rng)


def tools(rng: random.Random, corpus: Corpus) -> Case:
    """Calls, refusals, closing sentences, and requests for tools where there are none."""
    pick = rng.random()
    if corpus.problems and pick < 0.04:
        return problem_case(rng, *rng.choice(corpus.problems))
    if pick < 0.72:
        return tool_case(rng, False, corpus.cities)
    if pick < 0.77:
        return result_case(rng, False, corpus.cities)
    # Short answers: many of them make a small share of the tokens.
    return unoffered(rng, False) if pick < 0.88 else no_call(rng, False, load().jokes)


def natural_en(rng: random.Random, corpus: Corpus) -> Case:
    """A piece of natural English."""
    pick = rng.random()
    if pick < 0.3:
        book = rng.choice(corpus.books)
        start = rng.randrange(max(1, len(book) - 2500))
        return plain("", book[start : start + 2400].split(" ", 1)[-1], "books", "")
    if pick < 0.7:
        return plain("", rng.choice(corpus.stories)[:3200], "natural", "")
    return plain("", "\n".join(rng.choice(corpus.pairs)[0] for _ in range(rng.randint(1, 6))), "natural", "")


def natural_zh(rng: random.Random, corpus: Corpus) -> Case:
    """A piece of natural Chinese, or a sentence with its translation."""
    pick = rng.random()
    if pick < 0.25:
        return plain("", rng.choice(corpus.stories_zh)[:800], "natural_zh", "")
    if pick < 0.45:
        return plain("", rng.choice(corpus.poems)["text"], "natural_zh", "")
    if pick < 0.7:
        return plain("", "".join(rng.choice(corpus.pairs)[1] for _ in range(rng.randint(1, 5))), "natural_zh", "")
    en, zh = rng.choice(corpus.pairs)
    return plain("", f"{en}\n{zh}" if rng.random() < 0.5 else f"{zh}\n{en}", "natural_zh", "")


def makers(corpus: Corpus, long: bool) -> list[tuple[str, float, Callable[[random.Random], Case]]]:
    """Skill name, share of loss tokens and maker; natural text appears only with a corpus."""
    data = load()
    late, mid = (2.0, 1.4) if long else (1.0, 1.0)
    out: list[tuple[str, float, Callable[[random.Random], Case]]] = [
        ("story_chat", 14 * mid, lambda r: story_chat(r, False)),
        ("story_plain", 2 / late, story_plain),
        ("story_free", 1, lambda r: free_story(r)),
        ("story_asked", 9 * mid, lambda r: asked_story_zh(r) if r.random() < 0.2 else asked_story(r)),
        ("story_zh", 6 * mid, lambda r: story_zh(r, False)),
        ("facts_en", 5, facts_en),
        ("facts_zh", 4, facts_zh),
        ("completion", 2 * late, completion),
        ("joke", 1.1, lambda r: joke(r, False, data.jokes)),
        ("poem", 1.5, lambda r: poem(r, False, data.poems)),
        ("faq", 3 * late, lambda r: faq(r, False)),
        ("chat", 10.5 * late, lambda r: chat(r, corpus)),
        ("daily", 7 * late, daily),
        ("memory_any", 3 * late, any_memory),
        ("notes", 6 * late, remarked),
        ("math", 13 * mid, mathematics),
        ("steps", 6 * mid, steps),
        ("extract", 3 * late, lambda r: extraction(r)),
        ("json_free", 5 * late, free_json),
        ("json_own", 7 * late, lambda r: decoy_json(r) if r.random() < 0.25 else scene_json(r)),
        ("keys", 10 * late, lambda r: json_keys(r, False)),
        ("spelling", 3 * late, spelling),
        ("tools", 12 * mid, lambda r: tools(r, corpus)),
        ("tools_free", 5 * mid, lambda r: free_tool_zh(r) if r.random() < 0.12 else free_tool(r)),
        ("tools_own", 8 * mid, scene_tool),
        ("transform", 1.5, lambda r: transform(r, False)),
    ]
    if not long:
        out.append(("needle", 1.5, lambda r: needle(r, False, int(80 * 11 ** r.random()), corpus.books)))
    if corpus.stories:
        out.append(("natural_en", 2 / late, lambda r: natural_en(r, corpus)))
        out.append(("natural_zh", 1.2, lambda r: natural_zh(r, corpus)))
    return out


class Mixture:
    """Draws cases so that each skill gets its share of the weighted tokens."""

    def __init__(self, corpus: Corpus, long: bool) -> None:
        self.makers = makers(corpus, long)
        self.corpus = corpus
        self.long = long
        means = []
        for name, _, make in self.makers:
            # Each skill has draws of its own: a change of one moves no other's share.
            rng = random.Random(f"share/{name}")
            sizes = [_weighted_length(make(rng)) for _ in range(60 if name == "needle" else 120)]
            means.append(sum(sizes) / len(sizes))
        self.rates = [share / mean for (_, share, _), mean in zip(self.makers, means, strict=True)]

    def draw(self, rng: random.Random) -> tuple[str, Case]:
        """One dressed case with the name of its skill."""
        index = rng.choices(range(len(self.makers)), self.rates)[0]
        name, _, make = self.makers[index]
        return name, dress(rng, make(rng))

    def draw_long(self, rng: random.Random, limit: int) -> tuple[str, Case]:
        """One long document of 400 to `limit` tokens."""
        tokens = int(400 * (limit * 0.97 / 400) ** rng.random())
        if rng.random() < 0.78:
            return "needle", dress(rng, needle(rng, False, tokens, self.corpus.books))
        return "long_chat", dress(rng, long_chat(rng, int(tokens * 0.8)))


PIECE = re.compile(r"[\u4e00-\u9fff]|\d|[^\W\d_]+|[^\w\s]+|_")


def _pieces(text: str) -> float:
    """About how many tokens a text has: a Chinese character or a digit counts as much as an English word."""
    return sum(1 + max(0, len(piece) - 5) / 6 for piece in PIECE.findall(text))


def _weighted_length(case: Case) -> float:
    if case.messages:
        return sum(
            _pieces(m["content"]) * (m.get("weight", 1.0) if m["role"] == "assistant" else 0.1) for m in case.messages
        )
    return _pieces(case.prompt + case.continuation)
