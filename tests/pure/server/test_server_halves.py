"""Halves of characters, which JSON can escape and no text can hold, and what a model nests beyond reason: a model's
words and a client's JSON inside JSON never become an internal error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pure.server.conftest import Starter
from tokenmill.testing.fake_generator import FakeOptions
from tokenmill.text.messages.values import read_arguments, without_halves

USER = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
PLAIN = [{"type": "function", "function": FUNCTION}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "tools": PLAIN},
    "/v1/responses": {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        **{"model": "fake", "messages": [USER], "max_tokens": 4000},
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
    "/api/chat": {"model": "fake", "messages": [USER], "tools": PLAIN},
}
SAID = {
    "a half as an argument": r'{"name": "f", "arguments": {"\udfff": ["\ud800"]}}',
    "a half as a name": r'{"name": "f\ud800", "arguments": {"a": 1}}',
    "deep arguments": '{"name": "f", "arguments": {"a": %s}}' % ("[" * 1500 + "]" * 1500),
}


@pytest.mark.parametrize("title", SAID)
async def test_calls_of_a_model_reach_every_client(start: Starter, title: str) -> None:
    said = f"<tool_call>{SAID[title]}</tool_call>"
    served = await start(FakeOptions(script=said), tool_call_parser="hermes")
    for path, body in ASKED.items():
        for stream in (False, True):
            answer = await served.post(path, {**body, "stream": stream})
            assert answer.status_code == 200 and "nternal error" not in answer.text, path
            assert '"f' in answer.text
    assert not served.context.gate.open
    assert not any(kept.busy for shelf in served.context.store.shelves.values() for kept in shelf.kept.values())


def test_arguments_are_an_object_without_halves() -> None:
    assert read_arguments(r'{"a\ud800": ["\udfff", {"b": "\ud83d\ude00"}], "c": 1}') == {
        "a\ufffd": ["\ufffd", {"b": "\U0001f600"}],
        "c": 1,
    }
    for nothing in ("", "[1]", "{", "NaN", "[" * 9000, '{"a": NaN}'):
        assert read_arguments(nothing) == {}
    assert without_halves("a\ud800b\udc00") == "a\ufffdb\ufffd"


async def test_json_inside_of_json_may_hold_halves(start: Starter, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.values() | list | join }}{% endfor %}"
    template.write_text("{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}", encoding="utf-8")
    served = await start(chat_template=str(template))
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "\ud800"})}}
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]
    assert (await served.post("/apply-template", {"messages": talk})).json()["prompt"] == "Hi\ufffdHi"
    assert (await served.post("/v1/chat/completions", {"messages": talk, "max_tokens": 2})).status_code == 200
    for field in ("guided_json", "json_schema"):
        refused = await served.post("/v1/completions", {"prompt": "a", field: json.dumps({"const": "\ud800"})})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field
