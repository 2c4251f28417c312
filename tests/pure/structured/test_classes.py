"""Character classes inside of JSON strings: exactly their characters, the quote and the backslash among them or not."""

from __future__ import annotations

import json
import random
import re

import pytest
from jsonschema import Draft202012Validator
from tests.pure.structured.bytewise import COMPILER, compiled, says, speak

from tokenmill.core.errors import ParameterError
from tokenmill.structured import regex

CLASSES = [
    *(
        '[^<>:"/\\\\|?*]',
        '[^"]',
        "[^\\\\]",
        '[^"\\\\]',
        "[^\\n]",
        '[^\\n"]',
        "[^\\n\\\\]",
        "[^a]",
        '[^\\x00"]',
        '[^\\t"]',
    ),
    *("[\\x00-\\x1f]", "[\\x00-!]", "[\\x00-\\x7f]", "[\\x00-\\x09\\x0b-\\x1f]", '[\\x00-\\x1f"]', "[\\x00-\\x1f\\\\]"),
    *("[\\s\\S]", "[^]", ".", "\\S", "\\W", "\\D", '[^\\s"]', "[^\\w\\\\]", "[\\x00-\\x1f\\x7f]", "\\n"),
    *("(?:[\\x00-\\x1f]|[#-~])", '(?:[^"]|"x)', '(?:a|[^\\\\"\\x7f])'),
]
CHARS = [*map(chr, range(128)), "\u00a0", "é", "\u2028", "😀"]
UNSAID = {chr(c) for low, high in regex.UNSAID for c in range(low, high + 1)}


def in_python(pattern):
    """ECMA's classes in Python's words; where Python's own read otherwise, neither's are said (below)."""
    space = "\\t\\n\\v\\f\\r \\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\ufeff"
    found = pattern.replace("[^]", "(?s:.)").replace("[\\s\\S]", "(?s:.)").replace('[^\\s"]', f'[^{space}"]')
    found = {".": "[^\\n\\r\\u2028\\u2029]", "\\S": f"[^{space}]"}.get(found, found)
    return re.compile(found, re.ASCII)


def own(pattern):
    """Python's own reading, by which é is part of a word."""
    return pattern.replace("[^]", "(?s:.)")


@pytest.mark.parametrize("given", CLASSES)
def test_a_class_has_its_characters_and_no_others(given):
    python = in_python(given)
    one = compiled({"type": "string", "pattern": f"^{given}$"})
    some = compiled({"type": "string", "pattern": f"^x{given}{{2,}}$", "maxLength": 9})
    for char in CHARS:
        fits = python.fullmatch(char) is not None and char not in UNSAID
        fits = fits and re.fullmatch(own(given), char) is not None
        assert says(one, json.dumps(char, ensure_ascii=False)) is fits, repr(char)
        assert says(some, json.dumps(f"x{char}{char}", ensure_ascii=False)) is fits, repr(char)


@pytest.mark.parametrize("given", ["^[\\x00]$", "^\\x00+$", "^a[\\x7f]{2}", "^(\\x01|b\\x02)$", "\\0"])
def test_a_pattern_that_nothing_said_can_match_is_refused(given):
    with pytest.raises(ParameterError, match="never said"):
        compiled({"type": "string", "pattern": given})


@pytest.mark.parametrize("given", ["^a\\x00?b$", "^a(\\x00|c\\x01)*b$", "^(a|\\x00)b$", "^a[\\x00-\\x08]?[\\x00b]$"])
def test_parts_that_are_never_said_end_nothing(given):
    constraint = compiled({"type": "string", "pattern": given})
    assert says(constraint, '"ab"')
    for seed in range(9):
        assert speak(constraint, random.Random(seed), loved=b"\\") in ('"ab"', '"a\\bb"')


ODD = '^[^<>:"/\\\\|?*]+$'


@pytest.mark.parametrize(
    ("given", "width"),
    [
        *(("^ab$", (2, 2)), ("^a?$", (0, 1)), ("a", (1, None)), ("^(a|bcd)$", (1, 3)), ("^(a{2,3}b?){2}$", (4, 8))),
        *(("^[^\\x00]*$", (0, None)), ("^😀[\\s\\S]$", (2, 2)), ("^(a*){3}$", (0, None)), ("^(a{0}){5,}$", (0, 0))),
        *(("^(|a|b{3})c$", (1, 4)), ("^\\x00?x$", (1, 1)), ("^[\\u{1F600}-\\u{1F64F}]{2,}$", (2, None))),
    ],
)
def test_lengths_of_a_pattern(given, width):
    assert regex.width(regex.search(given)) == width


SCHEMAS = [
    {"type": "string", "pattern": ODD},
    {"type": "string", "pattern": "^[^\\x22\\x5c]{2,5}$", "minLength": 3},
    {"type": "string", "not": {"const": '"'}},
    {"type": "string", "not": {"enum": ['"', "\\", "\n", 'a"', "a\\"]}},
    {"oneOf": [{"const": '"'}, {"type": "string", "maxLength": 3}, {"const": "\\"}]},
    {"if": {"const": "\\"}, "then": {"type": "integer"}, "else": {"type": "string", "maxLength": 4}},
    {"type": "object", "propertyNames": {"pattern": ODD}, "additionalProperties": {"type": "integer", "maximum": 9}},
    {"type": "object", "propertyNames": {"not": {"enum": ['"', "\\"]}}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {ODD: {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"pattern": ODD, "type": "string"}}, "maxProperties": 1},
    {"allOf": [{"pattern": '^[^"]*$'}, {"pattern": "^[^\\\\]*$"}], "type": "string"},
    {"type": "string", "format": "json-pointer"},
    {"type": "array", "items": {"enum": ["\0", "a", '"'], "not": {"pattern": "^[^a]$"}}, "uniqueItems": True},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_answers_that_love_quotes_are_valid(schema):
    constraint = compiled(schema)
    rng, validator, ended = random.Random(1), Draft202012Validator(schema), 0
    for _ in range(30):
        said = speak(constraint, rng, loved=b'\\"\n/u0')
        if said is not None:
            ended += 1
            assert validator.is_valid(json.loads(said)), said
    assert ended


def test_the_same_inside_of_other_grammars():
    schema = {"type": "string", "pattern": ODD}
    begin, end = {"begin": "<a>", "schema": schema, "end": "</a>"}, "</a>"
    for spec, before, after in (
        ({"grammar": f"start: %json {json.dumps(schema)}"}, "", ""),
        ({"structural_tag": {"structures": [begin], "triggers": ["<a"]}}, "<a>", end),
        ({"structural_tag": {"format": {"type": "json_schema", "json_schema": schema}}}, "", ""),
    ):
        constraint = COMPILER.constraint(spec)
        assert says(constraint, f'{before}"ab"{after}')
        assert not says(constraint, f'{before}"a\\"b"{after}') and not says(constraint, f'{before}"a\\\\b"{after}')


@pytest.mark.parametrize("given", [r"\W", r"\D", r"\S", r"[^\w]", r"[^\d]", r"[^\s]", r"[^\W]", r"[\W_]", r"[^\D]"])
def test_opposites_hold_for_every_reader(given):
    """To ECMA-262 a word is ASCII, to Python's `re` it is not: what is said fits both."""
    ours, theirs = re.compile(regex.whole(given)), [re.compile(given), re.compile(given, re.ASCII)]
    for char in map(chr, [*range(0x3000), 0x3000, 0xFEFF, 0xFF10, 0x1D7CE, 0x1F600, 0x10400]):
        if ours.fullmatch(char):
            assert all(each.fullmatch(char) for each in theirs), repr(char)
    assert ours.fullmatch("_") or ours.fullmatch("-") or ours.fullmatch("0")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        *(("(?=a)", "look-around"), ("(?<!a)b", "look-around"), ("(?i)a", "inline flags"), ("(?-i:a)", "inline flags")),
        *(("(?P=x)", "back-references"), ("(a)\\1", "back-references"), ("(?>a)", "atomic"), ("a++", "possessive")),
        *(("[[:alpha:]]+", "different readers"), ("[^a[:^digit:]]", "different readers")),
        *(("[^]]+", "different readers"), ("[]a]", "different readers"), ("a{,}", "different readers")),
        *(("\\p{L}", "Unicode properties"), ("\\P{L}", "Unicode properties"), ("(?#a)", "comments")),
        *((f"a{first}{{2}}", "quantifier follows") for first in ("*", "+", "?", "{2}", "{2,}", "{1,3}?", "{1}")),
        *((f"{before}{{2}}", "repeats nothing") for before in ("", "a|", "(", "(?:", "b(?:c|")),
    ],
)
def test_what_cannot_be_enforced_has_a_name(given, why):
    with pytest.raises(regex.RegexError, match=why):
        regex.whole(given)


def test_pythons_spellings_are_read():
    assert regex.whole(r"\A(?P<year>\d{2})\Z") == regex.whole(r"^(?<year>\d{2})$")


@pytest.mark.parametrize("given", [{"choice": ["a\ud800"]}, {"regex": "\udc00"}, {"json": '{"const":"\ud800"}'}])
def test_half_a_character_is_refused(given):
    with pytest.raises(ParameterError, match="surrogate"):
        COMPILER.constraint(given)
