"""Small talk, memory and out-of-scope tasks. Owns: multi-turn conversations. Knows no tokens."""

from __future__ import annotations

import random
import re
from functools import lru_cache

from authored_data import fill, load, wording
from own_ways import composed_ask
from render import Case
from skill_facts import ask
from talk_parts import composed_talk
from vocabulary import invented

FALLBACKS = [
    "I am a tiny demo model and I do not know that.",
    "I am a tiny demo model, so I cannot help with that.",
]
FALLBACK_MUST = "tiny demo model|演示模型"
NAMES_ZH = [
    "小明",
    "小红",
    "李华",
    "王芳",
    "张伟",
    "小丽",
    "陈静",
    "刘洋",
    "赵敏",
    "周杰",
    "小刚",
    "林娜",
    "黄磊",
    "吴迪",
    "孙悦",
    "小雪",
]


def person(rng: random.Random, held: bool) -> str:
    """A name: real or invented; the last fifth of the list is kept for the evaluation."""
    names = load().words["name"]
    cut = len(names) * 4 // 5
    if rng.random() < 0.25:
        return invented(rng).capitalize()
    return rng.choice(names[cut:] if held and rng.random() < 0.7 else names[:cut] if not held else names)


TALK_MADE = 0.5
"""Share of the small talk of training that is put together, where its intent has forms."""


def small_talk(rng: random.Random, held: bool, made: float = 0) -> Case:
    """A question about the model itself or an everyday remark; `made` is the share that is put together."""
    row = rng.choice([r for r in load().chat if r["held"] or not held])
    if rng.random() < 0.3:
        intent = "identity" if rng.random() < 0.7 else "identity_zh"
        row = next(r for r in load().chat if r["intent"] == intent)
    answer = fill(rng.choice(row["answers"]), rng, {})
    if made and rng.random() < made and (text := composed_talk(rng, row["intent"])):
        return ask(text, answer, "small_talk", "", tag=row["intent"])
    return ask(rng.choice(row["held"] if held else row["train"]), answer, "small_talk", "", tag=row["intent"])


def own_fact(rng: random.Random, held: bool) -> Case:
    """A question on the model's own figures and abilities; the answer must hold what was computed from its shape."""
    row = rng.choice([r for r in load().chat if "must" in r])
    answer = fill(rng.choice(row["answers"]), rng, {})
    # A dot of `must` is one of its figures, not of an expression, except in `.*`.
    must = re.sub(r"[.](?![*])", r"[.]", fill(row["must"], rng, {}))
    user = composed_ask(rng, row["intent"]) if not held and rng.random() < 0.6 else ""
    if not user or user in row["held"]:
        user = rng.choice(row["held"] if held else row["train"])
    return ask(user, answer, "own_facts", must, tag=row["intent"])


def out_of_scope(rng: random.Random, held: bool, queries: list[str]) -> Case:
    """A question beyond the model, answered with one honest sentence."""
    if queries and rng.random() < 0.5:
        user = rng.choice(queries)
    else:
        pool = load().out_of_scope
        user = fill(rng.choice(pool[-4:] if held else pool[:-4]), rng, {})
    return ask(user, rng.choice(FALLBACKS), "fallback", FALLBACK_MUST)


ATTRIBUTES: dict[str, tuple[list[str], list[str], str, str]] = {
    # name: (ways to tell it, ways to ask for it, answer, word list)
    "like": (
        ["I like [v].", "I love [v].", "My hobby is [v].", "I enjoy [v]."],
        [
            "What do I like?",
            "What is my hobby?",
            "what do i enjoy",
            "Tell me what I like.",
            "Which hobby do I have?",
            "What do I love to do?",
            "Do you know my hobby?",
            "my hobby?",
            "Do you remember what I like?",
        ],
        "You like [v].",
        "hobby",
    ),
    "food": (
        ["My favourite food is [v].", "I love to eat [v].", "[V] is my favourite food."],
        [
            "What is my favourite food?",
            "what do i love to eat",
            "What food do I like?",
            "Tell me my favourite food.",
            "Do you remember my favourite food?",
            "What do I like to eat?",
            "Which food do I like best?",
        ],
        "Your favourite food is [v].",
        "food",
    ),
    "city": (
        ["I live in [v].", "I am from [v].", "My home is [v].", "I come from [v]."],
        [
            "Where do I live?",
            "Where am I from?",
            "In which city do I live?",
            "What is my home town?",
            "Do you know where I live?",
            "Tell me where I live.",
            "Where is my home?",
            "Which place am I from?",
            "Which city do I live in?",
        ],
        "You live in [v].",
        "city",
    ),
    "job": (
        ["I work as a [v].", "I am a [v].", "My job is [v].", "I am a [v] by profession."],
        [
            "What is my job?",
            "What do I do for work?",
            "What is my profession?",
            "Which job do I have?",
            "Do you remember my job?",
            "Tell me my job.",
            "What work do I do?",
            "what do I work as",
        ],
        "You work as a [v].",
        "job",
    ),
    "colour": (
        ["My favourite colour is [v].", "I like the colour [v] best.", "[V] is my favourite colour."],
        [
            "What is my favourite colour?",
            "Which colour do I like?",
            "What colour do I love?",
            "Which color is my favourite?",
            "my favourite color?",
            "Tell me the colour I like.",
            "What is the color I like most?",
            "Which colour pleases me most?",
            "Do you know my favourite colour?",
            "what color do i like best",
        ],
        "Your favourite colour is [v].",
        "colour",
    ),
    "pet": (
        ["I have a [v].", "My pet is a [v].", "I own a [v]."],
        [
            "What pet do I have?",
            "Which animal do I have?",
            "What kind of pet do I own?",
            "Do you remember my pet?",
            "Tell me what pet I have.",
            "Which pet is mine?",
            "What animal is my pet?",
            "what is my pet",
        ],
        "You have a [v].",
        "animal",
    ),
    "age": (
        ["I am [v] years old.", "I'm [v].", "My age is [v]."],
        [
            "How old am I?",
            "What is my age?",
            "Tell me my age.",
            "Do you remember how old I am?",
            "my age?",
            "How many years old am I?",
            "What age am I?",
            "Have you noted my age?",
            "you know how old i am?",
            "Which age did I give you?",
            "Can you tell me how old I am?",
            "Can you say my age?",
            "do you know my age",
        ],
        "You are [v] years old.",
        "age",
    ),
    "drink": (
        ["I like to drink [v].", "My favourite drink is [v].", "I like [v]."],
        [
            "What is my favourite drink?",
            "Which drink do I like?",
            "Tell me my favourite drink.",
            "What do I drink?",
            "Which drink is my favourite?",
            "Do you remember my favourite drink?",
            "What do I like to drink?",
        ],
        "You like to drink [v].",
        "drink",
    ),
    "friend": (
        ["My best friend is [v].", "My best friend is called [v].", "I have a friend named [v]."],
        [
            "Who is my best friend?",
            "What is my best friend called?",
            "Do you remember my best friend?",
            "Tell me the name of my best friend.",
            "Which friend did I tell you about?",
            "My best friend is who?",
            "What name does my friend have?",
            "my friend's name?",
            "Who is the friend that I named?",
            "How is my friend called?",
            "What is the name of my friend?",
        ],
        "Your best friend is [v].",
        "name",
    ),
}


MINE: dict[str, tuple[list[str], list[str]]] = {
    # attribute: (names of it, clauses that ask for it)
    "like": (["my hobby", "my favourite hobby"], ["what I like", "what I enjoy", "what I love to do"]),
    "food": (
        ["my favourite food", "my favourite dish"],
        ["what I like to eat", "what I love to eat", "which food I like"],
    ),
    "city": (["my home town", "my city", "my home"], ["where I live", "where I come from", "where my home is"]),
    "job": (["my job", "my profession", "my work"], ["what I do for work", "what my job is", "what I work as"]),
    "colour": (["my favourite colour", "my favourite color"], ["which colour I like", "what colour I like best"]),
    "pet": (["my pet", "my animal"], ["what pet I have", "which animal I own", "what kind of pet I have"]),
    "age": (["my age"], ["how old I am", "what my age is", "my age in years"]),
    "drink": (["my favourite drink"], ["what I like to drink", "which drink I like"]),
    "friend": (
        ["my best friend", "my best friend's name", "my friend's name", "the name of my best friend"],
        ["who my best friend is", "what my friend is called", "how my friend is called", "who my friend is"],
    ),
}
ASK_CLAUSE = [
    "Do you know [c]?",
    "Do you remember [c]?",
    "Tell me [c].",
    "Can you tell me [c]?",
    "Could you say [c]?",
    "Do you recall [c]?",
    "Please tell me [c].",
    "I forgot [c].",
    "Say [c].",
    "Remind me [c].",
    "You know [c], right?",
    "Have I told you [c]?",
    "Can you remember [c]?",
    "I want to hear [c].",
    "Do you still know [c]?",
    "I told you [c]. Say it.",
    "guess [c]",
    "Repeat [c].",
    "Did you note [c]?",
    "Let me hear [c].",
    "Are you sure you know [c]?",
    "Would you tell me [c]?",
]
ASK_NAME = [
    "What is [n]?",
    "what's [n]",
    "[n]?",
    "Tell me [n].",
    "Do you remember [n]?",
    "Name [n].",
    "And [n]?",
    "What did I say [n] is?",
    "Say [n].",
    "Remind me of [n].",
    "What was [n]?",
    "Please name [n].",
    "Can you name [n]?",
    "I forgot [n].",
    "So what is [n]?",
    "Give me [n].",
    "Could you repeat [n]?",
    "Which one is [n]?",
    "What about [n]?",
    "Do you still know [n]?",
    "Recall [n].",
]


def asked(rng: random.Random, key: str) -> str:
    """A training question for an attribute, half of them put together; never the held-out one."""
    _, asks, _, _ = ATTRIBUTES[key]
    if rng.random() < 0.45:
        return rng.choice(asks[:-1])
    names, clauses = MINE[key]
    if rng.random() < 0.5:
        name = rng.choice(names)
        text = rng.choice(ASK_NAME if not name.endswith("friend") else ASK_NAME[2:6] + ASK_NAME[8:9]).replace(
            "[n]", name
        )
    else:
        text = rng.choice(ASK_CLAUSE).replace("[c]", rng.choice(clauses))
    kept_out = _letters(text) == _letters(asks[-1]) or text.startswith(held_starts())
    return rng.choice(asks[:-1]) if kept_out else text


@lru_cache(maxsize=1)
def held_starts() -> tuple[str, ...]:
    """How the held-out wordings begin, up to their first slot; short starts are everybody's."""
    starts = (re.sub(r"\{.*|\[.*", "", h).strip() for row in load().wordings.values() for h in row["held"])
    return tuple(s for s in starts if len(s) > 22)


def _letters(text: str) -> str:
    return re.sub(r"[^a-z ]", "", text.lower()).strip()


def value_of(rng: random.Random, listing: str, held: bool) -> str:
    """A value for an attribute or tool argument."""
    if listing == "age":
        return str(rng.randint(5, 95))
    if listing == "name":
        return person(rng, held)
    if listing == "city":
        return rng.choice(load().countries)["capital"] if rng.random() < 0.8 else invented(rng).capitalize()
    return rng.choice(load().words[listing])


def _told(rng: random.Random, key: str, value: str) -> tuple[str, str]:
    tell, _, answer, _ = ATTRIBUTES[key]
    said = rng.choice(tell).replace("[v]", value).replace("[V]", value.capitalize())
    you = answer.replace("[v]", value)
    reply = rng.choice([f"I will remember that: {you[0].lower() + you[1:]}", f"Good to know. {you}"])
    return said, reply


def _distractor(rng: random.Random) -> list[dict]:
    from skill_facts import fact, faq, joke
    from skill_math import arithmetic

    pick = rng.random()
    while True:
        if pick < 0.08:
            case = joke(rng, False, load().jokes)
        elif pick < 0.16:
            case = out_of_scope(rng, False, [])
        elif pick < 0.4:
            case = fact(rng, False, rng.choice(["capital", "opposite", "colour", "sound"]), "", chat=True)
        elif pick < 0.6:
            case = arithmetic(rng, False, chat=True)
        elif pick < 0.85:
            case = small_talk(rng, False)
        else:
            case = faq(rng, False)
        if case.messages:
            return [dict(m) for m in case.messages]


def memory(rng: random.Random, held: bool, turns: int | None = None, target: str | None = None) -> Case:
    """Facts about the user told over several turns, then asked for; answers copy from the context."""
    target = target or rng.choice(["name", "name", "attribute"])
    turns = turns if turns is not None else min(12, 1 + int(rng.expovariate(0.35)))
    name = person(rng, held)
    keys = rng.sample(list(ATTRIBUTES), min(turns, rng.randint(1, 5)))
    if {"like", "drink"} <= set(keys):
        keys.remove("drink")
    if {"pet", "friend"} <= set(keys):
        keys.remove("friend")
    values = {k: value_of(rng, ATTRIBUTES[k][3], held) for k in keys}
    told_name = target == "name" or rng.random() < 0.6
    events: list[list[dict]] = []
    if told_name:
        said = wording("tell_name", rng, held, {"n": name})
        events.append(
            [
                {"role": "user", "content": said},
                {"role": "assistant", "content": rng.choice([f"Nice to meet you, {name}!", f"Hello {name}!"])},
            ]
        )
    for key in keys if target == "attribute" or rng.random() < 0.7 else []:
        said, reply = _told(rng, key, values[key])
        events.append([{"role": "user", "content": said}, {"role": "assistant", "content": reply}])
    if rng.random() < 0.15 and told_name and not held:
        name = person(rng, held)
        events.append(
            [
                {
                    "role": "user",
                    "content": rng.choice(
                        [f"Call me {name}.", f"No, my name is {name}.", f"Please call me {name} from now on."]
                    ),
                },
                {"role": "assistant", "content": f"All right, {name}."},
            ]
        )
    if told_name and not held and rng.random() < 0.12:
        # The name comes in one breath with another question.
        other = _distractor(rng)
        other[0] = {"role": "user", "content": f"{events[0][0]['content']} {other[0]['content']}"}
        events[0] = other
    while len(events) < turns:
        events.insert(rng.randint(0, len(events)), _distractor(rng))
    messages = [m for e in events for m in e]
    if target == "name":
        question, answer, must = wording("ask_name", rng, held, {}), f"Your name is {name}.", rf"\b{re.escape(name)}\b"
        if not held and rng.random() < 0.04:
            messages = _distractor(rng)
            answer, must = "You have not told me your name yet.", "not told"
    else:
        key = rng.choice(keys)
        _, asks, form, _ = ATTRIBUTES[key]
        question = asks[-1] if held else asked(rng, key)
        answer, must = form.replace("[v]", values[key]), rf"\b{re.escape(values[key])}\b"
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    suite = "memory_name" if target == "name" else "memory_attribute"
    return Case(suite=suite, messages=messages, must=must, tag=str(turns))


def memory_zh(rng: random.Random, held: bool) -> Case:
    """The Chinese name task."""
    name = rng.choice(NAMES_ZH[12:] if held else NAMES_ZH)
    messages = [
        {"role": "user", "content": wording("tell_name_zh", rng, held, {"n": name})},
        {"role": "assistant", "content": f"你好，{name}！很高兴认识你。"},
        {"role": "user", "content": wording("ask_name_zh", rng, held, {})},
        {"role": "assistant", "content": f"你叫{name}。"},
    ]
    return Case(suite="memory_zh", messages=messages, must=name)


def correction(rng: random.Random) -> Case:
    """Several skills in one conversation, in random order."""
    messages: list[dict] = []
    for _ in range(rng.randint(2, 4)):
        messages += _distractor(rng)
    return Case(suite="chat_mixed", messages=messages)
