"""Long documents. Owns: needles, document questions and long chats of a wanted length. Knows characters, not tokens."""

from __future__ import annotations

import random

from authored_data import load, wording
from render import Case
from skill_chat import memory, person
from stories import tell
from vocabulary import invented, word

CHARS_PER_TOKEN = 3.6
ATTRIBUTES = [
    "secret code",
    "phone number",
    "magic number",
    "password",
    "favourite fruit",
    "locker number",
    "ticket number",
    "home town",
    "secret word",
    "door code",
]


MADE_UP = ["[w] code", "[w] number", "favourite [w]", "[w] word", "lucky [w]", "[w] key", "best [w]", "old [w]", "[w]"]


def needle_attribute(rng: random.Random, held: bool) -> str:
    """What a needle tells about a person; in training a third is made up."""
    if held or rng.random() < 0.65:
        return rng.choice(ATTRIBUTES)
    return rng.choice(MADE_UP).replace("[w]", word(rng, "noun", False))


def needle_value(rng: random.Random, attribute: str) -> str:
    """A value that fits the attribute."""
    if attribute in ("password", "secret word", "home town"):
        made = invented(rng)
        return made.capitalize() if attribute == "home town" else made
    if attribute == "favourite fruit":
        return rng.choice(load().words["fruit"])
    if attribute not in ATTRIBUTES and rng.random() < 0.6:
        return rng.choice([invented(rng), word(rng, "any", False)])
    return str(rng.randint(1000, 99999))


def needle(
    rng: random.Random, held: bool, tokens: int, books: list[str], depth: float | None = None, count: int | None = None
) -> Case:
    """Facts hidden in a long text at a depth (0 start, 1 end), one of which is asked for."""
    count = count if count is not None else rng.choice([1, 2, 3, 5])
    facts = []
    for _ in range(count):
        attribute = needle_attribute(rng, held)
        facts.append((attribute, person(rng, held), needle_value(rng, attribute)))
    facts = [f for i, f in enumerate(facts) if f[:2] not in [g[:2] for g in facts[:i]]]
    parts: list[str] = []
    size, target = 0, int(max(tokens - 80 - 25 * len(facts), 40) * CHARS_PER_TOKEN)
    use_book = books and rng.random() < 0.3
    while size < target:
        text = rng.choice(books) if use_book else tell(rng).text
        if use_book:
            # Book prose needs more tokens a character than the generated stories.
            start = rng.randrange(max(1, len(text) - 3000))
            text = text[start : start + min(2500, int((target - size) * 0.8) + 20)]
            size += int(len(text) * 0.25)
        elif len(text) > target - size:
            text = text[: max(30, target - size)].rsplit(" ", 1)[0]
        parts += text.split(". ") if not use_book else [text]
        size += len(text) + 1
    for index, (attribute, who, value) in enumerate(facts):
        place = depth if depth is not None and index == 0 else rng.random()
        parts.insert(int(place * (len(parts) + 0.999)), f"The {attribute} of {who} is {value}")
    text = ". ".join(p.rstrip(".") for p in parts) + "."
    attribute, who, value = facts[0]
    question = wording("needle", rng, held, {"a": attribute, "b": who})
    user = f"{text}\n\n{question}" if held or rng.random() < 0.8 else f"{question}\n\n{text}"
    messages = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": f"The {attribute} of {who} is {value}."},
    ]
    if rng.random() < 0.35 and len(facts) > 1 and not held:
        for attribute, who, value in facts[1:]:
            messages += [
                {"role": "user", "content": wording("needle", rng, held, {"a": attribute, "b": who})},
                {"role": "assistant", "content": f"The {attribute} of {who} is {value}."},
            ]
    return Case(suite="needle", messages=messages, must=rf"\b{facts[0][2]}\b", tag=f"{tokens}")


def long_chat(rng: random.Random, tokens: int) -> Case:
    """A chat of many small conversations, closed by a memory question on its start."""
    messages: list[dict] = []
    size = 0
    first = memory(rng, False, turns=2, target="name")
    while size < tokens * CHARS_PER_TOKEN - 200:
        more = memory(rng, False, turns=rng.randint(3, 8), target="attribute").messages[:-2]
        more = [m for m in more if "name" not in m["content"] and "call me" not in m["content"].lower()]
        more = [
            p
            for pair in zip(more[::2], more[1::2], strict=False)
            if pair[0]["role"] == "user" and pair[1]["role"] == "assistant"
            for p in pair
        ]
        messages += more
        size += sum(len(m["content"]) + 30 for m in more) + 1
    # Turns in the middle carry little weight: they are short-context tasks seen elsewhere.
    middle = [dict(m, weight=0.1) if m["role"] == "assistant" else m for m in messages]
    return Case(suite="long_chat", messages=first.messages[:-2] + middle + first.messages[-2:], must=first.must)
