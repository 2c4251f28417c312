"""Writes messages as a description has them, so that what a parser reads can be compared with what was meant."""

from __future__ import annotations

import json
import random
from typing import Any

from tokenmill.text.messages.describe import (
    Args,
    CallFormat,
    Calls,
    Id,
    Lit,
    Loose,
    MessageFormat,
    Name,
    Object,
    Pairs,
    Python,
    Skip,
    Step,
)
from tokenmill.text.messages.message import Call, Message

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}},
    },
    "search.web-2": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "filters": {"type": "object"}, "tags": {"type": "array"}},
    },
    "now": {"type": "object", "properties": {}},
}
WORDS = [
    "Paris",
    "a",
    "Zürich",
    "東京",
    'say "hi"',
    "it's",
    "x < 3 > 1",
    "{",
    "}]",
    "a\\b",
    "two\nlines",
    "",
    "🙂",
    "</",
    "[1,",
]
TEXTS = ["Let me look.", "I will check, first: {} [x] <b>", "Hm…", "Use `f(x)`.\n\nThen go.", "<", "a < b"]


def random_value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {w: random_value(rng, depth - 1) for w in rng.sample(["k", "long key", "ü", "q"], rng.randrange(3))}
    return [rng.randrange(-5, 99), 1.5, True, None, rng.choice(WORDS)][kind]


def random_arguments(rng: random.Random, name: str) -> dict[str, Any]:
    if name == "get_weather":
        full = {"city": rng.choice(WORDS), "days": rng.randrange(9), "units": rng.choice("CF")}
    elif name == "now":
        full = {}
    else:
        listed = [random_value(rng, 1) for _ in range(rng.randrange(3))]
        full = {"query": rng.choice(WORDS), "filters": {"deep": random_value(rng)}, "tags": listed}
    return {k: v for k, v in full.items() if rng.random() < 0.8}


def random_message(rng: random.Random, form: MessageFormat, plain: bool = False) -> Message:
    """Reasoning, text and calls, as far as the format has them."""
    message = Message()
    if form.thinking is not None and rng.random() < 0.7:
        message.reasoning = rng.choice(TEXTS) + rng.choice(["", "\nMore\n\n  thought."])
    count = rng.choice([0, 1, 1, 2, 3]) if form.calls is not None else 0
    if not count or rng.random() < 0.5:
        message.content = rng.choice(TEXTS)
    if form.calls is not None and form.calls.blocks[0].bare and not form.calls.blocks[0].open:
        message.content = "" if count else message.content
    for _ in range(count):
        name = rng.choice(["get_weather", "now"] if plain else list(TOOLS))
        message.calls.append(Call(name, json.dumps(random_arguments(rng, name), ensure_ascii=False)))
    return message


def write(form: MessageFormat, message: Message, *, opened: bool = False) -> str:
    """The text that means this message; `opened`: the prompt has begun the reasoning."""
    parts = []
    thinking = form.thinking
    if thinking is not None and message.reasoning:
        parts += ["" if opened else thinking.open, message.reasoning, thinking.close]
    answer = write_answer(form.calls, message)
    if thinking is not None and message.content:
        answer = thinking.answer + answer
    if thinking is not None and message.reasoning:
        parts.append(thinking.lead)
    return "".join([*parts, answer])


def write_answer(calls: CallFormat | None, message: Message) -> str:
    if calls is None:
        return message.content
    parts = []
    if message.content:
        if calls.name == "functionary_v32":
            parts.append(">>>all\n")
        parts.append(message.content)
        if message.calls:
            parts.append(calls.glue)
    block = calls.blocks[0]
    if block.many and message.calls:
        inner = block.between.join(write_call(block, c, i) for i, c in enumerate(message.calls))
        parts.append(block.open + (f"[{inner}]" if block.array else inner) + block.close)
    else:
        parts.append(
            calls.between.join(block.open + write_call(block, c, i) + block.close for i, c in enumerate(message.calls))
        )
    return "".join(parts)


def write_call(block: Calls, call: Call, index: int) -> str:
    return "".join(_write_step(step, call, index) for step in block.steps)


def _write_step(step: Step, call: Call, index: int) -> str:
    arguments = json.loads(call.arguments)
    if isinstance(step, Lit):
        return step.text
    if isinstance(step, Skip):
        return step.written + step.until
    if isinstance(step, Name):
        written = step.written.format(name=call.name, index=index)
        call.id = written if step.is_id else None
        return written + ("" if step.keep else step.until[0])
    if isinstance(step, Id):
        return step.until
    if isinstance(step, Args):
        return call.arguments
    if isinstance(step, Object):
        return f'{{"{step.name[0]}": {json.dumps(call.name)}, "{step.args[0]}": {call.arguments}}}'
    if isinstance(step, Pairs):
        return "".join(
            step.open + key + (step.text_mid or step.mid) + v + step.close
            if isinstance(v, str)
            else step.open + key + step.mid + json.dumps(v, ensure_ascii=False) + step.close
            for key, v in arguments.items()
        )
    if isinstance(step, Python):
        return f"{call.name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
    return _loose(arguments, step)


def _loose(value: Any, step: Loose) -> str:
    if isinstance(value, str):
        return f"{step.quote}{value}{step.quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k.replace(' ', '_')}:{_loose(v, step)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_loose(v, step) for v in value) + "]"
    return json.dumps(value)
