"""A conversation's commands, its fit into the context, and how messages are typed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tokenmill.cli.conversation import Conversation, Messages
from tokenmill.cli.reading import read_message
from tokenmill.cli.terminal import Live, harmless
from tokenmill.core.errors import ParameterError, TooLargeError


def words(messages: Messages) -> int:
    """As if each word were a token."""
    return sum(len(message["content"].split()) for message in messages)


def talk(turns: int, size: int) -> Conversation:
    made = Conversation(system="be brief")
    for i in range(turns):
        made.say("user", f"q{i} " * size)
        made.say("assistant", f"a{i} " * size)
    return made


def test_what_fits_stays() -> None:
    made = talk(3, 10)
    made.say("user", "and now?")
    assert made.fit(words, 100) == 0
    assert len(made.turns) == 7


def test_oldest_turns_go_with_their_answers_and_the_system_message_stays() -> None:
    made = talk(4, 10)
    made.say("user", "and now?")
    assert made.fit(words, 80) == 4  # 60 of 80 are for the prompt, 84 are said
    assert [turn["content"].split()[0] for turn in made.turns] == ["q2", "a2", "q3", "a3", "and"]
    assert made.messages()[0] == {"role": "system", "content": "be brief"}


def test_a_stopped_answer_does_not_make_the_next_question_vanish() -> None:
    made = Conversation()
    for text in ("one " * 30, "two " * 30):
        made.say("user", text)
    assert made.fit(words, 60) == 1
    assert len(made.turns) == 1 and made.turns[0]["content"].startswith("two")


def test_a_question_that_is_too_long_alone_is_refused_and_forgotten() -> None:
    made = talk(1, 5)
    made.say("user", "word " * 100)
    with pytest.raises(TooLargeError, match="102 tokens, and the context of 80 has room for 60"):
        made.fit(words, 80)
    assert made.turns == []


def test_a_question_without_answer_is_taken_back() -> None:
    made = talk(1, 1)
    made.take_back()
    assert len(made.turns) == 2
    made.say("user", "hm")
    made.take_back()
    assert len(made.turns) == 2


def test_commands(tmp_path: Path) -> None:
    made = talk(1, 1)
    assert "/save FILE" in made.command("/help")
    made.command("/temp 0.25")
    assert made.temperature == 0.25
    made.command("/temp")
    assert made.temperature is None
    made.command("/system  speak like a miller ")
    assert made.system == "speak like a miller"
    file = tmp_path / "talk.json"
    assert "2 turns" in made.command(f"/save {file}")
    assert json.loads(file.read_text()) == made.messages()
    made.command("/clear")
    assert made.messages() == [{"role": "system", "content": "speak like a miller"}]
    made.command("/system")
    assert made.messages() == []
    assert not made.ended
    made.command("/exit")
    assert made.ended


@pytest.mark.parametrize("line", ["/what", "/temp warm", "/temp -1", "/temp nan", "/save", "/save /no/such/folder/x"])
def test_mistakes_in_commands_are_told(line: str) -> None:
    with pytest.raises(ParameterError):
        Conversation().command(line)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["hello"], "hello"),
        (["one \\", "two\\", "three"], "one \ntwo\nthree"),
        (['"""', "def f():", "", '    return "x"', '"""'], 'def f():\n\n    return "x"'),
        (["", "never read"], ""),
    ],
)
def test_messages_of_several_lines(typed: list[str], message: str) -> None:
    lines = iter(typed)
    asked: list[str] = []

    def ask(prompt: str) -> str:
        asked.append(prompt)
        return next(lines)

    assert read_message(ask) == message
    assert asked[0] != asked[-1] or len(asked) == 1


def test_a_model_cannot_steer_the_terminal() -> None:
    assert harmless("a\tb\nc é 漢 🙂") == "a\tb\nc é 漢 🙂"
    assert harmless("\x1b[31m\x07\r\x9b2J\x7f") == "\ufffd[31m\ufffd\ufffd\ufffd2J\ufffd"


@pytest.mark.parametrize("terminal", [True, False])
def test_growing_texts_are_written_once(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdout", screen)
    live = Live()
    for text in ("He", "Hello", "Hello", "Hello \x1b!"):
        live.show(text)
    live.end()
    assert screen.getvalue() == ("Hello \ufffd!\n" if terminal else "Hello \x1b!\n")
    assert live.shown == "Hello \x1b!"
