"""Random schemas and values over a small alphabet, so that they meet often. Any keyword may stand next to any other."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["a", "b", "c", "ab", "x1", ""]
PATTERNS = ["^a", "b$", "^[a-c]{1,3}$", "a|b", "^x", "[0-9]", "^$", "^ab?c*$"]
SCALARS = [0, 1, 2, 3, 5, -1, 1.5, 2.0, 10, "a", "b", "ab", "", "x", "abc", "a1", True, False, None]
TYPES = ["integer", "number", "string", "array", "object", "boolean", "null"]
DEFS = [
    {"type": "integer"},
    {"type": ["object", "null"], "properties": {"a": {"$ref": "#/$defs/r"}}},
    {"enum": ["a", 1]},
]


def random_value(rng: random.Random, depth: int) -> Any:
    """A JSON value."""
    kind = rng.random()
    if depth == 0 or kind < 0.6:
        return rng.choice(SCALARS)
    if kind < 0.8:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(NAMES): random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))}


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """A whole document, with a definition that it may refer to."""
    found = _schema(rng, depth)
    return {**(found if isinstance(found, dict) else {"allOf": [found]}), "$defs": {"r": rng.choice(DEFS)}}


def older(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """A document with keywords that newer drafts have given up, and with those of newer drafts than its own."""
    _maybe(rng, schema, 0.4, "items", lambda: [_schema(rng, 0) for _ in range(rng.randint(1, 2))])
    _maybe(rng, schema, 0.3, "additionalItems", lambda: rng.choice([False, _schema(rng, 0)]))
    _maybe(rng, schema, 0.2, "dependencies", lambda: {rng.choice(NAMES): [rng.choice(NAMES)]})
    _maybe(rng, schema, 0.2, "minContains", lambda: rng.randint(0, 2))
    schema.pop("unevaluatedProperties", None)  # the oracle for 2019 forgets additionalProperties beside it
    return schema


def _schema(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.03:
        return rng.choice([True, False, {}])
    s: dict[str, Any] = {}
    if rng.random() < 0.8:
        types = rng.sample(TYPES, rng.choice([1, 1, 1, 1, 2]))
        s["type"] = types[0] if len(types) == 1 else types
    else:
        types = TYPES
    for kind, add in (("integer", _number), ("string", _string), ("array", _array), ("object", _object)):
        if kind in types or (kind == "integer" and "number" in types):
            add(rng, s, depth)
    if rng.random() < 0.12:
        s["enum"] = [random_value(rng, 2) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.05:
        s["const"] = random_value(rng, 2)
    if depth:
        _combined(rng, s, depth - 1)
    return s


def _maybe(rng: random.Random, s: dict[str, Any], share: float, keyword: str, make: Any) -> None:
    if rng.random() < share:
        s[keyword] = make()


def _number(rng: random.Random, s: dict[str, Any], depth: int) -> None:
    _maybe(rng, s, 0.4, "minimum", lambda: rng.choice([0, 1, -1, 1.5, 3]))
    _maybe(rng, s, 0.4, "maximum", lambda: rng.choice([2, 5, 10, 3.5]))
    _maybe(rng, s, 0.15, "exclusiveMinimum", lambda: rng.choice([0, 1, 2.5]))
    _maybe(rng, s, 0.15, "exclusiveMaximum", lambda: rng.choice([4, 6, 2.5]))
    _maybe(rng, s, 0.15, "multipleOf", lambda: rng.choice([1, 2, 3, 0.5]))


def _string(rng: random.Random, s: dict[str, Any], depth: int) -> None:
    _maybe(rng, s, 0.3, "minLength", lambda: rng.randint(0, 3))
    _maybe(rng, s, 0.3, "maxLength", lambda: rng.randint(0, 4))
    _maybe(rng, s, 0.3, "pattern", lambda: rng.choice(PATTERNS))


def _array(rng: random.Random, s: dict[str, Any], depth: int) -> None:
    if depth:
        _maybe(rng, s, 0.6, "items", lambda: _schema(rng, depth - 1))
        _maybe(rng, s, 0.3, "prefixItems", lambda: [_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))])
        _maybe(rng, s, 0.2, "contains", lambda: _schema(rng, depth - 1))
        _maybe(rng, s, 0.05, "unevaluatedItems", lambda: rng.choice([False, _schema(rng, 0)]))
    _maybe(rng, s, 0.3, "minItems", lambda: rng.randint(0, 2))
    _maybe(rng, s, 0.5, "maxItems", lambda: rng.randint(0, 3))
    _maybe(rng, s, 0.15, "uniqueItems", lambda: True)


def _object(rng: random.Random, s: dict[str, Any], depth: int) -> None:
    name = lambda: rng.choice(NAMES)  # noqa: E731
    if depth:
        _maybe(rng, s, 0.8, "properties", lambda: {name(): _schema(rng, depth - 1) for _ in range(rng.randint(1, 3))})
        _maybe(rng, s, 0.2, "patternProperties", lambda: {rng.choice(PATTERNS): _schema(rng, depth - 1)})
        _maybe(rng, s, 0.4, "additionalProperties", lambda: rng.choice([False, True, _schema(rng, depth - 1)]))
        names = [{"pattern": rng.choice(PATTERNS)}, {"maxLength": 2}, {"enum": ["a", "b", "q"]}, _schema(rng, 0)]
        _maybe(rng, s, 0.1, "propertyNames", lambda: rng.choice(names))
        _maybe(rng, s, 0.1, "unevaluatedProperties", lambda: rng.choice([False, _schema(rng, 0)]))
        _maybe(rng, s, 0.1, "dependentSchemas", lambda: {name(): _schema(rng, depth - 1)})
    _maybe(rng, s, 0.4, "required", lambda: sorted({name() for _ in range(rng.randint(1, 2))}))
    _maybe(rng, s, 0.15, "minProperties", lambda: rng.randint(0, 2))
    _maybe(rng, s, 0.15, "maxProperties", lambda: rng.randint(0, 3))
    _maybe(rng, s, 0.1, "dependentRequired", lambda: {name(): [name()]})


def _combined(rng: random.Random, s: dict[str, Any], depth: int) -> None:
    some = lambda most: [_schema(rng, depth) for _ in range(rng.randint(1, most))]  # noqa: E731
    _maybe(rng, s, 0.12, "allOf", lambda: some(2))
    _maybe(rng, s, 0.15, "anyOf", lambda: some(3))
    _maybe(rng, s, 0.12, "oneOf", lambda: some(3))
    _maybe(rng, s, 0.1, "not", lambda: _schema(rng, depth))
    if rng.random() < 0.1:
        s["if"] = _schema(rng, depth)
        _maybe(rng, s, 0.8, "then", lambda: _schema(rng, depth))
        _maybe(rng, s, 0.6, "else", lambda: _schema(rng, depth))
    _maybe(rng, s, 0.05, "$ref", lambda: "#/$defs/r")
