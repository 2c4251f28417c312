"""Lark as the engine reads it: what has no effect is refused by name, and errors are about the text that was given."""

from __future__ import annotations

import pytest
from tests.pure.structured.bytewise import COMPILER, says

from tokenmill.core.errors import ParameterError


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('?start: "a" | b\n!b: "b"i', ["a", "b", "B"], ["A"]),
        ("start[lazy]: /a+b/", ["ab", "aab"], ["a"]),
        ('start: x "temperature"\nx[max_tokens=2]: /a+/', ["aatemperature"], ["aaatemperature"]),
        ('start: "[stop]:" | "x[temperature=1]: y" // x[stop]: z', ["[stop]:", "x[temperature=1]: y"], ["x"]),
        ('%llguidance {"allow_initial_skip": true}\n%ignore " "\nstart: "a" "b"', [" a b", "ab"], ["b"]),
        ('start: "root ::= x" %json {"const": 1}', ["root ::= x1"], ["root ::= x2"]),
    ],
)
def test_what_is_read(text, good, bad):
    constraint = COMPILER.constraint({"grammar": text})
    assert [says(constraint, each) for each in good + bad] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("start: x\nx[temperature=0.5]: /a+/", "'temperature'.*no effect"),
        ('start: x "b"\nx[lazy, stop="q"]: /a*/', "'stop'.*no effect"),
        ("start: x\n?x[capture]: /a+/", "'capture'.*no effect"),
        ('start: x\nx[suffix=/b/, stop_capture="q"]: /a+/', "'stop_capture'.*no effect"),
        ('%llguidance {"lenient": true}\nstart: "a"', "no setting 'lenient'"),
        ("%llguidance yes\nstart: a", "%llguidance must be followed by JSON"),
        ("start: %json yes", "%json must be followed by JSON"),
        ("start: <|nope|>", r"unknown special token: \"<\|nope\|>\""),
        ('start: "<a>" (', "Expected token"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises(ParameterError, match=words) as caught:
        COMPILER.constraint({"grammar": text})
    assert '"no_forcing": true' not in str(caught.value)
