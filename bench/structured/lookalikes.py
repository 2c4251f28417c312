"""Schemas as public collections hold them, invented from a seed: packages, build configurations, parts of API
descriptions, parameters of tools, forms with conditions, dictionaries, trees."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from patterns import pattern

Rng = random.Random
Schema = dict[str, Any]
WORDS = [
    "name",
    "version",
    "on",
    "jobs",
    "env",
    "image",
    "path",
    "type",
    "id",
    "$ref",
    "x-y",
    "a b",
    'q"t',
    "b\\s",
    "é",
    "tags",
]
FORMATS = ["date", "time", "date-time", "email", "uri", "uuid", "ipv4", "ipv6", "hostname", "duration", "uri-reference"]
VALUES = ["on", "off", 'say "hi"', "back\\slash", "line\nend", "tab\t", "é😀", "", "/", "null", "a,b"]


def text(rng: Rng) -> Schema:
    """A string of some kind."""
    made: Schema = {"type": "string"}
    kind = rng.random()
    if kind < 0.45:
        made["pattern"] = pattern(rng)
    elif kind < 0.55:
        made["format"] = rng.choice(FORMATS)
    elif kind < 0.7:
        return {"enum": rng.sample(VALUES, rng.randint(1, 5))}
    elif kind < 0.8:
        made["not"] = rng.choice([{"const": rng.choice(VALUES)}, {"enum": rng.sample(VALUES, 3)}, {"maxLength": 2}])
    if rng.random() < 0.3 and "enum" not in made:
        made["maxLength"] = rng.randint(3, 60)
    if rng.random() < 0.2:
        made["minLength"] = rng.randint(0, 3)
    return made


def value(rng: Rng, depth: int = 2) -> Schema:
    """A schema of any kind."""
    kind = rng.random()
    if depth <= 0 or kind < 0.45:
        return text(rng)
    if kind < 0.55:
        number: Schema = {"type": rng.choice(["integer", "number"])}
        number |= rng.choice(
            [{}, {"minimum": 0}, {"minimum": 1, "maximum": 65535}, {"multipleOf": 0.25}, {"maximum": 10}]
        )
        return number | rng.choice([{}, {"exclusiveMinimum": 0}, {"not": {"const": 3}}])
    if kind < 0.6:
        return {"type": "boolean"}
    if kind < 0.72:
        items: Schema = {"type": "array", "items": value(rng, depth - 1), "maxItems": rng.randint(1, 4)}
        return items | rng.choice([{}, {"minItems": 1}])
    if kind < 0.8:
        return {"anyOf": [value(rng, depth - 1), {"type": "null"}, text(rng)]}
    return record(rng, depth - 1)


def record(rng: Rng, depth: int = 2) -> Schema:
    """An object with listed names."""
    names = rng.sample(WORDS, rng.randint(1, 6))
    made: Schema = {"type": "object", "properties": {n: value(rng, depth - 1) for n in names}}
    made["required"] = [n for n in names if rng.random() < 0.6]
    if rng.random() < 0.6:
        made["additionalProperties"] = rng.choice([False, False, text(rng)])
    if rng.random() < 0.1:
        made["dependentRequired"] = {names[0]: [names[-1]]}
    return made


def _dictionary(rng: Rng) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "object", "patternProperties": {pattern(rng): value(rng)}, "additionalProperties": False}
    if kind == 1:
        return {"type": "object", "propertyNames": {"pattern": pattern(rng)}, "additionalProperties": value(rng, 1)}
    if kind == 2:
        return {"type": "object", "propertyNames": {"not": {"enum": rng.sample(VALUES, 3)}}, "maxProperties": 3}
    return {"type": "object", "additionalProperties": value(rng, 1), "minProperties": 1, "maxProperties": 4}


def _package(rng: Rng) -> Schema:
    versions = {
        "type": "object",
        "propertyNames": {"pattern": pattern(rng)},
        "additionalProperties": {"type": "string"},
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"person": {"anyOf": [text(rng), record(rng, 1)]}, "versions": versions},
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 214, "minLength": 1, "pattern": pattern(rng)},
            "version": {"type": "string", "pattern": "^\\d+\\.\\d+\\.\\d+$"},
            "keywords": {"type": "array", "items": text(rng), "maxItems": 3},
            "author": {"$ref": "#/definitions/person"},
            "dependencies": {"$ref": "#/definitions/versions"},
            "bin": {"oneOf": [{"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}]},
            "private": {"type": ["boolean", "null"]},
        },
        "required": ["name", "version"],
        "patternProperties": {"^_": {"type": "null"}} if rng.random() < 0.3 else {},
    }


def _pipeline(rng: Rng) -> Schema:
    step: Schema = {
        "type": "object",
        "oneOf": [{"required": ["run"]}, {"required": ["uses"]}],
        "properties": {
            "name": text(rng),
            "run": {"type": "string"},
            "uses": {"type": "string", "pattern": pattern(rng)},
        },
        "additionalProperties": False,
    }
    job = {"type": "object", "properties": {"steps": {"type": "array", "items": step, "minItems": 1, "maxItems": 3}}}
    job |= {"required": ["steps"], "additionalProperties": False}
    return {
        "type": "object",
        "properties": {
            "on": {
                "oneOf": [
                    {"enum": ["push", "pull_request"]},
                    {"type": "array", "items": {"enum": ["push"]}, "maxItems": 2},
                ]
            },
            "jobs": {"type": "object", "patternProperties": {"^[_a-zA-Z][a-zA-Z0-9_-]*$": job}, "minProperties": 1},
        },
        "required": ["on", "jobs"],
        "additionalProperties": False,
    }


def _operation(rng: Rng) -> Schema:
    reference = {
        "type": "object",
        "properties": {"$ref": {"type": "string", "format": "uri-reference"}},
        "required": ["$ref"],
    }
    parameter = {
        "type": "object",
        "properties": {"name": text(rng), "in": {"enum": ["query", "header", "path"]}, "required": {"type": "boolean"}},
        "required": ["name", "in"],
        "if": {"properties": {"in": {"const": "path"}}},
        "then": {"properties": {"required": {"const": True}}, "required": ["required"]},
    }
    return {
        "type": "object",
        "properties": {
            "operationId": {"type": "string", "pattern": pattern(rng)},
            "parameters": {
                "type": "array",
                "items": {"anyOf": [{**reference, "additionalProperties": False}, parameter]},
                "maxItems": 2,
            },
            "responses": {
                "type": "object",
                "patternProperties": {"^[1-5](?:\\d{2}|XX)$": value(rng, 1)},
                "additionalProperties": False,
            },
        },
        "required": ["responses"],
        "patternProperties": {"^x-": True},
        "additionalProperties": False,
    }


def _tool(rng: Rng) -> Schema:
    made = record(rng, 2)
    made["additionalProperties"] = False
    for schema in made["properties"].values():
        schema["description"] = rng.choice(["The place, e.g. Paris", "A path such as C:\\x", 'How "much"?'])
    return made


def _form(rng: Rng) -> Schema:
    kinds = rng.sample(["a", "b", "c", 'd"', "e\\"], rng.randint(2, 4))
    options = [
        {"type": "object", "properties": {"kind": {"const": k}, "value": value(rng, 1)}, "required": ["kind", "value"]}
        for k in kinds
    ]
    if rng.random() < 0.5:
        return {rng.choice(["oneOf", "anyOf"]): [{**o, "additionalProperties": False} for o in options]}
    first = {"properties": {"kind": {"const": kinds[0]}}, "required": ["kind"]}
    return {
        "type": "object",
        "properties": {"kind": {"enum": kinds}, "value": {}},
        "required": ["kind"],
        "additionalProperties": False,
        "if": first,
        "then": {"properties": {"value": text(rng)}, "required": ["value"]},
        "else": {"properties": {"value": {"type": "integer"}}},
    }


def _tree(rng: Rng) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "label": text(rng),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        },
        "required": ["label"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, rng.choice(["$ref", "$ref"]): "#/$defs/node"}


def _overlap(rng: Rng) -> Schema:
    """Options that meet, and what one of them leaves."""
    return rng.choice(
        [
            {"oneOf": [{"type": "string", "maxLength": 5}, {"enum": rng.sample(VALUES, 2)}, {"type": "integer"}]},
            {"type": "string", "not": {"enum": rng.sample(VALUES, 4)}, "maxLength": 12},
            {
                "allOf": [
                    {"type": "string", "pattern": pattern(rng)},
                    {"maxLength": 30},
                    {"not": {"const": rng.choice(VALUES)}},
                ]
            },
            {"if": {"enum": rng.sample(VALUES, 2)}, "then": {"maxLength": 4}, "else": {"type": ["string", "null"]}},
            {"oneOf": [{"type": "number", "minimum": 3}, {"type": "integer", "maximum": 9}, {"const": '"'}]},
            {"type": "array", "prefixItems": [text(rng), value(rng, 1)], "items": False, "minItems": 1},
            {"type": "array", "uniqueItems": True, "items": {"enum": VALUES[:4]}, "maxItems": 3},
            {"type": "array", "contains": {"const": rng.choice(VALUES)}, "items": {"type": "string"}, "maxItems": 3},
        ]
    )


FAMILIES: dict[str, Callable[[Rng], Schema]] = {
    "text": text,
    "record": record,
    "dictionary": _dictionary,
    "package": _package,
    "pipeline": _pipeline,
    "operation": _operation,
    "tool": _tool,
    "form": _form,
    "tree": _tree,
    "overlap": _overlap,
}


def lookalike(seed: int) -> tuple[str, Schema]:
    """A family's name and one of its schemas; half are single strings with a pattern."""
    rng = random.Random(seed)
    if seed % 2:
        return "pattern", {
            "type": "string",
            "pattern": pattern(rng),
            **rng.choice([{}, {}, {"maxLength": rng.randint(4, 90)}]),
        }
    name = rng.choice(list(FAMILIES))
    return name, FAMILIES[name](rng)
