"""A conversation's commands, its fit into the context, and how messages are typed."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest

from tokenmill.cli.conversation import Conversation, Messages
from tokenmill.cli.interrupts import Interrupts
from tokenmill.cli.screen import Screen
from tokenmill.cli.terminal import Live, harmless
from tokenmill.cli.typed_messages import messages, read_message
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


def test_bye_ends_and_other_models_are_asked_for() -> None:
    made = Conversation(model="demo")
    assert made.command("/model") == "The model is demo." and made.settings.model is None
    assert made.command("/model ./other.gguf") == "" and made.settings.model == "./other.gguf"
    for word in ("/bye", "/quit"):
        made.ended = False
        made.command(word)
        assert made.ended


def test_what_was_saved_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    made, again = talk(2, 1), Conversation(system="other")
    made.command(f"/save {file}")
    assert "4 turns" in again.command(f"/load {file}") and again.messages() == made.messages()
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    again.command(f"/load {file}")
    assert again.messages() == [{"role": "user", "content": "hi"}] and again.system is None


def test_calls_wait_for_their_results(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text('[{"name": "add"}, {"type": "function", "function": {"name": "sub", "parameters": {}}}]')
    made = Conversation()
    assert made.command(f"/tools {file}") == "Offered: add, sub."
    assert all(tool["type"] == "function" for tool in made.settings.tools)
    made.say("user", "add and subtract")
    made.answer("", "hm", [("a", "add", "{}"), ("b", "sub", "{}")])
    assert made.thought == "hm" == made.command("/thinking")
    made.say("user", "3")
    assert [call["id"] for call in made.open_calls()] == ["b"]
    made.say("user", "1")
    assert [turn["role"] for turn in made.turns] == ["user", "assistant", "tool", "tool"] and not made.open_calls()
    assert [turn.get("tool_call_id") for turn in made.turns[2:]] == ["a", "b"]
    made.take_back()  # the answer to it was stopped: the result can be given again
    assert [call["id"] for call in made.open_calls()] == ["b"]
    made.say("user", "1")
    made.answer("3 and 1", "")
    made.say("user", "thanks")
    assert made.fit(words, 4) == 5 and [turn["content"] for turn in made.turns] == ["thanks"]  # a call leaves whole
    made.command("/tools")
    assert made.settings.tools == []


def test_reasoning_can_be_unfolded() -> None:
    made = Conversation()
    made.command("/thinking on")
    assert not made.settings.folded
    made.command("/thinking off")
    assert made.settings.folded


@pytest.mark.parametrize("text", ["{", "3", '[{"role": "king", "content": "x"}]', '[{"role": "user"}]', "[" * 100_000])
def test_files_that_hold_nothing_of_use(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    made = talk(1, 1)
    for command in ("/load", "/tools"):
        with pytest.raises(ParameterError, match=r"x\.json"):
            made.command(f"{command} {file}")
    assert len(made.turns) == 2 and made.settings.tools == []


CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
BAD_MESSAGES: dict[str, object] = {
    "calls-are-a-number": {"tool_calls": 5},
    "a-call-without-function": {"tool_calls": [{"x": 1}]},
    "a-function-without-name": {"tool_calls": [{"function": {}}]},
    "a-picture": {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    "a-name-that-is-a-number": {"name": 5},
    "half-a-character": {"content": "\ud800"},
    "nothing": {"content": None},
    "roles": {"role": ["user"]},
    "another-role": {"role": "king"},
    "what-nobody-reads": {"weights": [1]},
    "no-object": "hi",
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_conversations_of_other_programs_are_refused_by_what_is_wrong(tmp_path: Path, name: str) -> None:
    bad, file, made = BAD_MESSAGES[name], tmp_path / "x.json", talk(1, 1)
    before = made.messages()
    turn = {"role": "assistant", "content": "hm", **bad} if isinstance(bad, dict) else bad
    file.write_text(json.dumps([{"role": "user", "content": "hi"}, turn]))
    with pytest.raises(ParameterError, match=r"x\.json"):
        made.command(f"/load {file}")
    assert made.messages() == before


def test_conversations_of_other_programs_go_on(tmp_path: Path) -> None:
    file, made = tmp_path / "x.json", Conversation()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    plain = {"role": "assistant", "content": "b", "tool_calls": None, "refusal": None}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    turns = [{"role": "user", "content": parts}, plain, {"role": "user", "content": "d"}, called]
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({"messages": turns}).encode())  # as Windows writes it
    made.command(f"/load {file}")
    assert [turn["content"] for turn in made.turns] == ["one\ntwo", "b", "d", ""]
    made.say("user", "2")
    made.say("user", "3")
    assert [turn["role"] for turn in made.turns[-2:]] == ["tool", "tool"] and not made.open_calls()
    assert made.turns[-2]["tool_call_id"] != made.turns[-1]["tool_call_id"]
    made.command(f"/save {file}")
    again = Conversation()
    again.command(f"/load {file}")
    assert again.messages() == made.messages()


@pytest.mark.parametrize(
    "tools",
    [
        [],
        {},
        {"name": 1},
        {"name": ""},
        {"name": "f", "parameters": "x"},
        {"function": "f"},
        [{"name": "f"}, {"name": "f"}],
        [{"name": "f", "execute": "rm"}],
    ],
    ids=str,
)
def test_tools_without_a_meaning_are_refused(tmp_path: Path, tools: object) -> None:
    file, made = tmp_path / "x.json", Conversation()
    file.write_text(json.dumps(tools))
    with pytest.raises(ParameterError, match=r"x\.json"):
        made.command(f"/tools {file}")
    assert made.settings.tools == []


def test_names_that_are_no_files_are_told_and_nothing_waits(tmp_path: Path) -> None:
    pipe, large, circle = tmp_path / "pipe", tmp_path / "large", tmp_path / "circle"
    os.mkfifo(pipe)
    circle.symlink_to(circle)
    with large.open("wb") as file:
        file.truncate(1 << 30)
    made = talk(1, 1)
    names = [str(pipe), str(large), str(circle), str(tmp_path), "/dev/zero", "~no-such-user/x", "x" * 5000, "a\0b"]
    for name in names:
        for command in ("/load", "/tools"):
            with pytest.raises(ParameterError):
                made.command(f"{command} {name}")
    for name in (str(circle), str(tmp_path), "~no-such-user/x", "x" * 5000, "a\0b", "/dev/full"):
        with pytest.raises(ParameterError, match="cannot be written"):
            made.command(f"/save {name}")


def test_a_save_that_fails_leaves_the_file_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link, made = tmp_path / "talk.json", tmp_path / "link.json", talk(1, 1)
    link.symlink_to(file)
    made.command(f"/save {link}")
    assert link.is_symlink() and json.loads(file.read_text()) == made.messages()
    before = file.read_bytes()
    made.say("user", "half a character: \udcff")
    with pytest.raises(ParameterError, match="cannot be written"):
        made.command(f"/save {link}")
    assert file.read_bytes() == before and {each.name for each in tmp_path.iterdir()} == {"talk.json", "link.json"}


@pytest.mark.parametrize("line", ["/help me", "/? x", "/clear all", "/bye now", "/exit 1", "/quit x"])
def test_words_that_a_command_does_not_take_are_refused(line: str) -> None:
    made = talk(1, 1)
    with pytest.raises(ParameterError, match="takes no argument"):
        made.command(line)
    assert not made.ended and len(made.turns) == 2


@pytest.mark.parametrize(
    ("data", "encoding", "lines"),
    [
        (b"hi\r\n/bye\r\n", "utf-8", ["hi", "/bye"]),
        (b"no end", "utf-8", ["no end"]),
        (b"", "utf-8", []),
        (b"\xff\n", "utf-8", None),
        (b"caf\xc3\xa9\n", "ascii", None),
    ],
)
def test_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch, data: bytes, encoding: str, lines: list[str] | None) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding=encoding))
    if lines is None:
        with pytest.raises(ParameterError, match="not text"):
            list(messages(Interrupts()))
    else:
        assert list(messages(Interrupts())) == lines


MISTAKES = ["/what", "/temp warm", "/temp -1", "/temp nan", "/save", "/save /no/such/folder/x", "/load", "/load /no/x"]


@pytest.mark.parametrize("line", [*MISTAKES, "/tools /no/x", "/thinking hard"])
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
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdout", screen)
    live = Live()
    for text in ("He", "Hello", "Hello", "Hello \x1b!"):
        live.show(text)
    live.end()
    assert screen.getvalue() == ("\x1b[2m...\x1b[0m\r\x1b[KHello \ufffd!\n" if terminal else "Hello \x1b!\n")
    assert live.shown == "Hello \x1b!"


@pytest.mark.parametrize(("term", "no_colour"), [("dumb", ""), ("dumb", "1"), ("xterm", "1")])
def test_plain_terminals_get_no_control_sequences(monkeypatch: pytest.MonkeyPatch, term: str, no_colour: str) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_colour)
    for folded in (True, False):
        screen = Screen(folded=folded)
        screen.reason("let me think ")
        screen.reason("about it")
        screen.say("Yes.")
        screen.end()
    live = Live()
    live.show("Yes.")
    live.end()
    text = stream.getvalue()
    if term == "dumb":
        assert "\x1b" not in text and "\r" not in text and text.count("Yes.\n") == 3
        assert "(thought for 5 words; /thinking shows them)\nYes.\n" in text
    else:  # what was written is taken back, but nothing is dim
        assert set(re.findall(r"\x1b\[\d*[A-Za-z]", text)) == {"\x1b[K"}
