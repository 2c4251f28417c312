"""Numbers without bounds stay below the largest double, digits in strings and in other grammars are left alone."""

from __future__ import annotations

import json
import math
import random

import pytest
from tests.pure.structured.bytewise import COMPILER, END, allowed, compiled

from tokenmill.structured.compile import Compiler
from tokenmill.structured.vocabulary import Vocabulary

PIECES = [b"99", b"999", b"e9", b"e999", b"1e9999", b"E+30", b"0" * 8, b"12345678", b'"a', b"e99}", b"e999}"]


def with_pieces():
    table = [bytes([i]) for i in range(256)] + [b"", *PIECES]
    return Vocabulary.of(table, {END}, (END,), lambda text: list(text.encode()))


PIECEWISE = Compiler(with_pieces)
SCHEMAS = [
    *({"type": "number"}, {"type": "integer"}, {"type": "array", "items": {"type": "number"}, "maxItems": 3}),
    *({"type": "number", "minimum": 3}, {"type": "integer", "maximum": -1}, {"type": "number", "multipleOf": 0.5}),
    {"type": "object", "additionalProperties": {"type": ["number", "string"]}, "maxProperties": 2},
    {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^[0-9]+$"}]},
]


def large(constraint, rng, most=700):
    """An answer with numbers as large as they come."""
    vocabulary, said = constraint.vocabulary, bytearray()
    for _ in range(most):
        if constraint.finished():
            break
        choices = allowed(constraint.mask())
        assert choices
        loved = [c for c in choices if set(vocabulary.bytes_of(c)) & set(b"0123456789eE")]
        tokens = loved if loved and rng.random() < 0.995 else choices
        token = max(tokens, key=lambda t: (rng.random() < 0.5, len(vocabulary.bytes_of(t)), t))
        constraint.accept([token])
        said += vocabulary.bytes_of(token)
    return bytes(said) if constraint.finished() else None


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
@pytest.mark.parametrize("compiler", [COMPILER, PIECEWISE], ids=["bytes", "pieces"])
def test_every_number_is_finite(schema, compiler):
    rng, ended = random.Random(2), 0

    def finite(text):
        assert math.isfinite(float(text)), text
        return float(text)

    for _ in range(8):
        said = large(compiler.constraint({"json": schema}), rng)
        if said is not None:
            ended += 1
            json.loads(said, parse_float=finite, parse_int=finite)
    assert ended


def test_where_a_number_may_still_grow():
    number = compiled({"type": "array", "items": {"type": "number"}})
    for text, more in (("[1e", b"9+-"), ("[1e9", b"9,]"), ("[1e-9", b"9"), ("[1e99", b",] "), ("[0.5E+", b"12")):
        twin = number.fork()
        twin.accept(list(text.encode()))
        assert set(more) <= set(allowed(twin.mask()))
    for text in ("[1e99", "[-0.1e-12", "[12E+10", "[" + "7" * 180):
        twin = number.fork()
        twin.accept(list(text.encode()))
        assert not set(b"0123456789") & set(allowed(twin.mask())) and ord("]") in allowed(twin.mask())


def test_digits_elsewhere_are_left_alone():
    for spec, text in (
        ({"json": {"type": "string"}}, '"1e9999'),
        ({"json": {"type": "string", "pattern": "^[0-9]+$"}}, '"' + "7" * 300),
        ({"json": {"type": "string", "pattern": "^[0-9]e[0-9]{4}$"}}, '"1e12'),
        ({"regex": "[0-9]+e[0-9]+,?"}, "1e1234"),
        ({"regex": "[0-9]+"}, "7" * 300),
    ):
        constraint = COMPILER.constraint(spec)
        constraint.accept(list(text.encode()))
        assert ord("5") in allowed(constraint.mask()), spec
