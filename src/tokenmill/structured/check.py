"""Judges finished answers once more. Owns: checking a value against the plain schema that its grammar was made from.

The grammar engine is trusted with patterns inside JSON strings. This reads the same patterns with Python's `re`, so a
difference between the two is found where it happens (--check-structured). Formats and spelling are left to the engine.
Must not know: how plain schemas are made, what is done about a difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenmill.structured.matching import matches

KINDS: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


class Checker:
    """Checks answers of one grammar."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self.defs = schema.get("$defs", {}) if isinstance(schema, dict) else {}

    @classmethod
    def of(cls, grammar: str) -> Checker | None:
        """The checker of a grammar's text; None if the grammar is more than a JSON schema."""
        if not grammar.startswith("{"):
            return None
        parts = json.loads(grammar)["grammars"]
        schema = parts[0].get("json_schema") if len(parts) == 1 else None
        return None if schema is None else cls(schema)

    def misfit(self, answer: bytes) -> str | None:
        """Where an answer violates the schema, and which keyword says so; None: it fits."""
        try:
            value = json.loads(answer)
            return next(self._misfits(self.schema, value, ""), None)
        except ValueError:
            return "it is not JSON"
        except RecursionError:  # an answer that is nested so deeply is not judged
            return None

    def _misfits(self, schema: Any, value: Any, place: str) -> Iterator[str]:
        if isinstance(schema, bool):
            if not schema:
                yield f"{place or '/'}: nothing is allowed there"
            return
        if "$ref" in schema:
            yield from self._misfits(self.defs[schema["$ref"].removeprefix("#/$defs/")], value, place)
            return
        options = schema.get("anyOf")
        if options is not None and all(next(self._misfits(o, value, place), None) for o in options):
            yield f"{place or '/'}: no option of anyOf"
        if "enum" in schema and not any(_same(value, listed) for listed in schema["enum"]):
            yield f"{place or '/'}: enum"
        types = schema.get("type")
        if types is not None and not any(_is(value, t) for t in ([types] if isinstance(types, str) else types)):
            yield f"{place or '/'}: type"
        elif isinstance(value, str):
            yield from _text(schema, value, place)
        elif isinstance(value, list):
            yield from self._items(schema, value, place)
        elif isinstance(value, dict):
            yield from self._members(schema, value, place)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield from _number(schema, value, place)

    def _items(self, schema: dict[str, Any], value: list[Any], place: str) -> Iterator[str]:
        first = schema.get("prefixItems", [])
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{place or '/'}: minItems or maxItems"
        for i, item in enumerate(value):
            yield from self._misfits(first[i] if i < len(first) else schema.get("items", True), item, f"{place}/{i}")

    def _members(self, schema: dict[str, Any], value: dict[str, Any], place: str) -> Iterator[str]:
        if not set(schema.get("required", ())) <= set(value):
            yield f"{place or '/'}: required"
        if len(value) > schema.get("maxProperties", len(value)) or len(value) < schema.get("minProperties", 0):
            yield f"{place or '/'}: minProperties or maxProperties"
        for name, item in value.items():
            if name in schema.get("properties", {}):
                yield from self._misfits(schema["properties"][name], item, f"{place}/{name}")
                continue
            found = [s for p, s in schema.get("patternProperties", {}).items() if matches(_inner(p), name)]
            for part in found or [schema.get("additionalProperties", True)]:
                yield from self._misfits(part, item, f"{place}/*")  # names that the model made up are not shown


def _text(schema: dict[str, Any], value: str, place: str) -> Iterator[str]:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield f"{place or '/'}: minLength or maxLength"
    for part in (schema, *schema.get("allOf", ())):
        if "pattern" in part and not matches(_inner(part["pattern"]), value):
            yield f"{place or '/'}: pattern {part['pattern']}"


def _number(schema: dict[str, Any], value: float, place: str) -> Iterator[str]:
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    outside = (above is not None and value <= above) or (below is not None and value >= below)
    if outside or not low <= value <= high:
        yield f"{place or '/'}: minimum or maximum"


def _inner(pattern: str) -> str:
    """What stands between the anchors of an emitted pattern."""
    return pattern[1:-1]


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(value, KINDS[kind]) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)
