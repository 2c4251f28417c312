"""Tools, reasoning and structures over HTTP with the demo model: whole and streamed answers say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.demo import demo_dir
from tokenmill.testing.fake_generator import byte_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather.", "parameters": CITY},
}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
HELLO = [{"role": "user", "content": "Hello"}]
SUM = [{"role": "user", "content": "What is 17 plus 5?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
PATH = "/v1/chat/completions"
"""(body, finish reason, does it call, does it reason)"""
CASES: dict[str, tuple[dict[str, Any], str, bool, bool]] = {
    "auto": ({"messages": ASK, "tools": [WEATHER]}, "tool_calls", True, False),
    "auto, text": ({"messages": HELLO, "tools": [WEATHER]}, "stop", False, False),
    "required": ({"messages": SUM, "tools": [WEATHER], "tool_choice": "required"}, "tool_calls", True, False),
    "named": ({"messages": SUM, "tools": [WEATHER], "tool_choice": NAMED}, "stop", True, False),
    "strict": ({"messages": ASK, "tools": [STRICT]}, "tool_calls", True, False),
    "one at a time": (
        {"messages": ASK, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
        "tool_calls",
        True,
        False,
    ),
    "tools or JSON": ({"messages": ASK, "tools": [WEATHER], "response_format": FORM}, "tool_calls", True, False),
    "reasoning": ({"messages": SUM, "reasoning_effort": "low"}, "stop", False, True),
    "no reasoning": ({"messages": SUM, "reasoning_effort": "none"}, "stop", False, False),
    "hidden": ({"messages": SUM, "reasoning_effort": "low", "include_reasoning": False}, "stop", False, False),
    "budget": ({"messages": SUM, "reasoning_effort": "low", "thinking_token_budget": 5}, "stop", False, True),
    "reasoning, then JSON": (
        {"messages": SUM, "reasoning_effort": "low", "response_format": FORM},
        "stop",
        False,
        True,
    ),
    "two samples": (
        {"messages": ASK, "tools": [WEATHER], "n": 2, "temperature": 0.3, "seed": 3},
        "tool_calls",
        True,
        False,
    ),
}


@pytest.fixture(scope="module")
def demo(launch):
    return launch("--engines", "0", model=Path(demo_dir()))


def streamed(demo: Any, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The message of each choice, put together from its chunks as OpenAI's documents say."""
    found: dict[int, dict[str, Any]] = {}
    with demo.client.stream("POST", demo.url + PATH, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            message = found.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": [], "finish": None})
            assert message["finish"] is None
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"]) and call["type"] == "function"
                    message["calls"].append([call["function"]["name"], ""])
                else:
                    assert set(call["function"]) == {"arguments"}
                message["calls"][call["index"]][1] += call["function"]["arguments"]
            message["finish"] = choice["finish_reason"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_whole_and_streamed_answers_agree(demo, name):
    body, finish, calls, reasons = CASES[name]
    body = {"temperature": 0, "max_tokens": 120, **body}
    whole = demo.post(PATH, body).json()
    parts = streamed(demo, body)
    for choice in whole["choices"]:
        message = choice["message"]
        made = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
        part = parts[choice["index"]]
        assert part["calls"] == made and part["finish"] == choice["finish_reason"] == finish
        assert part["content"] == (message["content"] or "") and part["reasoning"] == message.get("reasoning", "")
        assert bool(made) == calls and bool(message.get("reasoning")) == reasons
        for _, arguments in made:
            assert set(json.loads(arguments)) == {"city"}
        if "response_format" in body and not made:
            assert isinstance(json.loads(message["content"])["answer"], int)
    if reasons:
        assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < whole["usage"]["completion_tokens"]


def test_the_budget_ends_reasoning(demo):
    body = {"messages": SUM, "reasoning_effort": "low", "temperature": 0, "max_tokens": 120}
    long = demo.post(PATH, body).json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    found = demo.post(PATH, {**body, "thinking_token_budget": 4}).json()
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 4 < long
    none = demo.post(PATH, {**body, "thinking_token_budget": 0}).json()["choices"][0]["message"]
    assert not none.get("reasoning") and none["content"]


SPELLINGS = [
    {"structured_outputs": {"regex": "[0-9]{2}"}},
    {"guided_regex": "[0-9]{2}"},
    {"regex": "[0-9]{2}"},
    {"guided_choice": ["12", "34"]},
    {"ebnf": "root ::= [0-9] [0-9]"},
    {"grammar": "root ::= [0-9] [0-9]"},
    {"guided_grammar": "start: /[0-9]{2}/"},
    {"guided_json": {"type": "integer", "minimum": 10, "maximum": 99}},
    {"json_schema": '{"type": "integer", "minimum": 10, "maximum": 99}'},
    {"response_format": {"type": "json_object", "schema": {"type": "integer", "minimum": 10, "maximum": 99}}},
    {"response_format": {"type": "json_schema", "schema": {"type": "integer", "minimum": 10, "maximum": 99}}},
    {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "[0-9]{2}"}}},
    {
        "response_format": {
            "type": "structural_tag",
            "format": {"type": "tag", "begin": "", "content": {"type": "const_string", "value": "12"}, "end": ""},
        }
    },
]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: next(iter(s)))
def test_every_spelling_of_a_structure(demo, spelling):
    answer = demo.post(PATH, {"messages": SUM, "max_tokens": 20, "temperature": 1, **spelling})
    text = answer.json()["choices"][0]["message"]["content"]
    assert len(text) == 2 and text.isdigit(), answer.text


def test_free_text_with_held_spans(demo):
    tag = {"begin": "22", "content": {"type": "const_string", "value": "!!"}, "end": ";"}
    form = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["22"], "tags": [tag]}}
    answer = demo.post(PATH, {"messages": SUM, "max_tokens": 20, "temperature": 0, "response_format": form})
    assert "22!!;" in answer.json()["choices"][0]["message"]["content"]


BAD = [
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "twice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "other"}}, "tool_choice", "must be"),
    ({"tools": [WEATHER], "tool_choice": "some"}, "tool_choice", ""),
    ({"regex": "a", "guided_choice": ["b"]}, "regex", "not both"),
    ({"json_schema": "{"}, "json_schema", "not valid JSON"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "needs format"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "nothing"}}}, "response_format", "nothing"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "sequence", "elements": []}}}, None, "elements"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", ""),
    ({"guided_json": {"enum": ["x" * 60] * 12_000}}, "structured_outputs", "guided_json is larger than"),
    ({"guided_json": {"enum": ["x" * 60] * 5_000}}, "guided_json", "larger than"),
    ({"regex": "(?=x)"}, "regex", "look"),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "(?=x)"}}}},
                }
            ],
            "tool_choice": "required",
        },
        "tools",
        "#/properties/a/pattern",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_bad_input_is_refused_by_name(demo, fields, param, words):
    answer = demo.post(PATH, {"messages": ASK, "max_tokens": 5, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], error
    assert param is None or param in str(error["param"]), error


def test_bytes_have_no_tool_format():
    from tokenmill.text.messages.detect import find_format

    assert find_format(byte_tokenizer().chat_template).calls is None
