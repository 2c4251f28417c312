"""Finished answers are judged once more, where that is asked for: what fits is silent, what does not is logged."""

from __future__ import annotations

import json
import random

import pytest
from tests.pure.structured.bytewise import COMPILER, END, byte_vocabulary, speak
from tests.pure.structured.schemas import random_schema, random_value

from tokenmill.core.errors import ParameterError, UserError
from tokenmill.structured import regex
from tokenmill.structured.check import Checker
from tokenmill.structured.compile import Compiler
from tokenmill.structured.lowering import lower_spec


def checker(schema):
    """The checker and a constraint of a schema."""
    constraint = COMPILER.constraint({"json": json.dumps(schema)})
    return Checker.of(constraint.compiled.text), constraint


def test_it_says_of_answers_what_the_grammar_says():
    rng, fits, misfits = random.Random(4), 0, 0
    for _ in range(150):
        schema = random_schema(rng, 2)
        try:
            judge, constraint = checker(schema)
        except UserError:
            continue
        said = speak(constraint, rng)
        if said is not None:
            assert judge.misfit(said.encode()) is None, (schema, said)
            fits += 1
        for _ in range(5):
            data = json.dumps(random_value(rng, 3), ensure_ascii=False).encode()
            if judge.misfit(data) is not None:
                assert constraint.validate([*data, END]) <= len(data) or constraint.validate([*data]) < len(data)
                misfits += 1
    assert fits > 50 and misfits > 100


@pytest.mark.parametrize(
    ("schema", "answer", "place"),
    [
        ({"type": "object", "properties": {"a": {"pattern": "^x", "type": "string"}}}, '{"a": "y"}', "/a: pattern"),
        ({"type": "object", "additionalProperties": {"type": "null"}}, '{"secret": 1}', "/*: type"),
        ({"type": "array", "items": {"minimum": 3, "type": "integer"}}, "[4, 2]", "/1: minimum"),
        ({"type": "array", "maxItems": 1}, "[4, 2]", "/: minItems or maxItems"),
        ({"enum": ["a", 1]}, "true", "/: enum"),
        ({"type": "object", "required": ["a"], "properties": {"a": {}}}, "{}", "required"),
        ({"type": "string", "minLength": 2}, '"é"', "minLength"),
        ({"properties": {"a": False}, "type": "object"}, '{"a": 1}', "nothing is allowed"),
        ({"anyOf": [{"type": "array", "items": False}, {"type": "null"}]}, "[1]", ""),
        ({"type": "integer"}, "{", "not JSON"),
    ],
)
def test_it_names_the_place(schema, answer, place):
    judge, _ = checker(schema)
    found = judge.misfit(answer.encode())
    assert found is not None and place in found and "secret" not in found


def test_a_fault_of_the_engine_is_found_and_logged(monkeypatch, caplog):
    monkeypatch.setattr(regex, "_sayable", lambda node: node)  # classes as the engine misreads them
    spec = {"json": {"type": "string", "pattern": '^[^"]$'}}
    for share, found in ((0.0, 0), (0.25, 2), (1.0, 8)):
        compiler = Compiler(byte_vocabulary, share)
        monkeypatch.setattr(compiler._helper, "lower", lower_spec)  # here, where classes are misread
        caplog.clear()
        for _ in range(8):
            constraint = compiler.constraint(spec).fork()
            constraint.accept(list(b'"\\""'))
            assert constraint.finished() and constraint.finished()
        assert len([r for r in caplog.records if "does not fit" in r.message]) == found
    caplog.clear()
    right = Compiler(byte_vocabulary, 1.0).constraint({"json": {"type": "string", "maxLength": 3}})
    right.accept(list(b'"a"'))
    assert right.finished() and not caplog.records


def test_other_grammars_are_left_alone():
    for spec in ({"regex": "a"}, {"choice": ["a"]}, {"grammar": 'start: "a"'}):
        assert Checker.of(COMPILER.constraint(spec).compiled.text) is None


def test_the_switch_is_a_share():
    from tokenmill.core.config import make_config

    assert make_config(check_structured=0.5).execute.check_structured == 0.5
    for wrong in (-1, 1.5, "often", float("nan")):
        with pytest.raises(ParameterError, match="check_structured"):
            make_config(check_structured=wrong)
