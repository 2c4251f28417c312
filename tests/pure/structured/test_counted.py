"""minProperties and maxProperties: choices of names that need no counting, against every set of names."""

from __future__ import annotations

import json
from itertools import combinations, product

import pytest
from jsonschema import Draft202012Validator
from tests.pure.structured.bytewise import compiled, says

from tokenmill.core.errors import ParameterError
from tokenmill.structured.counted import MAX_CHOICES, choices


def subsets(names):
    return [frozenset(s) for size in range(len(names) + 1) for s in combinations(names, size)]


@pytest.mark.parametrize("opened", [False, True])
def test_every_set_of_names_is_in_one_choice(opened):
    for count, lo in product(range(6), range(-1, 8)):
        names = "abcdef"[:count]
        for hi in (None, *range(-1, count + 2)):
            found = []
            for choice in choices(names, lo, hi, opened=opened):
                for more in subsets(choice.free):
                    whole = more | set(choice.there)
                    most = 1 if choice.unlisted is None else 9 if hi is None else hi - len(whole) + 1
                    found += [(whole, unlisted) for unlisted in range(choice.unlisted or 0, most)]
            most = 99 if hi is None else hi
            wanted = [(listed, free) for listed in subsets(names) for free in range(9 if opened else 1)
                      if lo <= len(listed) + free <= most and len(listed) >= lo - opened]  # fmt: skip
            assert len(found) == len(set(found)) and set(found) == set(wanted), (names, lo, hi)


def test_at_least_one_of_many_is_few_choices():
    assert len(choices([str(i) for i in range(100)], 1, None, opened=False)) == 100
    assert len(choices([str(i) for i in range(100)], 0, 1, opened=False)) == 100
    assert len(choices([str(i) for i in range(40)], 0, 39, opened=False)) == 40
    for count, lo, hi in ((16, 8, 8), (10**3, 1, None), (10**3, 500, 500)):
        assert choices([str(i) for i in range(count)], lo, hi, opened=False) is None


NAMES = [f"n{i}" for i in range(9)]
LISTED = {name: {"type": "integer"} for name in NAMES}
SHAPES = {
    "closed": {"properties": LISTED, "additionalProperties": False},
    "open": {"properties": LISTED},
    "held": {"properties": LISTED, "required": ["n3"], "additionalProperties": {"const": 1}},
    "patterned": {"properties": {name: {} for name in NAMES[:4]}, "patternProperties": {"^z": {"const": 1}},
                  "additionalProperties": False},
}  # fmt: skip
COUNTS = [{"minProperties": 1}, {"minProperties": 2}, {"maxProperties": 1}, {"maxProperties": 2},
          {"minProperties": 1, "maxProperties": 2}]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", COUNTS)
def test_more_names_than_eight_are_counted(shape, count):
    """Nothing wrong is accepted; what is refused has two unlisted names, which minProperties counts once."""
    schema = {"type": "object", **SHAPES[shape], **count}
    validator = Draft202012Validator(schema)
    constraint = compiled(schema)
    listed = list(SHAPES[shape]["properties"])
    for names in [s for size in (0, 1, 2, 3, len(listed)) for s in combinations(listed, size)]:
        for free in ((), ("z",), ("zz", "zy")):
            value = dict.fromkeys((*names, *free), 1)
            said, right = says(constraint, json.dumps(value)), validator.is_valid(value)
            narrow = len(names) + 1 < count.get("minProperties", 0)
            assert said == (right and not narrow), value


def test_what_is_too_much_is_refused():
    many = {"properties": {str(i): {} for i in range(30)}, "additionalProperties": False}
    for count in ({"minProperties": 10}, {"maxProperties": 10}):
        with pytest.raises(ParameterError, match=f"more than {MAX_CHOICES} choices"):
            compiled({"type": "object", **many, **count})
    with pytest.raises(ParameterError, match="names beside patternProperties needs"):
        compiled(
            {"type": "object", "properties": {"a": {}, "b": {}}, "patternProperties": {"^z": {}}, "maxProperties": 1}
        )
    with pytest.raises(ParameterError, match="one unlisted name"):
        compiled({"type": "object", "properties": {"a": {}}, "minProperties": 3})
