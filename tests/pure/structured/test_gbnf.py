"""GBNF as people write it: alternatives that begin a line, comments between them, a rule that is there twice."""

from __future__ import annotations

import pytest
from bytewise import COMPILER, says

from tokenmill.core.errors import ParameterError


def compiled(text):
    return COMPILER.constraint({"grammar": text})


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::=\n  "a"\n  | "b"', ["a", "b"], ["", "ab"]),
        ('root ::= "a" # one\n  # another\n  | item\n\nitem ::= "#" | "|"\n', ["a", "#", "|"], ["b"]),
        ('root ::= [#|"] "\\"|" | [\\]\\n]\n| "x ::= y"', ['#"|', '|"|', "]", "x ::= y"], ["x"]),
        ('root ::= x-y "a"{2}\nx-y ::= "c"?\n', ["aa", "caa"], ["a"]),
    ],
)
def test_lines(text, good, bad):
    constraint = compiled(text)
    assert [says(constraint, each) for each in good + bad] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize("text", ['root ::= "a"\nroot ::= "b"', 'root ::= x\nx ::= "a"\n# x\nx::= "b"'])
def test_a_rule_that_is_there_twice_is_refused(text):
    with pytest.raises(ParameterError, match="twice"):
        compiled(text)
