"""unevaluatedProperties and unevaluatedItems: exactly what jsonschema admits, by value, in both directions."""

from __future__ import annotations

import json
import random
from itertools import permutations, product
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tests.pure.structured.bytewise import compiled, says

from tokenmill.core.errors import ParameterError, UserError

BASE = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
BY_HAND: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("a reference", {"$ref": "#/$defs/base", "properties": {"b": {}}, "unevaluatedProperties": False,
                     "$defs": {"base": BASE}}, [{"b": 1, "a": 1}, {"a": 1}, 3], [{"a": 1, "c": 1}, {"b": 1}]),
    ("all of them", {"allOf": [BASE, {"properties": {"b": {}}}], "unevaluatedProperties": {"type": "null"}},
     [{"a": 1, "b": 2}, {"a": 1, "z": None}], [{"a": 1, "z": 1}]),
    ("any of them", {"anyOf": [BASE, {"properties": {"b": {"type": "integer"}}}], "unevaluatedProperties": False},
     [{"a": 1}, {"a": 1, "b": 2}, {"b": 2}, {}], [{"a": "x"}, {"a": 1, "b": "x"}, {"c": 1}]),
    ("one of them", {"oneOf": [{"properties": {"kind": {"const": "x"}, "a": {}}, "required": ["kind"]},
                               {"properties": {"kind": {"const": "y"}, "b": {}}, "required": ["kind"]}],
                     "unevaluatedProperties": False},
     [{"kind": "x", "a": 1}, {"kind": "y", "b": 1}], [{"kind": "x", "b": 1}, {"kind": "z"}]),
    ("a condition", {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"properties": {"b": {}}},
                     "else": {"properties": {"c": {}, "a": {}}}, "unevaluatedProperties": False},
     [{"a": 1, "b": 2}, {"c": 3}, {"c": 3, "a": 2}], [{"a": 1, "c": 3}, {"a": 2, "b": 1}]),
    ("a condition alone", {"if": BASE, "unevaluatedProperties": False}, [{}, {"a": 1}], [{"a": "x"}, {"b": 1}]),
    ("what depends", {"properties": {"a": {}}, "dependentSchemas": {"a": {"properties": {"b": {}}}},
                      "unevaluatedProperties": False}, [{"a": 1, "b": 1}, {}], [{"b": 1}]),
    ("what not says is not seen", {"not": {"not": BASE}, "unevaluatedProperties": False}, [3], [{"a": 1}]),
    ("within", {"allOf": [{"properties": {"b": {}}, "unevaluatedProperties": True}], "unevaluatedProperties": False},
     [{"b": 1}, {"z": 1}], []),
    ("additional ones are seen", {"allOf": [BASE], "additionalProperties": {"const": 1},
                                  "unevaluatedProperties": False},
     [{"a": 1}, {"a": 1, "b": 1}], [{"a": 2}, {"a": 1, "b": 2}]),
    ("items", {"allOf": [{"prefixItems": [{"const": 1}]}], "prefixItems": [{}, {"type": "string"}],
               "unevaluatedItems": False}, [[1, "a"], [1], [], {"a": 1}], [[2], [1, "a", 3], [1, 1]]),
    ("items after the first", {"anyOf": [{"prefixItems": [{"const": 1}]},
                                         {"prefixItems": [{"const": 1}, {"const": 2}]}],
                               "unevaluatedItems": {"type": "string"}},
     [[1], [1, 2], [1, "a"], [1, 2, "a"]], [[1, 3], [1, 2, 3]]),
    ("what is contained", {"contains": {"type": "integer"}, "unevaluatedItems": {"type": "string"}},
     [[1], ["a", 1, "b", 2]], [["a"], [1, None]]),
    ("a tree", {"properties": {"next": {"$ref": "#"}}, "allOf": [{"properties": {"v": {}}}],
                "unevaluatedProperties": False}, [{"next": {"next": {"v": 1}}}, {"v": 1}], [{"next": {"z": 1}}]),
]  # fmt: skip


def admitted(constraint, value) -> bool:
    """Said in the order of some schema: objects have the order that their schema gives."""
    if not isinstance(value, dict):
        return says(constraint, json.dumps(value))
    return any(says(constraint, json.dumps(dict(items))) for items in permutations(value.items()))


@pytest.mark.parametrize(("name", "schema", "good", "bad"), BY_HAND)
def test_by_hand(name, schema, good, bad):
    constraint, validator = compiled(schema), Draft202012Validator(schema)
    for value in [*good, *bad]:
        assert validator.is_valid(value) is (value in good), value
        assert admitted(constraint, value) is (value in good), value


NAMES = ("a", "b", "c", "x1")
LEAVES: list[Any] = [{"type": "integer"}, {"type": "string"}, {"const": 1}, {}, True, {"type": "boolean"}]
VALUES = (1, "s", True)
ARRAYS = [list(items) for size in range(4) for items in product(VALUES, repeat=size)]
OBJECTS = [dict(zip(names, values, strict=True)) for size in range(4)
           for names in permutations((*NAMES, "z"), size) if list(names) == sorted(names)
           for values in product(VALUES, repeat=size)]  # fmt: skip


def random_place(rng: random.Random, depth: int) -> dict[str, Any]:
    """Any keywords that evaluate, beside each other."""
    made: dict[str, Any] = {}

    def some(share: float, keyword: str, make: Any) -> None:
        if rng.random() < share:
            made[keyword] = make()

    leaf, name = lambda: rng.choice(LEAVES), lambda: rng.choice(NAMES)
    inner = lambda most: [random_place(rng, depth - 1) for _ in range(rng.randint(1, most))]  # noqa: E731
    some(0.7, "properties", lambda: {name(): leaf() for _ in range(2)})
    some(0.1, "patternProperties", lambda: {"^x": leaf()})
    some(0.1, "additionalProperties", leaf)
    some(0.3, "required", lambda: [name()])
    some(0.2, "prefixItems", lambda: [leaf() for _ in range(rng.randint(1, 2))])
    some(0.1, "items", leaf)
    some(0.15, "contains", leaf)
    if depth:
        some(0.25, "allOf", lambda: inner(2))
        some(0.3, "anyOf", lambda: inner(3))
        some(0.2, "oneOf", lambda: inner(2))
        some(0.1, "not", lambda: random_place(rng, 0))
        some(0.2, "if", lambda: random_place(rng, 0))
        some(0.2, "then", lambda: random_place(rng, depth - 1))
        some(0.15, "else", lambda: random_place(rng, depth - 1))
        some(0.15, "dependentSchemas", lambda: {name(): random_place(rng, depth - 1)})
        some(0.1, "dependentRequired", lambda: {name(): [name()]})
        some(0.15, "$ref", lambda: "#/$defs/d")
    some(
        0.8 if depth == 2 else 0.15,
        "unevaluatedProperties",
        lambda: rng.choice([False, False, {"type": "integer"}, True]),
    )
    some(0.4 if depth == 2 else 0.1, "unevaluatedItems", lambda: rng.choice([False, False, {"type": "integer"}, True]))
    return made


@pytest.mark.parametrize("seed", range(6))
def test_what_is_admitted_is_what_is_valid(seed):
    rng, enforced = random.Random(seed), 0
    for _ in range(12):
        schema = {**random_place(rng, 2), "$defs": {"d": random_place(rng, 0)}}
        validator = Draft202012Validator(schema)
        values = [None, 1, *rng.sample(OBJECTS, 30), *OBJECTS[:12], *rng.sample(ARRAYS, 12)]
        try:
            constraint = compiled(schema)
        except UserError as error:
            assert "no value fits" not in str(error) or not any(map(validator.is_valid, values)), schema
            continue
        enforced += 1
        for value in values:
            assert admitted(constraint, value) == validator.is_valid(value), (schema, value)
    assert enforced >= 4


def test_what_leads_back_to_itself_or_has_too_many_cases_is_refused():
    with pytest.raises(ParameterError, match="leads back to itself"):
        compiled({"$ref": "#", "unevaluatedProperties": False})
    many = {"anyOf": [{"properties": {f"n{i}": {}}} for i in range(12)], "unevaluatedProperties": False}
    with pytest.raises(ParameterError, match="more than 200 cases"):
        compiled(many)
    for keyword, value in (("anyOf", 3), ("dependentSchemas", []), ("$ref", "#/$defs/none"), ("unevaluatedItems", 3)):
        with pytest.raises(ParameterError):
            compiled({keyword: value, "unevaluatedProperties": False})
