"""Answers on a terminal: words stay whole, code stays as it is, reasoning is folded, nothing steers."""

from __future__ import annotations

import io
import random
import re

import pytest

from tokenmill.cli.screen import Screen, Wrapped, cells

STEERING = re.compile(r"\x1b\[2m|\x1b\[0m|\r\x1b\[K")


def wrapped(text: str, columns: int, pieces: int = 0) -> str:
    """The text in so many pieces, cut anywhere."""
    rng, made = random.Random(pieces), Wrapped(columns)
    cuts = sorted(rng.choices(range(len(text) + 1), k=pieces))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return "".join(map(made.push, parts)) + made.end()


@pytest.mark.parametrize("columns", [20, 33, 80])
def test_words_stay_whole_however_they_come(columns: int) -> None:
    rng = random.Random(columns)
    text = " ".join("w" * rng.randint(1, 15) for _ in range(200)) + "\n\n  - a point\n" + "x" * 100 + " end"
    whole = wrapped(text, columns)
    assert whole.split() == text.split()
    assert all(cells(line) <= columns or " " not in line.strip() for line in whole.split("\n"))
    assert "\n\n  - a point\n" in whole
    for pieces in (1, 7, 300):
        assert wrapped(text, columns, pieces) == whole


def test_code_keeps_its_lines_and_wide_letters_count_twice() -> None:
    code = "```python\n" + "a = 1  # " + "long " * 20 + "\n```\n"
    assert wrapped("See:\n" + code + "so " * 20, 20).startswith("See:\n" + code)
    assert cells("磨坊 e\u0301") == 6
    assert [cells(line) for line in wrapped("磨" * 25, 20).split("\n")] == [20, 20, 10]


both = pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])


def shown_on(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> io.StringIO:
    """What is written to standard output."""
    made = io.StringIO()
    monkeypatch.setattr(made, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdout", made)
    monkeypatch.setenv("COLUMNS", "40")
    return made


@both
@pytest.mark.parametrize("folded", [True, False])
def test_reasoning_is_folded_on_a_terminal_and_left_out_of_pipes(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, folded: bool
) -> None:
    stream = shown_on(monkeypatch, terminal)
    screen = Screen(folded=folded)
    for part in ("let me ", "think \x1b[2J about it"):
        screen.reason(part)
    screen.say("The answer is 42.\x07")
    screen.end()
    assert (screen.thought, screen.said) == ("let me think \x1b[2J about it", "The answer is 42.\x07")
    text = stream.getvalue()
    if not stream.isatty():
        assert text == "The answer is 42.\x07\n"
        return
    assert "\x1b" not in STEERING.sub("", text) and "\x07" not in text and text.endswith("The answer is 42.\ufffd\n")
    assert ("(thought for 6 words; /thinking shows them)" in text) == folded
    assert ("about it" in STEERING.sub("", text)) != folded


@both
def test_an_answer_without_text_ends_its_line(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    stream = shown_on(monkeypatch, terminal)
    Screen().end()
    assert STEERING.sub("", stream.getvalue()).replace("...", "") == "\n"


@both
def test_lines_may_stay_as_they_come(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    stream = shown_on(monkeypatch, terminal)
    screen = Screen(wrap=False)
    screen.say("word " * 30)
    screen.end()
    assert "word " * 30 in stream.getvalue()
