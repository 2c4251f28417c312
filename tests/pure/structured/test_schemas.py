"""JSON Schema: enforced exactly or refused by name; jsonschema is the oracle."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft201909Validator, Draft202012Validator
from tests.pure.structured.bytewise import COMPILER, compiled, says, speak
from tests.pure.structured.schemas import older, random_schema, random_value
from tests.pure.structured.table import REFUSED, TABLE
from tests.thinned import WHOLE

from tokenmill.core.errors import ParameterError, UserError
from tokenmill.structured.worker import answer

CASES = [(title, i) for title, rows in TABLE.items() for i in range(len(rows))]


def text_of(value):
    return json.dumps(value, ensure_ascii=False)


def oracle(schema):
    old = isinstance(schema, dict) and (isinstance(schema.get("items"), list) or "dependencies" in schema)
    return (Draft7Validator if old else Draft202012Validator)(schema)


@pytest.mark.parametrize(("title", "i"), CASES)
def test_by_hand(title, i):
    schema, good, bad = TABLE[title][i]
    if not good:
        with pytest.raises(ParameterError, match="no value fits"):
            compiled(schema)
        return
    constraint = compiled(schema)
    for value in good:
        assert says(constraint, text_of(value)), (schema, value)
    for value in bad:
        assert not says(constraint, text_of(value)), (schema, value)


def test_the_table_is_large_and_right():
    cases = [
        (s, v, ok)
        for rows in TABLE.values()
        for s, good, bad in rows
        for ok in (True, False)
        for v in (good if ok else bad)
    ]
    assert len(cases) >= 300
    for schema, value, ok in cases:
        if isinstance(schema, dict) and ("format" in schema or isinstance(schema.get("exclusiveMinimum"), bool)):
            continue  # the oracle takes formats for annotations, and does not know draft 4
        if isinstance(schema, dict) and "ud83d" in schema.get("pattern", ""):
            continue  # Python reads no pairs
        if isinstance(schema, dict) and schema.get("pattern") in ("^\\d+$", "^\\W$", "^\\s$", "^.$"):
            continue  # Python's classes are not ECMA's
        assert oracle(schema).is_valid(value) is ok, (schema, value)


@pytest.mark.parametrize(("schema", "place", "word"), REFUSED)
def test_refused_by_name_and_place(schema, place, word):
    with pytest.raises(ParameterError) as caught:
        compiled(schema)
    message = str(caught.value)
    assert place in message and word in message, message
    assert caught.value.param == "structured_outputs"


SCHEMAS = [schema for rows in [*TABLE.values(), REFUSED] for schema, *_ in rows if isinstance(schema, dict)]
KEYWORDS = sorted({keyword for schema in SCHEMAS for keyword in schema})


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_values_of_a_wrong_kind_are_named(keyword):
    """Whatever a keyword is given, the answer is about that keyword: no error of our own is behind it."""
    odd = [None, True, 0, -1, 1.5, "", "^(", [], [1], ["a"], [["a"]], [{}], {"a": 1}, {"a": [1]}, {"a": None}, 1e30]
    for value in odd:
        for beside in ({}, {"properties": {"a": {}}}, {"if": {}, "contains": {}}):
            found = answer({"spec": {"json": text_of({**beside, keyword: value})}, "reasoning": None})
            assert "could not be read" not in found.get("error", "") and "engine" not in found.get("error", ""), value


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_accepted_is_valid(seed):
    rng = random.Random(seed)
    schema = random_schema(rng, rng.randint(0, 3))
    validator = Draft202012Validator(schema)
    try:
        constraint = compiled(schema)
    except UserError as error:
        if "no value fits" in str(error):
            assert not any(validator.is_valid(random_value(rng, 2)) for _ in range(5))
        return
    for _ in range(5):
        value = random_value(rng, 3)
        if says(constraint, text_of(value)):
            assert validator.is_valid(value), (schema, value)
    for _ in range(2):
        said = speak(constraint, rng)
        if said is not None:
            assert validator.is_valid(json.loads(said)), (schema, said)


DRAFTS = {
    "4": "http://json-schema.org/draft-04/schema#",
    "6": "http://json-schema.org/draft-06/schema#",
    "7": "http://json-schema.org/draft-07/schema",
    "2019": "https://json-schema.org/draft/2019-09/schema",
    "2020": "https://json-schema.org/draft/2020-12/schema#",
}
BY_DRAFT = [  # a schema, a value, and the drafts that admit it (the others do not, or refuse the schema with --)
    ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [1], "2020"),
    ({"prefixItems": [{"type": "integer"}]}, ["a"], "4 6 7 2019"),
    ({"items": [{"type": "integer"}], "additionalItems": False}, [1], "4 6 7 2019 --2020"),
    ({"items": [{"type": "integer"}], "additionalItems": False}, [1, 2], "--2020"),
    ({"items": {"items": [{}]}}, [[1]], "4 6 7 2019 --2020"),
    ({"items": {"type": "integer"}, "additionalItems": False}, [1, 2], "4 6 7 2019 2020"),
    ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, 1, "--6 --7 --2019 --2020"),
    ({"type": "integer", "exclusiveMaximum": 1}, 0, "--4 6 7 2019 2020"),
    ({"const": 1}, 2, "4"),
    ({"contains": {"const": 1}}, [], "4"),
    ({"contains": {"type": "null"}, "minContains": 2}, [None], "4 6 7"),
    ({"propertyNames": {"enum": ["a"]}}, {"b": 1}, "4"),
    ({"if": {"type": "integer"}, "then": {"minimum": 5}}, 1, "4 6"),
    ({"type": "string", "contentEncoding": "base64"}, "?", "4 6"),
    ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, "4 6 7"),
    ({"dependentSchemas": {"a": False}}, {"a": 1}, "4 6 7"),
    ({"dependencies": {"a": ["b"]}}, {"a": 1}, ""),
    ({"properties": {"a": {}}, "unevaluatedProperties": False}, {"b": 1}, "4 6 7"),
    ({"contains": {"type": "integer"}, "unevaluatedItems": False}, [1], "4 6 7 2020"),
    ({"$ref": "#/definitions/a", "maxLength": 1, "definitions": {"a": {"type": "string"}}}, "ab", "4 6 7"),
    ({"properties": {"a": {"$ref": "#/$defs/a", "enum": [1]}}, "$defs": {"a": {"type": "integer"}}}, {"a": 2}, "4 6 7"),
    ({"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "null"}}}, None, "--4 --6 --7 2019 2020"),
    ({"allOf": [{"$ref": "#a"}], "$defs": {"x": {"$id": "#a", "type": "null"}}}, None, "--4 6 7 2019 2020"),
    ({"allOf": [{"$ref": "#a"}], "$defs": {"x": {"id": "#a", "type": "null"}}}, None, "4 --6 --7 --2019 --2020"),
    ({"items": {"$schema": DRAFTS["2020"], "prefixItems": [{"type": "null"}]}}, [[1]], ""),
]


@pytest.mark.parametrize("i", range(len(BY_DRAFT)))
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_schema_means_what_its_draft_says(draft, i):
    schema, value, said = BY_DRAFT[i]
    schema = {**schema, "$schema": DRAFTS[draft]}
    if f"--{draft}" in said:
        with pytest.raises(ParameterError, match=r"draft|must be a number|no anchor"):
            compiled(schema)
    else:
        assert says(compiled(schema), text_of(value)) is (draft in said.split())


def test_a_draft_that_is_not_read_is_named():
    with pytest.raises(ParameterError, match=r"#/\$schema.*drafts 4 to 2020-12"):
        compiled({"$schema": "http://json-schema.org/draft-03/schema#", "type": "string"})
    with pytest.raises(ParameterError, match=r"#/items/\$schema must be a string"):
        compiled({"items": {"$schema": 7, "type": "string"}})
    for own in ("https://example.com/mine", "http://json-schema.org/schema#"):  # all drafts together
        assert not says(compiled({"$schema": own, "prefixItems": [{"type": "null"}], "enum": [[1], [None]]}), "[1]")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_accepted_in_a_draft_is_valid_there(seed):
    rng = random.Random(seed)
    draft = rng.choice(["7", "2019"])  # the oracles for 4 and 2020 take other forms of some keywords
    schema = older(rng, random_schema(rng, rng.randint(0, 3))) | {"$schema": DRAFTS[draft]}
    validator = {"7": Draft7Validator, "2019": Draft201909Validator}[draft](schema)
    try:
        constraint = compiled(schema)
    except UserError:
        return
    for _ in range(5):
        value = random_value(rng, 3)
        assert not says(constraint, text_of(value)) or validator.is_valid(value), (schema, value)


def test_most_random_schemas_are_enforced():
    rng = random.Random(3)
    found = {"enforced": 0, "empty": 0, "refused": 0}
    for _ in range(300 if WHOLE else 120):
        try:
            compiled(random_schema(rng, 3))
            found["enforced"] += 1
        except UserError as error:
            found["empty" if "no value" in str(error) or "nsatisfiable" in str(error) else "refused"] += 1
    assert found["refused"] < 0.2 * (found["enforced"] + found["refused"]), found


def test_key_order_is_the_schemas():
    constraint = compiled({"properties": {"b": {}, "a": {}}, "type": "object"})
    assert says(constraint, '{"b":1,"a":2}') and not says(constraint, '{"a":1,"b":2}')


def test_a_name_never_comes_twice_with_another_meaning():
    constraint = compiled({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    assert not says(constraint, '{"a":1,"a":2}')
    assert not says(constraint, '{"a":1,"\\u0061":2}')


def test_white_space_switches():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    spaced = '{\n  "a": 1\n}'
    assert says(compiled(schema), spaced) and says(compiled(schema), '{"a":1}')
    assert not says(compiled(schema), '{\n\n\n"a": 1}')
    compact = compiled(schema, disable_any_whitespace=True)
    assert says(compact, '{"a":1}') and not says(compact, '{"a": 1}')
    tabs = compiled(schema, whitespace_pattern="\\t{3}")
    assert says(tabs, '{"a":\t\t\t1}') and not says(tabs, '{"a": 1}')
    closed = compiled(schema, disable_additional_properties=True)
    assert says(closed, '{"a":1}') and not says(closed, '{"a":1,"b":2}') and says(compiled(schema), '{"a":1,"b":2}')
    for bad in ({"whitespace_pattern": "x*"}, {"whitespace_pattern": "("}, {"disable_any_whitespace": "yes"}):
        with pytest.raises(ParameterError):
            compiled(schema, **bad)


def test_pydantic_models():
    from pydantic import BaseModel, Field

    class Part(BaseModel):
        name: str = Field(max_length=5)
        count: int | None = None

    class Order(BaseModel):
        parts: list[Part] = Field(min_length=1, max_length=2)

    rng = random.Random(1)
    constraint = COMPILER.constraint({"json": Order})
    said = [s for s in (speak(constraint, rng) for _ in range(20)) if s is not None]
    assert said
    for text in said:
        Order.model_validate_json(text)


@pytest.mark.parametrize("more", [{}, {"anyOf": [True]}, {"type": ["object", "integer"]}, {"$ref": "#/$defs/any"}])
@pytest.mark.parametrize("given", ["text", "data", "tag"])
def test_properties_without_a_type_ask_for_an_object(given, more):
    """Examples of TGI, llama.cpp and vLLM leave it out; without it, any number fits. Other keywords say what fits."""
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "$defs": {"any": True}, **more}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    spec = {"text": {"json": json.dumps(schema)}, "data": {"json": schema}, "tag": {"structural_tag": tag}}[given]
    constraint = COMPILER.constraint(spec)
    assert says(constraint, '{"a": 5}') and not says(constraint, "{}")
    assert says(constraint, "7") == bool(more)
