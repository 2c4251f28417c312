"""Every format: what was written is read, and it does not matter where the text was cut."""

from __future__ import annotations

import json
import random

import pytest

from tests.pure.messages.writing import TOOLS, random_message, write
from tests.thinned import WHOLE
from tokenmill.text.messages.describe import MessageFormat
from tokenmill.text.messages.families import CALL_FORMATS, THINKING
from tokenmill.text.messages.message import Message
from tokenmill.text.messages.parser import MessageParser, parse_message

PAIRED = {
    "harmony": "harmony",
    "cohere": "cohere",
    "mistral": "mistral",
    "kimi_k2": "think_tokens",
    "granite": "granite",
    "seed_oss": "seed_oss",
    "apertus": "apertus",
}
FORMATS = {
    **{name: MessageFormat(THINKING[PAIRED.get(name, "think")], form) for name, form in CALL_FORMATS.items()},
    **{f"{name} alone": MessageFormat(thinking, None) for name, thinking in THINKING.items()},
}


def meaning(message: Message) -> tuple:
    """What a client sees, arguments as values."""
    calls = [(c.name, json.loads(c.arguments.replace("long_key", "long key")), c.id) for c in message.calls]
    return message.content, message.reasoning, calls


def read(form: MessageFormat, pieces: list[str], thinking: bool = False) -> Message:
    parser = MessageParser(form, tools=TOOLS, thinking=thinking)
    message = Message()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish())
    return message


def messages(name: str, count: int = 100):
    """(message, its text, whether the prompt has opened the reasoning)."""
    rng = random.Random(name)
    form = FORMATS[name]
    plain = name in ("pythonic", "gemma", "lfm2", "olmo3")
    for _ in range(count):
        message = random_message(rng, form, plain)
        opened = bool(message.reasoning) and rng.random() < 0.5
        yield message, write(form, message, opened=opened), opened


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_meant_is_read(name):
    kinds = set()
    for message, text, opened in messages(name):
        assert meaning(read(FORMATS[name], [text], opened)) == meaning(message), text
        kinds |= {bool(message.content), bool(message.reasoning), -len(message.calls)}
    assert {True, False} <= kinds


@pytest.mark.parametrize("name", FORMATS)
def test_every_split_gives_the_whole_message(name):
    rng = random.Random(1)
    form = FORMATS[name]
    for place, (_, text, opened) in enumerate(messages(name)):
        whole = read(form, [text], opened)
        every = 1 if place < 12 and (WHOLE or place % 6 == 0) else 9  # all of them: bench/structured.py --part messages
        for cut in range(1, len(text), every):
            assert read(form, [text[:cut], text[cut:]], opened) == whole, (text, cut)
        assert read(form, list(text), opened) == whole
        at = sorted(rng.sample(range(len(text) + 1), min(9, len(text))))
        assert read(form, [text[a:b] for a, b in zip([0, *at], [*at, None], strict=True)], opened) == whole


@pytest.mark.parametrize("name", FORMATS)
def test_broken_messages_read_the_same_in_pieces(name):
    rng = random.Random(2)
    form = FORMATS[name]
    for _, text, opened in messages(name, 40):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        broken = rng.choice([text[:a], text[:a] + text[b:], text[a:] + text, text[:b] + text[a:]])
        whole = read(form, [broken], opened)
        assert read(form, list(broken), opened) == whole
        size = rng.randrange(1, 7)
        assert read(form, [broken[i : i + size] for i in range(0, len(broken), size)], opened) == whole


def test_whole_and_streamed_are_one_function():
    form = FORMATS["hermes"]
    text = 'Look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert parse_message(form, text, tools=TOOLS) == read(form, list(text))
