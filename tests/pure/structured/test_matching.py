"""Whether a text matches is known in bounded time, and is what Python's `re` says."""

from __future__ import annotations

import random
import re

import pytest
from tests.cpu_time import least_cpu_time

from tokenmill.structured import regex
from tokenmill.structured.check import Checker
from tokenmill.structured.matching import followed, matches
from tokenmill.structured.schema import FORMAT_PATTERNS

PATTERNS = [
    "a*",
    "(a|b)*c",
    "(a+b?)+",
    "(a|ab)(c|bcd)?",
    "a{2,3}b{0,2}",
    "(a*)*b",
    "((a?b){2})*",
    "[^a]+.",
    "(|a|b){3}",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_following_a_text_says_what_re_says(pattern):
    for portable in (regex.search(f"^(?:{pattern})$"), regex.search(pattern), regex.whole(pattern)):
        rng, known = random.Random(1), re.compile(portable)
        for _ in range(300):
            text = "".join(rng.choice("abcd\n") for _ in range(rng.randint(0, 7)))
            assert followed(regex.read(portable), text) is (known.fullmatch(text) is not None), text


@pytest.mark.parametrize("pattern", ["(a+)+", "(a|a)*", "(a*)*b", "(a?){30}a{30}", "a*a*a*a*a*", "(.*a){9}"])
def test_no_expression_takes_for_ever(pattern):
    portable, text = regex.search(f"^(?:{pattern})$"), "a" * 2000 + "!"

    def ask() -> None:
        assert not matches(portable, text)
        checker = Checker({"type": "object", "patternProperties": {f"^{portable}$": False}})
        assert checker.misfit(f'{{"{text}": 1}}'.encode()) is None

    assert least_cpu_time(ask, 5.0) < 5.0


def test_formats_and_other_texts_are_matched():
    assert matches(FORMAT_PATTERNS["uuid"], "2eb8aa08-aa98-11ea-b4aa-73b441d16380")
    assert matches(FORMAT_PATTERNS["date-time"], "1963-06-19T08:30:06Z") and not matches(
        FORMAT_PATTERNS["time"], "8:30"
    )
    assert matches(FORMAT_PATTERNS["hostname"], "www.example.com")
    other = regex.other_than(frozenset(("x" * 200, "y")))
    assert matches(other, "x" * 199) and not matches(other, "x" * 200)


def test_an_answer_that_is_nested_deeply_is_not_judged():
    checker = Checker({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}})
    assert checker.misfit(b"[" * 5000 + b"]" * 5000) is None and checker.misfit(b"[[1]]") is not None
