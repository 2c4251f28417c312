"""Schemas as people write them, invented from a seed: forms, records, lists of records, choices, tool parameters."""

from __future__ import annotations

import random
from typing import Any

WORDS = [
    *("name", "title", "city", "street", "email", "count", "price", "date", "tags"),
    *("notes", "status", "kind", "owner", "parts", "total", "rank", "size"),
]


def schema(seed: int) -> dict[str, Any]:
    """One schema."""
    rng = random.Random(seed)
    return _record(rng, rng.choice([1, 1, 2, 2, 3]))


def _record(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 7))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {n: _value(rng, depth) for n in names},
        "required": [n for n in names if rng.random() < 0.7],
    }
    if rng.random() < 0.6:
        made["additionalProperties"] = False
    return made


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    plain: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randint(3, 30)},
        {"type": "string", "enum": rng.sample(WORDS, 3)},
        {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time"])},
        {"type": "string", "pattern": rng.choice(["^[A-Z]{2}[0-9]{4}$", "^[a-z]+(-[a-z]+)*$", "^#[0-9a-f]{6}$"])},
        {"type": "integer", "minimum": 0, "maximum": rng.randint(1, 5000)},
        {"type": "number", "minimum": -1, "maximum": 1},
        {"type": "boolean"},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    ]
    if depth and rng.random() < 0.4:
        inner = _record(rng, depth - 1)
        return inner if rng.random() < 0.5 else {"type": "array", "items": inner, "maxItems": rng.randint(1, 3)}
    if rng.random() < 0.2:
        return {"type": "array", "items": rng.choice(plain), "minItems": 1, "maxItems": rng.randint(1, 4)}
    return rng.choice(plain)
